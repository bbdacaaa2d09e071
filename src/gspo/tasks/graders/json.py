"""``json``: the answer is a JSON value that a JSON schema allows."""

from __future__ import annotations

import functools
import json as standard_json
import re
from collections.abc import Sequence
from typing import Any

from gspo.tasks.graders.answers import answer_part, golds, text_of

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def json(completions: Sequence[Any], schema: Sequence[Any]) -> list[float | None]:
    """1 when the answer is valid against the row's schema, 0 when it is not or is no JSON.

    The schema is an object, true or false, or text with one. A row without a valid schema is unscored.
    """
    checks = [_validator(value) for value in map(_as_text, golds("json", len(completions), ("schema", schema)))]
    return [
        None if check is None else _allowed(check, answer_part(text_of(completion)))
        for completion, check in zip(completions, checks, strict=True)
    ]


def read_json(text: str) -> Any:
    """The last fenced block, else the whole text, as strict JSON. Raises ValueError when it is not."""
    fenced = _FENCED.findall(text)
    return standard_json.loads(fenced[-1] if fenced else text, parse_constant=_refuse)


def _allowed(validator: Any, text: str) -> float | None:
    from referencing.exceptions import Unresolvable

    try:
        return float(validator.is_valid(read_json(text)))
    except Unresolvable:  # the schema points to another one; it is never fetched
        return None
    except (ValueError, RecursionError, OverflowError):  # also a number that its multipleOf cannot divide
        return 0.0


def _as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else standard_json.dumps(schema)


@functools.lru_cache(1024)
def _validator(schema: str) -> Any:
    """Made once a schema; None when it is none."""
    import jsonschema
    import referencing

    try:
        value = standard_json.loads(schema)
        kind = jsonschema.validators.validator_for(value, default=jsonschema.Draft202012Validator)
        kind.check_schema(value)
        return kind(value, registry=referencing.Registry())
    except (ValueError, TypeError, AttributeError, RecursionError, jsonschema.SchemaError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
