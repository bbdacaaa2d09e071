"""Each kind of error: its exit code, its one line, and where its traceback went."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.cli.failures import RunFailed, report
from gspo.cli.main import VERBS, main
from gspo.errors import ConfigError, DataError, DivergenceError, GspoError, Interrupted, RewardError


def raised(error: BaseException, directory: Path | None = None) -> BaseException:
    """The error as it arrives: with a traceback, and inside RunFailed when a run had started."""
    try:
        try:
            raise error
        except Exception as inner:
            if directory is None:
                raise
            raise RunFailed(directory) from inner
    except BaseException as outer:
        return outer


CODES: list[tuple[BaseException, int, str]] = [
    (ConfigError("wrong value"), 2, "gspo: wrong value\n"),
    (DataError("bad row"), 2, "gspo: bad row\n"),
    (RewardError("raised"), 1, "gspo: raised\n"),
    (GspoError("else"), 1, "gspo: else\n"),
    (
        Interrupted("runs/x"),
        130,
        "gspo: Interrupted; everything up to here is saved in runs/x. Go on with: gspo train --resume runs/x\n",
    ),
    (KeyboardInterrupt(), 130, "gspo: stopped at once; what was saved before is intact.\n"),
]


@pytest.mark.parametrize(("error", "code", "said"), CODES, ids=lambda item: type(item).__name__)
def test_codes(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str) -> None:
    assert report(raised(error)) == code
    assert capsys.readouterr().err == said


def test_a_failed_run_keeps_the_traceback_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").write_text("before\n")
    assert report(raised(DivergenceError("not finite"), tmp_path)) == 1
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("before\n") and "Traceback" in log and "DivergenceError: not finite" in log
    assert capsys.readouterr().err == f"gspo: not finite (traceback: {tmp_path / 'log.txt'})\n"


@pytest.mark.parametrize("started", [True, False])
def test_a_bug_says_so_and_where_its_traceback_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report(raised(ZeroDivisionError("oh"), tmp_path if started else None)) == 1
    said = capsys.readouterr().err
    (log,) = tmp_path.iterdir()
    assert said == f"gspo: this is a bug in gspo: ZeroDivisionError: oh. The traceback is in {log}; do report it.\n"
    assert "ZeroDivisionError: oh" in log.read_text()


def test_a_log_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(raised(DivergenceError("not finite"), tmp_path / "gone")) == 1
    assert capsys.readouterr().err == "gspo: not finite\n"


@pytest.mark.parametrize("way", ["flag", "variable", "neither"])
def test_tracebacks_are_shown_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("GSPO_TRACEBACK", "1" if way == "variable" else "0")
    assert main(["train", str(tmp_path / "no.toml"), *(["--traceback"] if way == "flag" else [])]) == 2
    assert ("Traceback" in capsys.readouterr().err) == (way != "neither")


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {verb} " in said for verb in VERBS)
    assert main([]) == 2
