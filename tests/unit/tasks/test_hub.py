"""Parquet files and Hugging Face data sets, whole and streamed; all local."""

from __future__ import annotations

import datetime
import decimal
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gspo.config import Config
from gspo.errors import ConfigError, DataError, GspoError
from gspo.tasks import hub, load_task
from gspo.tasks.hub import StreamSource, open_dataset, read_dataset, read_parquet
from gspo.tasks.lists import ListSource
from gspo.training.loop import train

NUMBERS = [{"prompt": f"question {n}", "answer": n} for n in range(50)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def folder_of_files(tmp_path: Path, kind: str = "parquet") -> str:
    """50 rows in three files, as a streaming data set finds them, or as ``save_to_disk`` writes them."""
    folder = tmp_path / "files"
    if kind == "saved":
        datasets.Dataset.from_list(NUMBERS).save_to_disk(folder, num_shards=3)
        return f"hf:{folder}"
    for part in range(3):
        rows = NUMBERS[part * 20 : part * 20 + 20]
        path = parquet(folder / f"train-{part}.parquet", rows)
        if kind == "jsonl":
            path.unlink()
            path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"hf:{folder}"


def contents(prompts: Any) -> list[Any]:
    return [prompt.content for prompt in prompts]


def stream(spec: str, *, seed: int = 0, shuffle: bool = True, skip: tuple[str, ...] = ()) -> StreamSource:
    return StreamSource(open_dataset(spec, streaming=True), spec, seed, shuffle, "prompt", skip)


def test_a_parquet_file_gives_plain_columns(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "a", "name": None}],
            "answer": {"parts": [1, 2], "unit": None},
            "day": datetime.date(2024, 5, 1),
            "at": datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC),
            "price": decimal.Decimal("1.50"),
            "id": 11,
        },
        {
            "prompt": [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "b"}],
            "answer": None,
            "day": None,
            "at": None,
            "price": None,
            "id": 12,
        },
    ]
    first, second = read_parquet(parquet(tmp_path / "p.parquet", rows))
    assert first.prompt_id == "11" and first.content == [{"role": "user", "content": "a"}]
    assert second.content == [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "b"}]
    assert first.columns == {
        "answer": {"parts": [1, 2], "unit": None},
        "day": "2024-05-01",
        "at": "2024-05-01T12:00:00+00:00",
        "price": "1.50",
        "id": 11,
    }
    assert second.columns == {"answer": None, "day": None, "at": None, "price": None, "id": 12}
    json.dumps([first.columns, second.columns], allow_nan=False)


def test_a_saved_folder_and_its_splits(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(NUMBERS), "test": datasets.Dataset.from_list(NUMBERS[:3])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    splits["test"].with_format("numpy").save_to_disk(tmp_path / "one")
    assert contents(read_dataset(f"hf:{tmp_path}/both")) == [row["prompt"] for row in NUMBERS]
    assert len(read_dataset(f"hf:{tmp_path}/both:test")) == len(read_dataset(f"hf:{tmp_path}/one")) == 3
    assert [type(p.columns["answer"]) for p in read_dataset(f"hf:{tmp_path}/one")] == [int] * 3
    assert contents(stream(f"hf:{tmp_path}/both:test", shuffle=False).take(4))[-1] == "question 0"
    with pytest.raises(DataError, match=r"there is no split 'dev'; there is: train, test. Name one: hf:.*both:train"):
        read_dataset(f"hf:{tmp_path}/both:dev")
    with pytest.raises(DataError, match="there is one split in it"):
        read_dataset(f"hf:{tmp_path}/one:dev")


def test_a_folder_of_files_with_splits_and_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for name, rows in {"test": NUMBERS[:4], "validation": NUMBERS[4:10]}.items():
        (tmp_path / "d" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert contents(read_dataset("hf:./d:validation[1:3]")) == ["question 5", "question 6"]
    assert [p.prompt_id for p in read_dataset("hf:./d:test", most=2)] == ["hf:./d:test/1", "hf:./d:test/2"]
    with pytest.raises(DataError, match=r"no split 'train'; there is: .*Name one: hf:\./d:"):
        read_dataset("hf:./d")


def test_a_test_split_is_used_only_when_it_is_named(tmp_path: Path) -> None:
    for name, rows in {"train": NUMBERS[:40], "test": NUMBERS[40:]}.items():
        parquet(tmp_path / "d" / f"{name}.parquet", rows)
    (tmp_path / "r.py").write_text("def f(completions, answer):\n    return [1.0] * len(answer)\n")
    base = {"task.prompts": f"hf:{tmp_path}/d", "task.reward": f"{tmp_path}/r.py:f"}
    split = load_task(Config().with_values(base))
    named = load_task(Config().with_values(base | {"eval.prompts": f"hf:{tmp_path}/d:test", "eval.num_prompts": 8}))
    assert len(split.heldout) == 4 and {p.columns["answer"] for p in split.heldout} <= set(range(40))
    assert not set(contents(split.heldout)) & set(contents(split.train.take(36)))
    assert [p.columns["answer"] for p in named.heldout] == list(range(40, 48))
    assert sorted(p.columns["answer"] for p in named.train.take(40)) == list(range(40))


@pytest.mark.parametrize(("kind", "shuffle"), [("parquet", True), ("parquet", False), ("jsonl", True), ("saved", True)])
def test_a_stream_goes_on_exactly_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shuffle: bool
) -> None:
    """Stopped inside a block, at a block's end, at a file's end, at an epoch's end, and in the third epoch."""
    monkeypatch.setattr(hub, "BLOCK_ROWS", 8)
    spec = folder_of_files(tmp_path, kind)
    straight = stream(spec, shuffle=shuffle).take(140)
    for cut in (1, 8, 13, 20, 40, 49, 50, 51, 100, 117):
        first = stream(spec, shuffle=shuffle)
        before = first.take(cut)
        second = stream(spec, shuffle=shuffle)
        second.take(3)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + second.take(140 - cut) == straight, cut
    for epoch in (straight[:50], straight[50:100]):
        assert sorted(p.columns["answer"] for p in epoch) == list(range(50))
    if shuffle:
        other = stream(spec, seed=1).take(50)
        assert len({tuple(contents(epoch)) for epoch in (straight[:50], straight[50:100], other)}) == 3


def test_a_stream_has_the_order_of_the_whole_set(tmp_path: Path) -> None:
    """trl#3213: a stream and a map-style data set give the same prompts in the same order."""
    spec = folder_of_files(tmp_path)
    whole = ListSource(read_dataset(spec), 0, shuffle=False)
    assert stream(spec, shuffle=False).take(120) == whole.take(120)


def test_a_run_on_a_stream_samples_each_prompt_group_size_times_together(tmp_path: Path) -> None:
    """trl#3213: 8 streamed prompts, groups of 4."""
    spec = f"hf:{tmp_path}/d"
    parquet(tmp_path / "d" / "train.parquet", NUMBERS[:8])
    (tmp_path / "r.py").write_text("def f(completions):\n    return [float(len(text)) for text in completions]\n")
    values = {
        "model.path": "builtin:tiny", "task.prompts": spec, "task.reward": f"{tmp_path}/r.py:f", "task.shuffle": False,
        "task.streaming": True, "eval.every": 0, "rollout.prompts_per_iteration": 4, "rollout.group_size": 4,
        "rollout.max_tokens": 3, "run.iterations": 2, "run.directory": str(tmp_path / "runs"),
    }  # fmt: skip
    run = train(Config().with_values(values)).directory
    asked = [
        json.loads(line)["prompt_id"]
        for number in (1, 2)
        for line in (run / "rollouts" / f"{number}.jsonl").read_text().splitlines()
    ]
    assert asked == [f"{spec}/{number}" for number in range(1, 9) for _ in range(4)]


def test_a_streams_order_is_the_same_in_another_process(tmp_path: Path) -> None:
    spec = folder_of_files(tmp_path)
    code = (
        "import sys; from gspo.tasks.hub import StreamSource, open_dataset; s = sys.argv[1]; "
        "source = StreamSource(open_dataset(s, streaming=True), s, 0, True, 'prompt'); "
        "print([p.content for p in source.take(70)], source.fingerprint)"
    )
    ran = subprocess.run([sys.executable, "-c", code, spec], capture_output=True, text=True, check=True)
    here = stream(spec)
    assert ran.stdout.strip() == f"{contents(here.take(70))} {here.fingerprint}"


def test_a_stream_leaves_out_what_is_held_out(tmp_path: Path) -> None:
    spec = folder_of_files(tmp_path)
    (tmp_path / "r.py").write_text("def f(completions, answer):\n    return [1.0] * len(answer)\n")
    values = {"task.prompts": spec, "task.reward": f"{tmp_path}/r.py:f", "task.streaming": True, "eval.num_prompts": 4}
    task = load_task(Config().with_values(values))
    assert len(task.heldout) == 4
    assert sorted(contents([*task.train.take(46), *task.heldout])) == sorted(row["prompt"] for row in NUMBERS)
    named = load_task(Config().with_values(values | {"eval.prompts": spec}))
    assert contents(named.heldout) == [row["prompt"] for row in NUMBERS[:4]]
    with pytest.raises(DataError, match="no row to train on"):
        stream(spec, skip=tuple(row["prompt"] for row in NUMBERS))


def test_a_streams_fingerprint(tmp_path: Path) -> None:
    def of(rows: list[dict[str, Any]], **options: Any) -> str:
        rows_of = datasets.Dataset.from_list(rows).to_iterable_dataset()
        settings = {"seed": 0, "shuffle": True, "skip": ()} | options
        return StreamSource(rows_of, "hf:x", prompt_column="prompt", **settings).fingerprint

    changed = [
        of(NUMBERS[::-1], shuffle=False),
        of([row | {"answer": 1} for row in NUMBERS]),
        of(NUMBERS[:-1]),
        of(NUMBERS, seed=1),
        of(NUMBERS, shuffle=False),
        of(NUMBERS, skip=("question 1",)),
    ]
    assert of(NUMBERS) == of(NUMBERS) and len({of(NUMBERS), *changed}) == 7


def broken(folder: Path) -> Mapping[str, str]:
    parquet(folder / "good.parquet", NUMBERS[:2])
    parquet(folder / "empty.parquet", NUMBERS[:1]).write_bytes(b"not parquet")
    parquet(folder / "question.parquet", [{"question": "a"}])
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "norows.parquet")
    parquet(folder / "bytes.parquet", [{"prompt": "a", "picture": b"x"}])
    (folder / "void").mkdir()
    return {
        "missing.parquet": "missing.parquet does not exist",
        "empty.parquet": "cannot be read as Parquet",
        "question.parquet": "question.parquet, row 1: the row has no 'prompt'; its keys are ['question']. "
        "Set task.prompt_column = 'question'",
        "norows.parquet": "norows.parquet has no rows",
        "bytes.parquet": "row 1: the column 'picture' holds a bytes",
        "hf:{}/nowhere": "there is no folder",
        "hf:{}/void": "cannot be loaded",
        "hf:no-such-owner/no-such-set": "cannot be loaded: Couldn't reach 'no-such-owner/no-such-set' on the Hub "
        "(OfflineModeIsEnabled). The hub cannot be reached from here",
        "hf:": "must be hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT",
        "hf:a:b:c:d": "must be hf:NAME",
        "prompts.csv": "'prompts.csv' is not a source of prompts",
    }


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    for source, expected in broken(tmp_path).items():
        spec = source.format(tmp_path) if source.startswith("hf:") else str(tmp_path / source)
        with pytest.raises(GspoError) as error:
            load_task(Config().with_values({"task.prompts": spec, "task.reward": "json:dumps"}))
        said = str(error.value).replace(str(tmp_path) + "/", "")
        assert isinstance(error.value, (DataError, ConfigError)) and expected in said and "\n" not in said, said


def test_a_stream_that_breaks_says_where(tmp_path: Path) -> None:
    def rows() -> Any:
        yield {"prompt": "a"}
        raise OSError("connection reset\nby peer")

    with pytest.raises(DataError, match=r"hf:x cannot be read on: connection reset\.$"):
        StreamSource(datasets.IterableDataset.from_generator(rows), "hf:x", 0, True, "prompt")
    unnamed = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": ""}]).to_iterable_dataset()
    with pytest.raises(DataError, match="hf:x, row 2: 'prompt' must be text"):
        StreamSource(unnamed, "hf:x", 0, True, "prompt")


@pytest.mark.parametrize(("spec", "module"), [("x.parquet", "pyarrow.parquet"), ("hf:x", "datasets")])
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, spec: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"is not installed. Run: pip install 'gspo\[data\]'"):
        load_task(Config().with_values({"task.prompts": spec, "task.reward": "json:dumps"}))


def test_settings_of_order_are_refused_where_they_do_nothing() -> None:
    for values, expected in (
        ({"task.streaming": True}, "task.streaming is for hf: data sets"),
        ({"task.shuffle": False}, "task.shuffle = false is for files and data sets"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load_task(Config().with_values(values))
