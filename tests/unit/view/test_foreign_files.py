"""Files of a run that a third party wrote. A link, a FIFO, a device or a folder in place of a file is never followed,
blocks nothing, and hides no other run. Neither do odd contents of a file, and the run itself stays visible too."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.grids import rest_is_long
from tests.support.groups import make_group
from tests.support.run_folder import RunFolderWriter

from gristmill import GristmillError
from gristmill.archive.run_file import RUN_FILE
from gristmill.folders import RunFolder, list_runs
from gristmill.internal import foreign
from gristmill_cli.main import main
from gristmill_view import queries, run_checks
from gristmill_view.rollouts import build
from gristmill_view.run_source import RunSource
from gristmill_view.source import RolloutQuery, ViewError

pytestmark = pytest.mark.slow

FILES = (
    "metrics.jsonl", "receipts.jsonl", RUN_FILE, "fork.json", "drops.jsonl", "drops.1.jsonl", "logs/trainer.log",
    "rollouts/000001.gmz", "trained/000001.gmz", "trained/tokenizer/tokenizer.json", "model/tokenizer.json",
    "evaluations/1.1-a/groups.jsonl", "evaluations/1.1-a/results.json", "evaluations/1.1-a/evaluation.json",
)  # fmt: skip


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def dangling(path: Path, secret: Path) -> None:
    path.symlink_to(path.name)


def fifo(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def device(path: Path, secret: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path, secret: Path) -> None:
    path.mkdir()


def linked_folder(path: Path, secret: Path) -> None:
    """The folder of the file is a link out of the run."""
    elsewhere = secret.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / path.name).write_bytes(secret.read_bytes())
    for left in path.parent.iterdir():
        left.rename(elsewhere / left.name)
    path.parent.rmdir()
    path.parent.symlink_to(elsewhere)


def victim(root: Path) -> None:
    run = RunFolderWriter(root, "victim")
    run.archive(make_group("g0"))
    run.metrics([{"step": 1, "reward_mean": 0.5}])


def questions(roots: tuple[Path, ...], run: str) -> None:
    """Asks everything that the page, the report and the terminal ask."""
    found = RunFolder(run, roots)
    for ask in (
        lambda: queries.overview_of(roots, run),
        lambda: queries.news_of(roots, run, 0),
        lambda: queries.rollouts_of(roots, run, RolloutQuery()),
        lambda: queries.highlights_of(roots, run, [1]),
        lambda: queries.fork_steps(roots, [run]),
        lambda: list(run_checks.check_files(found)),
        found.tokenizer,
    ):
        with contextlib.suppress(ViewError, GristmillError):
            ask()


@pytest.mark.parametrize(
    "plant",
    rest_is_long(link, fifo, linked_folder, dangling, device, folder, first=2),
)
def test_odd_file_in_a_run_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path, Path], None]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    victim(own)
    roots = (own, theirs)
    for number, name in enumerate(FILES):
        outside = tmp_path / f"outside-{number}"
        outside.mkdir()
        (outside / "secret").write_text(json.dumps({"step": 7, "reward_mean": 0.25, "text": "STOLEN"}) + "\n")
        run = f"odd-{number}"
        path = theirs / run / name
        path.parent.mkdir(parents=True)
        plant(path, outside / "secret")
        (theirs / run / "checkpoints").mkdir(exist_ok=True)  # so that it counts as a run
        assert RunFolder(run, roots).file(name) is None
        with pytest.raises((foreign.ForeignFileError, OSError)):
            foreign.open_file(path)
        questions(roots, run)
    lines = {line["run"]: line for line in queries.run_lines(roots)}
    assert lines.pop("victim")["reward"] == 0.5
    assert all(line["reward"] is None for line in lines.values())
    assert queries.rollouts_of(roots, "victim", RolloutQuery())["total"] > 0


DEEP = "[" * 100_000 + "]" * 100_000
CONTENTS = (
    b"", b"\n", b"null\n", b"[]\n", b"7\n", b"{}\n", b"\xff\xfe\n", b"{\n", b"NaN\n", b'{"step": "x"}\n',
    b'{"step": -1}\n', b'{"step": NaN}\n', b'{"step": ' + b"9" * 5000 + b"}\n", b'{"step": true}\n',
    f"{DEEP}\n".encode(),
    f'{{"step": 2, "rejected": {DEEP}}}\n'.encode(),
    b'{"step": 2, "rejected": null, "seconds": [], "policy_version": 3, "reward_mean": "x"}\n',
    b'{"step": 2, "version": "1.2", "server": "http://h", "state": "odd", "difference": 0.1, "bound": 0.1}\n',
    b'{"what": "dropped"}\n', b'{"what": "dropped", "group_id": [1], "reason": {}}\n', b'{"step": [2]}\n',
    b'{"run": {}, "settings": [], "created_at": "x", "state": 5}\n', b'{"weights": 5, "creation": []}\n',
    b'{"weights": "1.2", "creation": null, "finished": 1}\n',
)  # fmt: skip
"""Lines that no service of Gristmill writes."""


@pytest.mark.parametrize("name", rest_is_long(*FILES, first=5))
def test_odd_contents_of_a_file_hide_neither_the_run_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = tmp_path / "runs"
    there = ("--runs", str(runs), "--api", "http://127.0.0.1:9")
    victim(runs)
    for number, content in enumerate((*CONTENTS, b"".join(CONTENTS))):
        run = RunFolderWriter(runs, f"odd-{number}")
        run.metrics([{"step": 1, "reward_mean": 0.5}])
        run.evaluation("1.1-a", "1.1", 1)
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if name.endswith("jsonl") else "wb") as file:
            file.write(content)
        found = queries.overview_of((runs,), run.path.name)
        assert found["step"] >= 1
        assert queries.fork_steps((runs,), [run.path.name])[run.path.name] in (0, 2)
    list(run_checks.check_files(RunFolder(f"odd-{number}", (runs,))))
    assert main([*there, "status", f"odd-{number}"]) == 0
    assert main([*there, "runs", "--json"]) == 0
    listed = {line["run"]: line for line in json.loads(capsys.readouterr().out.splitlines()[-1])}
    assert len(listed) == len(CONTENTS) + 2
    assert {line["state"] for line in listed.values()} <= {"stopped", "open", "finished"}


def test_odd_contents_of_files_do_not_hide_the_table_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    victim(tmp_path)
    run = RunFolderWriter(tmp_path, "victim")
    for name in ("trained/tokenizer/tokenizer.json", "drops.jsonl"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_bytes(b"".join(CONTENTS))
    for number, content in enumerate(CONTENTS):
        for name in ("groups.jsonl", "evaluation.json"):
            run.evaluation(f"1.1-{number}-{name}", "1.1", 1)
            (run.path / "evaluations" / f"1.1-{number}-{name}" / name).write_bytes(content)
    found = queries.rollouts_of((tmp_path,), "victim", RolloutQuery())
    assert found["total"] == 2 + len(CONTENTS)  # two sequences, and one evaluated prompt next to each evaluation.json


def test_file_of_the_next_root_counts_instead_of_a_planted_one(tmp_path: Path) -> None:
    victim(tmp_path / "own")
    for number, plant in enumerate((link, fifo, folder)):
        (tmp_path / f"{number}/victim").mkdir(parents=True)
        plant(tmp_path / f"{number}/victim/metrics.jsonl", tmp_path / "secret")
    found = RunFolder("victim", tuple(tmp_path / name for name in ("0", "1", "2", "own")))
    assert [row["reward_mean"] for row in found.metrics()] == [0.5]


def test_tables_are_written_in_the_readers_own_root_and_never_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    victim(own)
    before = sorted(own.rglob("*"))
    for name, target in (("dataset", own / "victim" / "rollouts"), ("rollouts", own / "victim" / "rollouts")):
        odd = theirs / f"odd-{name}"
        (odd / "logs").mkdir(parents=True)
        (odd / name).symlink_to(target)
        assert build(odd.name, roots=[own, theirs]).rows == 0
    plain = theirs / "plain" / "dataset"
    plain.mkdir(parents=True)
    (theirs / "plain" / "logs").mkdir()
    build("plain", roots=[own, theirs])
    (own / "planted").mkdir()
    (own / "planted" / "dataset").symlink_to(own / "victim" / "rollouts")
    build("planted", roots=[own, theirs])
    assert list(plain.iterdir()) == []
    assert sorted(one for one in own.rglob("*") if "planted" not in one.parts) == before


def test_linked_root_and_linked_run_that_a_person_names_are_read(tmp_path: Path) -> None:
    victim(tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "run").symlink_to(tmp_path / "own" / "victim")
    assert RunFolder.open("victim", [tmp_path / "link"]).metrics()
    assert RunFolder.open(tmp_path / "run").metrics()
    assert [run.run_id for run in list_runs([tmp_path / "link"])] == ["victim"]


async def test_question_that_takes_too_long_ends_and_the_next_one_is_answered(tmp_path: Path) -> None:
    victim(tmp_path)
    build("victim", roots=[tmp_path])
    with contextlib.closing(RunSource([tmp_path])) as source, (tmp_path / "victim/dataset/.lock").open() as lock:
        assert len(await source.runs()) == 1
        fcntl.flock(lock, fcntl.LOCK_EX)
        source.answer_s = 0.2
        with pytest.raises(ViewError) as caught:
            await source.rollouts("victim", RolloutQuery())
        assert caught.value.code == "answer_late"
        source.answer_s = 300.0
        assert len(await source.runs()) == 1  # by another process: the first one waits for the lock
        assert (await source.overview("victim"))["step"] == 1
