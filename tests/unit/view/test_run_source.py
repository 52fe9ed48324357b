"""The page's data from a run's files: a separate process reads them, and no request leaves the run's folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import cast

import pytest
from tests.support.grids import rest_is_long
from tests.support.groups import make_group
from tests.support.run_folder import RunFolderWriter
from tests.unit.view.recorded import record

from gristmill.archive.run_file import write_run_file
from gristmill.internal.metrics import readable
from gristmill.run import RunState
from gristmill_view import queries
from gristmill_view.facts import Facts
from gristmill_view.run_source import RunSource
from gristmill_view.source import RolloutQuery, ViewError

pytestmark = pytest.mark.slow


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[RunSource]:
    folder = tmp_path / "sums"
    folder.mkdir()
    rows = [
        {"step": step, "policy_version": f"1.{step}", "reward_mean": step / 10, "reward_parts": {"format": 1.0},
         "tokens": 10, "seconds": {"train": 0.5}}
        for step in range(1, 6)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = RunSource([tmp_path])
    yield found
    found.close()


async def test_run_without_an_api_is_read_from_its_files(source: RunSource) -> None:
    (line,) = await source.runs()
    assert (line["run"], line["step"], line["live"], line["reward"]) == ("sums", 5, False, 0.5)
    overview = await source.overview("sums")
    assert (overview["run"], overview["step"]) == ("sums", 5)
    series = await source.series("sums", ["reward_mean", "reward_parts.*"], 100)
    assert series["step"] == [1, 2, 3, 4, 5]
    assert series["series"]["reward_parts.format"]["mean"] == [1.0] * 5
    news = await source.news("sums", 3)
    assert [row["step"] for row in news["steps"]] == [4, 5]
    assert news["steps"][0]["reward_parts.format"] == 1.0


class EmptyStore:
    """An API without runs."""

    async def runs(self) -> list[str]:
        return []

    async def facts(self, run: str) -> Facts | None:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "lost"), rest_is_long(("open", True), ("finished", False), ("suspended", True), first=2)
)
async def test_files_of_an_open_run_that_the_api_does_not_have_are_trouble(
    source: RunSource, tmp_path: Path, state: str, lost: bool
) -> None:
    write_run_file(tmp_path / "sums", record(run_id="sums", state=RunState(state)))
    with contextlib.closing(RunSource([tmp_path], EmptyStore())) as of_api:
        shown = [await of_api.overview("sums"), (await of_api.news("sums", 3))["overview"]]
    for overview in shown:
        trouble = overview["trouble"]
        assert (trouble is not None and trouble["code"] == "store_lost_run") is lost
    alone = await source.overview("sums")
    assert alone["trouble"] is None or alone["trouble"]["code"] != "store_lost_run"


@pytest.mark.slow
async def test_compare_names_the_settings_that_differ_between_finished_runs(source: RunSource, tmp_path: Path) -> None:
    env = {"model": "tiny", "dataset": {"temperature": 1.0}}
    write_run_file(tmp_path / "sums", record(run_id="sums", env=env, trainer={"seed": 0, "batch_size": 8}))
    write_run_file(tmp_path / "other", record(run_id="other", env=env, trainer={"seed": 1, "batch_size": 8}))
    found = await source.compare(["sums", "other"])
    assert found["settings_diff"] == [{"key": "trainer.seed", "values": {"sums": 0, "other": 1}}]
    assert {line["run"] for line in found["runs"]} == {"sums", "other"}


@pytest.mark.slow
async def test_damaged_run_does_not_hide_the_others(source: RunSource, tmp_path: Path) -> None:
    for name, metrics in (("broken", '{"step": 1, "rew\n'), ("not a run id", '{"step": 1}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(metrics)
    assert {line["run"]: line["step"] for line in await source.runs()} == {"sums": 5, "broken": 0}


async def test_errors_of_the_reading_process_keep_code_status_and_remedy(source: RunSource) -> None:
    with pytest.raises(ViewError) as caught:
        await source.overview("nothing")
    assert (caught.value.code, caught.value.status) == ("run_missing", 404)
    assert caught.value.remedy


@pytest.mark.parametrize("run", ["..", ".", "", "../sums", "sums/../sums", "a\x00b", "x" * 65, ".hidden"])
async def test_run_id_cannot_name_a_folder_outside_the_roots(source: RunSource, run: str) -> None:
    with pytest.raises(ViewError) as caught:
        await source.overview(run)
    assert caught.value.code == "run_missing"


@pytest.mark.slow
@pytest.mark.parametrize("noticed", [False, True], ids=["at the question", "before it"])
async def test_reading_process_that_is_killed_is_replaced(source: RunSource, noticed: bool) -> None:
    await source.overview("sums")
    pool = source._pool
    assert pool is not None
    (pid,) = cast(dict[int, object], pool._processes)
    os.kill(pid, 9)
    with contextlib.suppress(BrokenProcessPool):
        while noticed:
            pool.submit(os.getpid)
    with pytest.raises(ViewError) as caught:
        await source.overview("sums")
    assert (caught.value.code, caught.value.status) == ("reader_ended", 503)
    assert (await source.overview("sums"))["step"] == 5


def test_texts_of_a_request_are_quoted(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path, "sums")
    run.archive(make_group("g0"))
    roots, injected = (tmp_path,), "x' OR 1=1 --"
    assert queries.rollouts_of(roots, "sums", RolloutQuery())["total"] > 0
    for query in (
        RolloutQuery(text=injected), RolloutQuery(outcome=injected), RolloutQuery(group=injected),
        RolloutQuery(env=injected), RolloutQuery(finish_reason=injected), RolloutQuery(part=injected, part_min=-9.0),
    ):  # fmt: skip
        assert queries.rollouts_of(roots, "sums", query)["total"] == 0, query


ODD: tuple[object, ...] = (
    "y",
    None,
    [1],
    {"a": "y"},
    {"a": {"b": 1}},
    True,
    float("nan"),
    float("inf"),
    10**400,
    -1,
    {},
    {"odd": 1.0},
    {"0": None},
)
FIELDS = (
    "pass@1", "prompts", "pass@1_stderr", "reward_mean", "reward_parts", "seconds", "staleness", "rejected", "receipts",
    "receipts.", "tokens", "policy_version", "rollout_logprob_diff_mean", "skipped", "loss", "other",
)  # fmt: skip


class OddStore:
    """An API with one run of odd rows, and a good one."""

    def __init__(self, row: dict[str, object]) -> None:
        self._row = row

    async def runs(self) -> list[str]:
        return ["odd", "good"]

    async def facts(self, run: str) -> Facts | None:
        row = readable(self._row) if run == "odd" else {"reward_mean": 0.5}
        return Facts(run=run, state="open", rows=[{**row, "step": 1}], evaluations=[{**row, "step": 1}])


@pytest.mark.parametrize("name", FIELDS)
async def test_odd_value_in_a_row_breaks_no_page(tmp_path: Path, name: str) -> None:
    for number, value in enumerate(ODD):
        folder = tmp_path / f"odd-{number}"
        folder.mkdir()
        row = {"pass@1": 1.0, "prompts": 8, name: value}
        lines = [
            json.dumps(one)
            for one in ({"step": 1, "reward_mean": 0.25}, 7, {"step": "y"}, {"step": 2**53 + 1}, {**row, "step": 2})
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert queries.overview_of((tmp_path,), folder.name)["step"] == 2
        assert queries.news_of((tmp_path,), folder.name, 0)["last_step"] == 2
        assert queries.series_of((tmp_path,), folder.name, [name, f"{name}.*"], 10)["step"] == [1, 2]
        source = RunSource([tmp_path], OddStore(row))
        overview = await source.overview("odd")
        assert (overview["step"], overview["state"]) == (1, "open")
    lines_of_files = {line["run"]: line["step"] for line in queries.run_lines((tmp_path,))}
    assert lines_of_files == {f"odd-{number}": 2 for number in range(len(ODD))}


async def test_run_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    class BrokenStore(OddStore):
        async def facts(self, run: str) -> Facts | None:
            if run == "odd":
                raise KeyError("step")
            return await super().facts(run)

    with contextlib.closing(RunSource([tmp_path], BrokenStore({}))) as source:
        assert [(line["run"], line["state"]) for line in await source.runs()] == [
            ("odd", "unreadable"),
            ("good", "open"),
        ]
