"""The grader ``json``: whatever schema and answer it gets, it gives 1, 0 or None."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.tasks.graders.json import json

pytest.importorskip("jsonschema")


@pytest.mark.parametrize(
    ("answer", "schema", "expected"),
    [
        ('{"a": 1}', {"required": ["a"]}, 1.0),
        ('{"b": 1}', '{"required": ["a"]}', 0.0),
        ("1" + "0" * 400, {"multipleOf": 0.5}, 0.0),  # beyond all floats
        ("1e999", {"multipleOf": 0.5}, 0.0),
        ("[" * 5000 + "]" * 5000, {"type": "array"}, 0.0),
        ("1", '{"not":' * 3000 + "{}" + "}" * 3000, None),
        ("1", {"$schema": 5}, None),
        ("1", {"$ref": "#/nowhere"}, None),
        ("1", {"pattern": "("}, None),
        ("1", None, None),
        ("1", True, 1.0),
    ],
)
def test_hostile_answers_and_schemas(answer: str, schema: Any, expected: float | None) -> None:
    scores = json([answer, "1"], [schema, {"type": "integer"}])
    assert scores == [expected, 1.0]
