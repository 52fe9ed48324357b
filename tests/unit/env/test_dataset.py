"""Data sets: the places that are searched, the errors for missing ones, and the order of the rows."""

from __future__ import annotations

import csv
import json
import math
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from tests.support.errors import raises
from tests.support.grids import rest_is_long
from tests.support.hub_cache import make_gsm8k_cache

from gristmill import ConfigError
from gristmill.errors import PluginError
from gristmill.internal.config_files import find_config, load_yaml
from gristmill_env.data import dataset as dataset_module
from gristmill_env.data import files, sources
from gristmill_env.data.dataset import PromptDataset
from gristmill_env.errors import DatasetError
from gristmill_env.settings.dataset import DatasetConfig

pytestmark = pytest.mark.slow

ROWS = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(10)]


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif suffix == ".csv":
        path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS))
    else:
        datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    return path


def load(folder: Path | None = None, **settings: Any) -> PromptDataset:
    fields = {"prompt_field": "question", "answer_field": "answer", "shuffle_dataset": False} | settings
    return PromptDataset(DatasetConfig.model_validate(fields), folder)


def problems(error: ValidationError) -> list[tuple[str, str]]:
    """Returns the wrong keys, and the codes of their errors."""
    return [(".".join(map(str, item["loc"])), item["type"]) for item in error.errors()]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_dataset_reads_local_files_of_each_format(tmp_path: Path, suffix: str) -> None:
    dataset = load(dataset_path=str(write(tmp_path, suffix)))
    item = dataset.item(3)
    assert (len(dataset), item.prompt, item.answer) == (10, "What is 3 + 1?", "#### 4")


def write_large(folder: Path, suffix: str) -> Path:
    """A file of 20,000 rows and some megabytes."""
    path, random = folder / f"large{suffix}", Random(0)
    rows = [{"question": f"{n}: {random.randbytes(200).hex()}", "answer": str(n)} for n in range(20_000)]
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".csv":
        path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1000)
    return path


def bytes_read() -> int:
    """Returns the bytes that this process has read from files so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_slice_of_a_large_file_reads_only_its_rows(tmp_path: Path, suffix: str) -> None:
    path = write_large(tmp_path, suffix)
    load(dataset_path=str(write(tmp_path, suffix)))  # imports what it needs
    before = bytes_read()
    dataset = load(dataset_path=str(path), split="train[50:150]")
    assert (len(dataset), dataset.item(99).answer) == (100, "149")
    assert bytes_read() - before < path.stat().st_size / 10


@pytest.mark.parametrize("suffix", rest_is_long(".jsonl", ".parquet"))
def test_rows_of_a_large_file_are_objects_only_while_they_are_used(tmp_path: Path, suffix: str) -> None:
    path = write_large(tmp_path, suffix)
    tracemalloc.start()
    try:
        dataset = load(dataset_path=str(path))
        answers = [dataset.item(n).answer for n in range(len(dataset))]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answers == [str(n) for n in range(20_000)]
    assert peak < path.stat().st_size / 2, "the rows as objects would take twice the size of the file"


def test_damage_after_the_slice_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n' * 3 + "{broken\n")
    assert len(load(dataset_path=str(path), split="train[:3]")) == 3
    with raises(DatasetError, "dataset_unreadable", path=path, line=4):
        load(dataset_path=str(path), split="train[:4]")
    with raises(DatasetError, "dataset_unreadable", path=path, line=4):
        load(dataset_path=str(path), split="train[:50%]")


def test_slice_of_a_folder_reads_its_shards_until_it_is_complete(tmp_path: Path) -> None:
    for number in range(3):
        rows = [{"question": f"{number}{n}", "answer": "1"} for n in range(2)]
        text = "".join(json.dumps(row) + "\n" for row in rows) if number < 2 else "{broken\n"
        (tmp_path / f"train-0000{number}-of-00003.jsonl").write_text(text)
    dataset = load(dataset_path=str(tmp_path), split="train[1:4]")
    assert [dataset.item(n).prompt for n in range(3)] == ["01", "10", "11"]


def test_row_of_a_file_that_changed_since_the_start_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl")
    dataset = load(dataset_path=str(path))
    text = path.read_text()
    with path.open("r+") as file:
        file.write(text.replace("{", "[", 1))
    with raises(DatasetError, "dataset_changed", path=path, row=0):
        dataset.item(0)
    with path.open("r+") as file:
        file.write(text.replace("0 + 1", "9 + 1", 1))  # another row of the same length
    with raises(DatasetError, "dataset_changed", path=path, row=0):
        dataset.item(0)
    with path.open("a") as file:
        file.write(text)
    assert dataset.item(1).prompt == "What is 1 + 1?"
    path.unlink()
    assert dataset.item(9).prompt == "What is 9 + 1?", "a file that was replaced keeps its rows until the end"


def test_dataset_path_is_relative_to_the_config_then_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write(tmp_path / "work", ".jsonl")
    assert len(load(tmp_path / "configs", dataset_path="rows.jsonl")) == 10
    (tmp_path / "configs" / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    assert len(load(tmp_path / "configs", dataset_path="rows.jsonl")) == 1


def test_dataset_name_may_be_a_path(tmp_path: Path) -> None:
    assert len(load(dataset_name=str(write(tmp_path, ".jsonl")), split="train[:4]")) == 4


@pytest.mark.parametrize(
    ("split", "first", "count"),
    [("train", 0, 10), ("test", 0, 10), ("train[:3]", 0, 3), ("train[8:]", 8, 2), ("train[-2:]", 8, 2),
     ("train[10%:30%]", 1, 2), ("train[2:400]", 2, 8)],
)  # fmt: skip
def test_dataset_splits_a_local_file(tmp_path: Path, split: str, first: int, count: int) -> None:
    dataset = load(dataset_path=str(write(tmp_path, ".jsonl")), split=split)
    assert (len(dataset), dataset.item(0).prompt) == (count, f"What is {first} + 1?")


def test_dataset_reads_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    assert len(load(dataset_path=str(tmp_path / "saved"), split="test[:2]")) == 2
    with raises(DatasetError, "no_rows"):
        load(dataset_path=str(tmp_path / "saved"), split="test[1000:]")
    with raises(DatasetError, "split_missing", split="train", known=["test"]):
        load(dataset_path=str(tmp_path / "saved"))


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
@pytest.mark.parametrize("columns", [None, ["n"]])
def test_format_that_was_saved_with_a_data_set_does_not_count(
    tmp_path: Path, kind: str, columns: list[str] | None
) -> None:
    row = {"question": "1 + 1?", "answer": "2", "n": 3, "many": [1, 2]}
    made = datasets.Dataset.from_list([row]).with_format(kind, columns=columns)
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "saved"))
    item = load(dataset_path=str(tmp_path / "saved"), split="test").item(0)
    assert (item.prompt, item.answer, item.columns) == ("1 + 1?", "2", row)


@pytest.mark.parametrize("kind", [datasets.Image(), datasets.Audio()])
def test_damaged_images_and_sound_do_not_make_a_row_unusable(tmp_path: Path, kind: Any) -> None:
    damaged = {"bytes": b"no image", "path": None}
    text, inside = datasets.Value("string"), {"x": kind}
    features = datasets.Features({"question": text, "one": kind, "many": datasets.List(kind), "inside": inside})
    raw = {"bytes": datasets.Value("binary"), "path": text}
    encoded = datasets.Features({"question": text, "one": raw, "many": datasets.List(raw), "inside": {"x": raw}})
    row = {"question": "1 + 1?", "one": damaged, "many": [damaged], "inside": {"x": damaged}}
    made = datasets.Dataset.from_list([row], features=encoded).cast(features)
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "saved"))
    dataset = load(dataset_path=str(tmp_path / "saved"), split="test", answer_field=None)
    assert dataset.item(0).prompt == "1 + 1?"
    assert {name: dataset.item(0).columns[name] for name in row} == row


def test_dataset_reads_a_folder_with_one_file_per_split(tmp_path: Path) -> None:
    write(tmp_path, ".jsonl").rename(tmp_path / "test.jsonl")
    assert len(load(dataset_path=str(tmp_path), split="test")) == 10
    with raises(DatasetError, "split_missing", split="train", known=["test.jsonl"]):
        load(dataset_path=str(tmp_path))


def test_missing_dataset_file_reports_the_searched_paths(tmp_path: Path) -> None:
    candidates = [tmp_path / "nope.jsonl", Path("nope.jsonl").absolute()]
    with raises(DatasetError, "dataset_missing", path="nope.jsonl", candidates=candidates):
        load(tmp_path, dataset_path="nope.jsonl")


def test_dataset_that_neither_hub_nor_cache_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with raises(DatasetError, "dataset_unavailable", label="data set 'nobody/nothing' (main) (split train)"):
        load(dataset_name="nobody/nothing", dataset_config="main")


COMMIT = "8d846b5f723643358d846b5f723643358d846b5f"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The offline cache, which contains openai/gsm8k at the revision COMMIT."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    make_gsm8k_cache(tmp_path / "hub", tmp_path / "scratch")
    cache = tmp_path / "hub" / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for folder in (cache / "openai___gsm8k").glob("main/0.0.0/*/"):
        folder.rename(folder.with_name(COMMIT))
    return cache


def test_pinned_revision_is_loaded_or_refused(hub_cache: Path) -> None:
    gsm8k: dict[str, Any] = {"dataset_name": "openai/gsm8k", "dataset_config": "main"}
    pinned = load(dataset_revision=COMMIT, **gsm8k)
    assert len(pinned) == 64
    assert COMMIT in pinned.label
    # `datasets` would silently take the rows of the cache.
    with raises(DatasetError, "revision_not_cached", revision="0" * 40, cached=COMMIT):
        load(dataset_revision="0" * 40, **gsm8k)
    with raises(DatasetError, "dataset_unavailable"):
        load(dataset_revision="main", **gsm8k)  # a branch, which only the hub knows


def test_revision_of_local_data_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path, ".jsonl"))
    places: list[dict[str, Any]] = [{"dataset_path": path}, {"dataset_name": path}]
    for source in places:
        with raises(DatasetError, "revision_not_of_hub"):
            load(dataset_revision=COMMIT, **source)


def test_record_names_the_revision_only_if_there_is_one() -> None:
    assert "dataset_revision" not in DatasetConfig(dataset_name="a/b").recorded()
    assert DatasetConfig(dataset_name="a/b", dataset_revision=COMMIT).recorded()["dataset_revision"] == COMMIT


def test_a_missing_field_lists_the_columns_and_the_nearest(tmp_path: Path) -> None:
    path = str(write(tmp_path, ".jsonl"))
    known = ["question", "answer"]
    with raises(DatasetError, "field_missing", key="prompt_field", field="questoin", known=known) as raised:
        load(dataset_path=path, prompt_field="questoin")
    assert "'question'" in str(raised.value)
    with raises(DatasetError, "field_missing", key="answer_field", field="gold"):
        load(dataset_path=path, answer_field="gold")


def test_broken_line_of_a_dataset_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\nnot json\n')
    with raises(DatasetError, "dataset_unreadable", path=path, line=2):
        load(dataset_path=str(path))


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "text", "encoding"),
    [
        ("rows.json", LINES, "utf-8"),
        ("rows.json", "\n\n".join(json.dumps(row, indent=2) for row in ROWS), "utf-8"),
        ("rows.json", json.dumps({"version": 1, "data": ROWS}), "utf-8"),
        ("rows.json", json.dumps(ROWS), "utf-8-sig"),
        ("rows.json", json.dumps(ROWS), "utf-16"),
        ("rows.jsonl", LINES, "utf-8-sig"),
        ("rows.jsonl", LINES.replace("\n", "\r\n"), "utf-16"),
        ("rows.csv", "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS), "utf-8-sig"),
        ("rows.csv", "question,answer\r\n" + "".join(f"{r['question']},{r['answer']}\r\n" for r in ROWS), "utf-16"),
        ("ROWS.JSONL", LINES, "utf-8"),
        ("rows.Json", json.dumps(ROWS), "utf-8"),
    ],
)
def test_file_is_read_with_a_byte_order_mark_one_object_per_line_and_capital_letters(
    tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    (tmp_path / name).write_bytes(text.encode(encoding))
    for setting in ("dataset_path", "dataset_name"):
        dataset = load(None, **{setting: str(tmp_path / name)})
        assert [dataset.item(n).columns for n in range(len(dataset))] == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_file_with_a_single_object_is_a_single_row(tmp_path: Path, name: str) -> None:
    row = ROWS[0] | {"chat": [{"role": "user", "content": "?"}], "tags": ["a"]}
    (tmp_path / name).write_text(json.dumps({key: row[key] for key in ("question", "answer", "tags")}))
    assert len(load(dataset_path=str(tmp_path / name))) == 1


@pytest.mark.parametrize(
    ("name", "raw", "code", "line"),
    [
        ("rows.csv", b"question,answer,answer\na,1,2\n", "duplicate_key", 1),
        ("rows.jsonl", b'{"question": "a"}\n\n{"answer": 1, "question": "a", "answer": 2}\n', "duplicate_key", 3),
        ("rows.jsonl", b'{"question": {"answer": 1, "answer": 2}}\n', "duplicate_key", 1),
        ("rows.json", b'[\n{"question": "a"},\n{"answer": 1,\n"answer": 2}]', "duplicate_key", 3),
        ("rows.json", b'{"question": "a"}\n{"answer": 1, "answer": 2}\n', "duplicate_key", 2),
        ("rows.json", b'{"question": "a"}\n[1]\n', "dataset_unreadable", 2),
        ("rows.jsonl", b'{"question": "a"}\n{"question": "a"} {"question": "b"}\n', "dataset_unreadable", 2),
        ("rows.jsonl", b'{"question": "a"}\n\n{"question": "caf\xe9"}\n', "dataset_unreadable", 3),
        ("rows.csv", b"question,answer\ncaf\xe9,2\n", "dataset_unreadable", 2),
        ("rows.csv", b'question,answer\na,1\nb,"2\nc,3\n', "dataset_unreadable", 3),
        ("rows.json", b'[{"question": "a"},\n{"question": }]', "dataset_unreadable", 2),
        ("rows.json", b'[{"question": "a"},\n{"question": "b"}]\n[{"question": "c"}]', "dataset_unreadable", 2),
    ],
)
def test_damage_and_doubled_keys_of_a_file_are_named_with_their_line(
    tmp_path: Path, name: str, raw: bytes, code: str, line: int
) -> None:
    (tmp_path / name).write_bytes(raw)
    values = {"key": "answer"} if code == "duplicate_key" else {}
    with raises(DatasetError, code, path=tmp_path / name, line=line, **values):
        load(dataset_path=str(tmp_path / name))


def test_doubled_column_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    columns = [pyarrow.array(["a"])] * 3
    table = pyarrow.Table.from_arrays(columns, names=["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with raises(DatasetError, "duplicate_key", key="answer"):
        load(dataset_path=str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize(
    "column",
    [
        lambda bad: pyarrow.array([b"\xff" if n == bad else b"a" for n in range(4)]).view(pyarrow.string()),
        lambda bad: pyarrow.array([10**12 if n == bad else 1 for n in range(4)], pyarrow.timestamp("s")),
    ],
)
def test_row_that_python_cannot_hold_is_a_bad_row(tmp_path: Path, column: Any, bad: int) -> None:
    table = pyarrow.table({"question": ["a"] * 4, "answer": ["b"] * 4, "other": column(bad)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = load(dataset_path=str(tmp_path / "rows.parquet"))
    assert rows.columns == ["question", "answer", "other"]
    assert [rows.item(n).prompt for n in range(4) if n != bad] == ["a"] * 3
    with raises(DatasetError, "row_unreadable", row=bad):
        rows.item(bad)


def test_columns_are_those_of_all_rows_and_a_missing_value_is_none(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1"}, {"answer": "2", "hint": "b", "question": "c"}, {"question": "d"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load(dataset_path=str(tmp_path / "rows.jsonl"))
    assert dataset.columns == ["question", "answer", "hint"]
    assert dataset.item(0).columns == rows[0] | {"hint": None}
    assert dataset.item(1).columns == rows[1]
    with raises(DatasetError, "not_text", row=2, field="answer"):
        dataset.item(2)
    template = "{{ question }}{% if hint %} ({{ hint }}){% endif %}"
    dataset = load(dataset_path=str(tmp_path / "rows.jsonl"), prompt_template=template, answer_field=None)
    assert [dataset.item(n).prompt for n in range(3)] == ["a", "c (b)", "d"]


def test_field_that_a_later_row_has_first_is_known(tmp_path: Path) -> None:
    rows = [{"meta": None}, {"meta": {}}, {"meta": {"question": "a"}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load(dataset_path=str(tmp_path / "rows.jsonl"), prompt_field="meta.question", answer_field=None)
    assert dataset.item(2).prompt == "a"
    with raises(DatasetError, "field_missing", row=1, field="meta.question"):
        dataset.item(1)


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        (["data/train-00000-of-00001.parquet"], {}),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], {}),
        (["train-00000-of-00001-0123456789abcdef.parquet"], {}),
        (["main/train-00000-of-00001.parquet", "other/train-00000-of-00001.parquet"], {"dataset_config": "main"}),
        (["data/train.parquet"], {}),
        (["Train.PARQUET"], {"split": "Train"}),
    ],
)
def test_folder_that_was_copied_from_the_hub_is_read(
    tmp_path: Path, files: list[str], settings: dict[str, Any]
) -> None:
    for number, name in enumerate(files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shard = ROWS if len(files) == 1 or "main" in name else ROWS[5 * number : 5 * number + 5]
        datasets.Dataset.from_list(shard).to_parquet(str(tmp_path / name))
    (tmp_path / "README.md").write_text("---\n")
    dataset = load(dataset_path=str(tmp_path), **settings)
    assert [dataset.item(n).columns for n in range(len(dataset))] == ROWS


def test_folder_without_the_split_names_configurations_and_missing_shards(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "main" / "train-00000-of-00001.parquet"))
    with raises(DatasetError, "split_missing", split="train", configurations=["main"]):
        load(dataset_path=str(tmp_path))
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "train-00000-of-00002.parquet"))
    with raises(DatasetError, "shards_missing", count=1, of=2):
        load(dataset_path=str(tmp_path))


def test_configuration_that_a_local_folder_does_not_have_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for name in ("main", "."):
        write(tmp_path / name, ".jsonl").rename(tmp_path / name / "train.jsonl")
    (tmp_path / "main" / "train.jsonl").rename(tmp_path / "main" / "test.jsonl")
    assert len(load(dataset_path=str(tmp_path), dataset_config="main", split="test")) == len(ROWS)
    with raises(DatasetError, "configuration_missing", configuration="mian", known=["main"]):
        load(dataset_path=str(tmp_path), dataset_config="mian")
    with raises(DatasetError, "split_missing"):  # not the rows of the folder itself
        load(dataset_path=str(tmp_path), dataset_config="main")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert len(load(dataset_path=str(tmp_path / "saved"))) == len(ROWS)
    with raises(DatasetError, "configuration_missing", configuration="main", known=[]):
        load(dataset_path=str(tmp_path / "saved"), dataset_config="main")


@pytest.fixture
def other_user() -> Iterator[Path]:
    """A folder of another user; the test runs without root's rights, because root may read everything."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for number, name in enumerate(["file", "folder"]):
            (Path(folder) / name).mkdir(mode=0o755)
            write(Path(folder) / name, ".jsonl").chmod(0o644 if number else 0o600)
        (Path(folder) / "folder").chmod(0o700)
        if os.geteuid() != 0:
            pytest.skip("needs root, to become a user who may not read the files")
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("path", "closed"), [("file/rows.jsonl", "file/rows.jsonl"), ("folder/rows.jsonl", "folder"), ("folder", "folder")]
)
def test_file_or_folder_that_may_not_be_read_is_named_with_the_remedy(other_user: Path, path: str, closed: str) -> None:
    for setting in ("dataset_path", "dataset_name"):
        with raises(DatasetError, "dataset_unreadable") as raised:
            load(None, **{setting: str(other_user / path)})
        assert str(raised.value).endswith(f"chmod -R a+rX {other_user / closed}")
    with raises(ConfigError, "config_unreadable") as refused:
        load_yaml(find_config(str(other_user / path), other_user)) if path != "folder" else find_config(
            "rows", other_user / "folder"
        )
    assert str(refused.value).endswith(f"chmod -R a+rX {other_user / closed}")


def test_csv_cell_of_any_length_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"question,answer\n{'x' * 200_000},2\n")
    assert len(load(dataset_path=str(tmp_path / "rows.csv")).item(0).prompt) == 200_000


@pytest.mark.parametrize("rows", ["a,1,2\n", "a,1\nb,2,3,4\n"])
def test_csv_row_with_more_cells_than_the_header_is_named(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\n" + rows)
    line = 1 + rows.count("\n")
    with raises(DatasetError, "too_many_cells", path=path, line=line, surplus=line - 1, columns=2):
        load(dataset_path=str(path))


def test_csv_cell_above_the_limit_is_an_error_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LONGEST_CELL", 10)  # the real one is gigabytes
    (tmp_path / "rows.csv").write_text(f"question,answer\na,1\n{'b' * 11},2\n")
    limit = csv.field_size_limit()
    try:
        with raises(DatasetError, "dataset_unreadable", path=tmp_path / "rows.csv", line=3):
            load(dataset_path=str(tmp_path / "rows.csv"))
    finally:
        csv.field_size_limit(limit)  # the limit is the process's, and other tests read CSV files


def test_a_seed_below_0_is_refused_with_the_settings() -> None:
    with pytest.raises(ValidationError) as raised:
        load(seed=-1)
    assert problems(raised.value) == [("seed", "greater_than_equal")]


def test_dataset_without_rows_or_without_exactly_one_source_is_refused(tmp_path: Path) -> None:
    with raises(DatasetError, "no_rows"):
        load(dataset_path=str(write(tmp_path, ".jsonl")), split="train[:0]")
    with raises(DatasetError, "dataset_unset"):
        load()
    with pytest.raises(ValidationError) as raised:
        load(dataset_name="a", dataset_path="b")
    assert problems(raised.value) == [("", "two_sources")]


MADE = """
def load(*, digits: int = 1, split: str = "train"):
    row = {}
    for n in range(10**digits):
        row["question"], row["answer"] = f"{split}: {n} + 1?", n + 1
        if n:
            row["level"] = n
        yield row

def endless():
    n = 0
    while True:
        yield {"question": str(n), "answer": str(n)}
        n += 1

def broken():
    yield {"question": "a", "answer": "b"}
    raise RuntimeError("no more")

def text():
    yield {"question": "a", "answer": "b"}
    yield "c"

def numbers():
    import numpy
    inner = {"b": numpy.array([1.5]), "c": numpy.str_("d")}
    yield {"question": numpy.int64(7), "answer": numpy.float64(7.0), "all": [numpy.int64(1), inner]}

def growing():
    messages = []
    for number in range(2):
        messages.append({"role": "user", "content": str(number)})
        yield {"question": messages, "answer": "b"}

def a_list():
    return [{"question": "a", "answer": "b"}]

def unreadable(digits: int = 1, random: "Random | None" = None):
    return a_list() * digits

nothing = None
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "made.py").write_text(MADE)
    return tmp_path


def test_rows_come_from_a_function_with_its_split_and_its_params(made: Path) -> None:
    dataset = load(made, rows="made.py:load", rows_params={"digits": "2"}, split="test[10:20]")
    assert [len(dataset), dataset.item(0).prompt, dataset.item(0).answer] == [10, "test: 10 + 1?", "11"]
    assert len(load(made, rows="made.py:a_list")) == 1
    numbers = load(made, rows="made.py:numbers").item(0)
    assert (numbers.prompt, numbers.answer) == ("7", "7")
    assert repr(numbers.columns) == repr({"question": 7, "answer": 7.0, "all": [1, {"b": [1.5], "c": "d"}]})
    growing = load(made, rows="made.py:growing")
    assert [len(growing.item(number).columns["question"]) for number in (0, 1)] == [1, 2]
    with_first = load(made, rows="made.py:load")
    assert [with_first.item(0).columns, len(with_first)] == [
        {"question": "train: 0 + 1?", "answer": 1, "level": None}, 10
    ]  # fmt: skip


def test_endless_rows_need_a_split_with_an_end(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(load(made, rows="made.py:endless", split="train[:25]")) == 25
    monkeypatch.setattr(sources, "MOST_MADE", 100)
    for split in ("train", "train[10:]", "train[:50%]", "train[:-1]"):
        with raises(DatasetError, "rows_without_end", most=100):
            load(made, rows="made.py:endless", split=split)
    assert len(load(made, rows="made.py:load", rows_params={"digits": 2})) == 100


@pytest.mark.parametrize(
    ("place", "code", "values"),
    [
        ("broken", "rows_failed", {"row": 1, "error": "RuntimeError"}),
        ("text", "not_a_row", {"row": 1}),
        ("nothing", "rows_not_a_function", {}),
    ],
)
def test_function_that_fails_or_yields_no_row_is_named(
    made: Path, place: str, code: str, values: dict[str, Any]
) -> None:
    with raises(DatasetError, code, **values):
        load(made, rows=f"made.py:{place}")


def test_params_that_a_function_of_rows_does_not_take_are_refused(made: Path) -> None:
    with raises(DatasetError, "unknown_parameter", parameter="digit"):
        load(made, rows="made.py:load", rows_params={"digit": 2})
    with raises(DatasetError, "annotation_unreadable"):
        load(made, rows="made.py:unreadable", rows_params={"random": 2})
    assert len(load(made, rows="made.py:unreadable", rows_params={"digits": 2})) == 2
    with raises(DatasetError, "revision_not_of_hub"):
        load(made, rows="made.py:load", dataset_revision=COMMIT)
    with raises(PluginError, "plugin_attribute_missing"):
        load(made, rows="made.py:lod")
    with pytest.raises(ValidationError) as raised:
        load(made, rows="made.py:load", dataset_path="rows.jsonl")
    assert problems(raised.value) == [("", "two_sources")]


def test_record_names_rows_in_python_without_secrets() -> None:
    assert not {"rows", "rows_params"} & DatasetConfig(dataset_name="a/b").recorded().keys()
    made = DatasetConfig(rows="a:b", rows_params={"digits": 2, "api_key": "x"}).recorded()
    assert (made["rows"], made["rows_params"]) == ("a:b", {"digits": 2})


def test_a_row_without_text_is_an_error_of_that_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": 5}\n{"question": null, "answer": 5}\n')
    dataset = load(dataset_path=str(path))
    assert dataset.item(0).answer == "5"
    with raises(DatasetError, "not_text", field="question", row=1):
        dataset.item(1)


HALF = "half \ud83d"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("72", "72"), (72, "72"), (72.0, "72"), (-0.0, "0"), (0.5, "0.5"), (1e22, "1e+22"), (2**70, str(2**70)),
        (Decimal("72.00"), "72"), (Decimal("72.50"), "72.50"), (Decimal("1E+3"), "1000"),
        (10**400, "1" + "0" * 400), pytest.param(10**5000, None, id="above Python's limit of digits"),
        (math.nan, None), (math.inf, None), (Decimal("NaN"), None), (None, None), (True, None), (b"72", None),
        (datetime(2026, 1, 1, tzinfo=UTC), None), (["72"], None), ({"text": "72"}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["prompt_field", "answer_field", "{{ value }}", "{{ 'Q: ' ~ value }}"])
def test_number_of_a_row_is_written_as_a_person_does_and_other_values_are_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, text: str | None, place: str
) -> None:
    monkeypatch.setattr(dataset_module, "load_rows", lambda *_: ("rows", [{"value": value, "text": "?"}]))
    fields: dict[str, Any] = {"prompt_field": "text", "answer_field": None}
    dataset = load(**fields | ({place: "value"} if place in fields else {"prompt_template": place}))
    if text is None:
        code = "not_a_message" if place == "prompt_field" and isinstance(value, list) else "not_text"
        with raises(DatasetError, code, row=0, field="value"):
            dataset.item(0)
        return
    item = dataset.item(0)
    assert (item.answer if place == "answer_field" else item.prompt.removeprefix("Q: ")) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ value | trim }}", "{{ value | upper }}", "{{ '%s' % value }}", "{{ '{}'.format(value) }}",
        "{{ 'x' | replace('x', value) }}", "{{ '%s' | format(value) }}", "{{ nested.at | trim }}",
        "{% for one in nested.all %}{{ one | trim }}{% endfor %}",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("value", "text"), [(72.0, "72"), (Decimal("72.00"), "72"), (None, None), (math.nan, None)])
def test_filters_of_a_template_write_no_value_that_is_not_text(
    monkeypatch: pytest.MonkeyPatch, template: str, value: Any, text: str | None
) -> None:
    row = {"value": value, "nested": {"at": value, "all": [value]}}
    monkeypatch.setattr(dataset_module, "load_rows", lambda *_: ("rows", [row]))
    dataset = load(prompt_template=template, answer_field=None)
    if text is None:
        with raises(DatasetError, "not_text", row=0):
            dataset.item(0)
    else:
        assert dataset.item(0).prompt == text


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ hint or 'none' }}", "none"),
        ("{{ hint | default('none', true) }}", "none"),
        ("{% if hint is none and hint == none and not hint %}none{% endif %}", "none"),
        ("{{ [hint, 'a'] | reject('none') | join }}", "a"),
        ("{{ {'a': hint, 'b': number} | tojson }}", '{"a": null, "b": 3}'),
        ("{{ number // 2 + 0.5 }}", "1.5"),
    ],
)
def test_template_may_test_null_and_write_it_as_json(
    monkeypatch: pytest.MonkeyPatch, template: str, prompt: str
) -> None:
    monkeypatch.setattr(dataset_module, "load_rows", lambda *_: ("rows", [{"hint": None, "number": 3.0}]))
    assert load(prompt_template=template, answer_field=None).item(0).prompt == prompt


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"question": HALF}, "question"),
        ({"answer": HALF}, "answer"),
        ({"other": HALF}, "other"),
        ({"other": {"deep": ["a", HALF]}}, "other.deep.1"),
        ({"question": [{"role": "user", "content": HALF}]}, "question.0.content"),
        ({HALF: "key"}, "half \ufffd"),
    ],
)
def test_half_a_character_anywhere_in_a_row_is_an_error_of_that_row(
    tmp_path: Path, row: dict[str, Any], field: str
) -> None:
    path = tmp_path / "rows.jsonl"
    whole = {"question": "\U0001f600 = ?", "answer": "4"}
    path.write_text("".join(json.dumps(one) + "\n" for one in (whole, whole | row)))
    dataset = load(dataset_path=str(path))
    assert dataset.item(0).prompt == whole["question"]
    with raises(DatasetError, "half_character", row=1, field=field):
        dataset.item(1)


def test_template_that_writes_half_a_character_is_an_error_of_its_row(tmp_path: Path) -> None:
    dataset = load(dataset_path=str(write(tmp_path, ".jsonl")), prompt_template="{{ '\\ud83d' }}{{ question }}")
    with raises(DatasetError, "half_character", row=3, field="prompt_template"):
        dataset.item(3)


@pytest.mark.parametrize("shuffle", [False, True])
def test_turns_are_the_next_numbers_with_the_same_data(tmp_path: Path, shuffle: bool) -> None:
    dataset = load(dataset_path=str(write(tmp_path, ".jsonl")), shuffle_dataset=shuffle)
    numbers = [number for number in range(10, 80) if dataset.index(number) == dataset.index(13)]
    assert numbers[0] == 13
    assert dataset.turns(13, 6) == numbers[1:]


def test_epoch_has_each_row_once_in_an_order_that_depends_on_the_seed(tmp_path: Path) -> None:
    path = str(write(tmp_path, ".jsonl"))
    one, again, other = (load(dataset_path=path, shuffle_dataset=True, seed=seed) for seed in (1, 1, 2))
    epochs = [[one.item(epoch * 10 + n).index for n in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    # The rows are the same for any order of requests and any process.
    assert [again.item(row).index for row in reversed(range(30))] == [i for e in epochs for i in e][::-1]
    assert [other.item(row).index for row in range(30)] != [i for e in epochs for i in e]


def test_dataset_without_shuffle_keeps_the_order_of_rows(tmp_path: Path) -> None:
    dataset = load(dataset_path=str(write(tmp_path, ".jsonl")))
    assert [dataset.item(row).index for row in range(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


NESTED = [
    {"chat": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
     "metadata": {"answer_cot": "#### 4"}, "choices": {"text": ["three", "four"], "label": ["A", "B"]}, "gold": 4},
]  # fmt: skip


def nested(tmp_path: Path, rows: list[dict[str, Any]] | None = None, **settings: Any) -> PromptDataset:
    path = tmp_path / "nested.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or NESTED))
    return load(dataset_path=str(path), **settings)


def test_fields_are_found_by_path(tmp_path: Path) -> None:
    dataset = nested(tmp_path, prompt_field="choices.text.1", answer_field="metadata.answer_cot")
    assert (dataset.item(0).prompt, dataset.item(0).answer) == ("four", "#### 4")
    with raises(DatasetError, "field_missing", field="metadata.answr", part="answr", known=["answer_cot"]):
        nested(tmp_path, prompt_field="chat", answer_field="metadata.answr")
    with raises(DatasetError, "field_missing", field="choices.text.2", part="2"):
        nested(tmp_path, prompt_field="choices.text.2", answer_field=None)


def test_dataset_column_with_a_dot_overrides_a_path(tmp_path: Path) -> None:
    dataset = nested(tmp_path, [{"a.b": "column", "a": {"b": "path"}}], prompt_field="a.b", answer_field=None)
    assert dataset.item(0).prompt == "column"


def test_prompt_field_may_hold_a_list_of_messages(tmp_path: Path) -> None:
    item = nested(tmp_path, prompt_field="chat", answer_field="gold").item(0)
    assert item.prompt == "2 + 2?"
    assert [dict(message) for message in item.messages] == NESTED[0]["chat"]


def test_prompt_field_may_hold_messages_of_openais_form(tmp_path: Path) -> None:
    """With calls whose arguments are JSON text, and null as the content of a message with calls."""
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    call = {"id": "c1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    item = nested(tmp_path, [{"chat": chat}], prompt_field="chat", answer_field=None).item(0)
    assert item.prompt == "4"
    read = call | {"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    called = {"role": "assistant", "content": "", "tool_calls": [read]}
    assert [dict(message) for message in item.messages] == [chat[0], called, result]


@pytest.mark.parametrize(
    ("chat", "code"),
    [
        ([], "no_messages"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}], "not_a_message"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "not_a_message"),
        (["2 + 2?"], "not_a_message"),
        ([{"role": "user", "content": None}], "not_a_message"),
        ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}], "ends_with_assistant"),
    ],
)
def test_dataset_invalid_conversation_is_an_error_of_its_row(tmp_path: Path, chat: list[Any], code: str) -> None:
    dataset = nested(tmp_path, [{"chat": chat}], prompt_field="chat", answer_field=None)
    with raises(DatasetError, code, row=0, field="chat"):
        dataset.item(0)


def test_dataset_ground_truth_overrides_the_answer(tmp_path: Path) -> None:
    dataset = nested(tmp_path, prompt_field="chat", answer_field="metadata.answer_cot", ground_truth_field="gold")
    assert dataset.item(0).answer == "4"


def test_prompt_template_writes_the_prompt(tmp_path: Path) -> None:
    template = (
        "{{ chat[1].content }}\n{% for c in choices.text %}\n{{ choices.label[loop.index0] }}) {{ c }}\n{% endfor %}"
    )
    dataset = nested(tmp_path, prompt_template=template, answer_field=None)
    assert dataset.item(0).prompt == "2 + 2?\nA) three\nB) four\n"


@pytest.mark.parametrize(
    ("template", "code", "values"),
    [
        ("{{ quesiton }}", "field_missing", {"field": "quesiton", "known": ["chat", "metadata", "choices", "gold"]}),
        ("{{ chat ", "template_syntax", {"line": 1}),
    ],
)
def test_dataset_invalid_template_is_reported_at_the_start(
    tmp_path: Path, template: str, code: str, values: dict[str, Any]
) -> None:
    with raises(DatasetError, code, **values):
        nested(tmp_path, prompt_template=template, answer_field=None)


@pytest.mark.parametrize(
    "template",
    [
        "{{ gold.nothing }}", "{{ gold / 0 }}", "{{ ''.__class__.__mro__ }}", "{{ '{x}'.format(y=1) }}",
        "{{ none|dictsort }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ range(999999999) }}",
        "{{ 'a'.encode('no') }}", "{{ [].pop() }}",
    ],
)  # fmt: skip
def test_a_template_that_does_not_fit_a_row_is_an_error_of_that_row(tmp_path: Path, template: str) -> None:
    dataset = nested(tmp_path, prompt_template=template, answer_field=None)
    with raises(DatasetError, "template_failed"):
        dataset.item(0)
