"""Which run and checkpoint is gone on with, and what is said of one that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.config import Config
from gspo.errors import CheckpointError
from gspo.training.checkpoint import damage, read_state
from gspo.training.resume import _newest_run, run_folder


def make_run(parent: Path, folder: str, name: str) -> Path:
    checkpoint = parent / folder / "checkpoints" / "0"
    checkpoint.mkdir(parents=True)
    Config().with_values({"run.name": name}).save(parent / folder / "config.toml")
    return parent / folder


def test_auto_leaves_a_run_alone_that_is_named_like_a_second_one(tmp_path: Path) -> None:
    mine = make_run(tmp_path, "tiny", "tiny")
    make_run(tmp_path, "tiny-2", "tiny-2")  # of tiny-2.toml
    assert _newest_run(tmp_path, "tiny") == mine
    second = make_run(tmp_path, "tiny-3", "tiny")
    assert _newest_run(tmp_path, "tiny") == second
    assert _newest_run(tmp_path, "tiny-2") == tmp_path / "tiny-2"


def test_a_name_too_long_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no run"):
        run_folder(Config(), "a" * 5000)


def test_an_empty_manifest_vouches_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert damage(tmp_path) == "its manifest names no file"


@pytest.mark.parametrize("state", ["{}", "[1]", '{"format": 1, "unheard_of": 3}'])
def test_a_state_of_another_version(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(CheckpointError, match=r"another version of gspo, or edited.*--model\.path"):
        read_state(tmp_path)
