"""The serve loop against the real API. A stand-in that generates one token replaces the model server, because no test
trains on the tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.env.conftest import TRAINER
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.grids import rest_is_long
from tests.unit.env.conftest import FailingServer, tokenizer  # noqa: F401
from tests.unit.env.inference.conftest import GENERATE, choice

from gristmill import Client, PolicyVersion
from gristmill.archive.drops import Drop, append_drops
from gristmill_env.errors import EnvError
from gristmill_env.run_settings import RunSettings
from gristmill_env.serve import serve
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.task import EnvironmentSpec
from gristmill_view import sql

from .test_serve_again import launch, server  # noqa: F401

GROUP_SIZE = 2
"""An evaluation requests one completion per prompt, so its requests differ from the requests of rows."""


class Run:
    """A run that is served in this process. The test is its trainer."""

    def __init__(self, api: Client, settings: RunSettings, model: FailingServer) -> None:
        self.api = api
        self.serving = asyncio.create_task(serve(settings, {}))
        self.model = model
        self.incarnation = 0

    async def take(self) -> None:
        async with asyncio.timeout(120):
            while await self.api.open_run(5) is None:
                pass
        self.incarnation, _ = await self.api.take("sums", {**TRAINER, "publisher": "none"}, [])
        await self.api.record_version("sums", PolicyVersion(self.incarnation, 0))

    async def train(self, until: int) -> list[int]:
        """Pretends to train to step `until`, and returns the rows."""
        rows = []
        for step in range(1, until + 1):
            groups = await self.api.lease("sums", self.incarnation, f"b{step}", 2, wait=60)
            assert groups is not None
            rows += [group.row for group in groups]
            await self.api.ack("sums", self.incarnation, [f"b{step}"])
            await self.api.record_version("sums", PolicyVersion(self.incarnation, step))
        return rows

    def asked(self, count: int) -> int:
        """Returns the number of requests for `count` completions."""
        return sum(body["sampling_params"]["n"] == count for body in self.model.bodies)

    async def until_asked(self, count: int) -> None:
        for _ in range(6000):
            if self.asked(count):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"no request for {count} completions")


@pytest.fixture
def held() -> dict[int, threading.Event]:
    """Holds requests for N completions back while the event at N is not set."""
    events = {1: threading.Event(), GROUP_SIZE: threading.Event()}
    for event in events.values():
        event.set()
    return events


@pytest.fixture
def dataset() -> dict[str, Any]:
    """Changes to the `dataset:` section, for a test to override."""
    return {}


@pytest.fixture
def environment() -> str:
    """The environment's type, for a test to override."""
    return "dataset"


@pytest.fixture
def settings() -> dict[str, Any]:
    """Changes to the top level of the configuration, for a test to override."""
    return {}


@pytest.fixture
def files() -> dict[str, str]:
    """Files of the configuration's folder, for a test to override."""
    return {}


@pytest.fixture
async def run(
    redis_url: str, session_api: ApiServer, launch: RunSettings, server: FailingServer,  # noqa: F811
    held: dict[int, threading.Event], dataset: dict[str, Any], files: dict[str, str],
    environment: str, settings: dict[str, Any], tmp_path: Path,
) -> AsyncIterator[Run]:  # fmt: skip
    def complete() -> tuple[int, Any]:
        if not hasattr(server.now, "body"):  # the client was cancelled before it sent the request
            return 400, {}
        count = server.now.body["sampling_params"]["n"]
        assert held[count].wait(60)
        return 200, {"choices": [choice(weight_versions=None)] * count}

    server.answers[GENERATE] = complete
    if environment == "game.py:Game":
        (tmp_path / "game.py").write_text(GAME)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    section = launch.config.dataset.model_dump(exclude_unset=True) | dataset
    changes = {
        "ensure_scores_are_not_same": False,
        "steps_per_eval": 2,
        "environment": EnvironmentSpec(type=environment),
        "dataset": DatasetConfig.model_validate(section),
        **settings,
    }
    config = launch.config.model_copy(update=changes)
    async with Client(session_api.url) as api:
        run = Run(api, dataclasses.replace(launch, config=config), server)
        yield run
        for event in held.values():
            event.set()
        run.serving.cancel()
        await asyncio.wait([run.serving])


async def test_serve_feeds_and_evaluates_a_run_until_it_is_finished(run: Run) -> None:
    await run.take()
    rows = await run.train(until=3)
    await run.api.finish("sums", run.incarnation)
    await asyncio.wait_for(run.serving, 300)
    status = await run.api.status("sums")
    assert (status.trained, status.outstanding, status.dropped) == (6, 0, {})
    assert sorted(rows) == list(range(6)), "no place in the order of the rows is left out or done twice"
    assert [row.step for row in await run.api.metrics("sums", "eval")] == [0, 2, 3]


REWARDS = """
def scored_with_hint(completion, hint=""):
    if hint == "of an evaluation":
        raise KeyError("no judge")
    return float(len(hint))
"""
TRAINED = '{"question": "1 + 1?", "hint": "of the training"}\n' * 3
EVALUATED = {
    "without the optional column": ('{"question": "1 + 1?"}\n' * 6, [0, 2, 3]),
    "fails on every row": ('{"question": "1 + 1?", "hint": "of an evaluation"}\n' * 80, []),
}


@pytest.mark.parametrize("dataset", [{"eval_dataset_path": "eval.jsonl", "eval_split": "test", "eval_limit": 80,
                                      "reward_functions": ["rewards.py:scored_with_hint"]}], ids=[""])  # fmt: skip
@pytest.mark.parametrize(
    ("files", "evaluated"),
    rest_is_long(
        *(
            ({"rewards.py": REWARDS, "rows.jsonl": TRAINED, "eval.jsonl": rows}, steps)
            for rows, steps in EVALUATED.values()
        )
    ),
    ids=EVALUATED,
)
async def test_failing_evaluation_does_not_end_or_change_the_training(run: Run, evaluated: list[int]) -> None:
    await run.take()
    assert len(await run.train(until=3)) == 6
    await run.api.finish("sums", run.incarnation)
    await asyncio.wait_for(run.serving, 300)
    status = await run.api.status("sums")
    assert (status.trained, status.dropped) == (6, {})
    found = await run.api.metrics("sums", "eval")
    assert [row.step for row in found] == evaluated
    assert [row.values["reward/scored_with_hint"] for row in found] == [0.0] * len(evaluated)


DIVIDES = """
def divides(completion, part):
    return 1 / part
"""


ROWS = (
    {"question": "1 + 1?", "part": 2, "gold": "1"},
    {"question": "2 + 2?", "part": 0, "gold": "4"},
    {"question": "3 + 3?", "part": 1, "gold": None},
)


@pytest.mark.parametrize("dataset", [{"eval_split": None, "reward_functions": ["rewards.py:divides"], "seed": 1,
                                      "ground_truth_field": "gold"}], ids=[""])  # fmt: skip
@pytest.mark.parametrize(
    "files", [{"rewards.py": DIVIDES, "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS)}], ids=[""]
)
async def test_dropped_groups_keep_their_content_the_row_of_the_file_and_the_error(run: Run, tmp_path: Path) -> None:
    await run.take()
    await run.train(until=3)  # 6 groups of one row in three: each row fails several times
    status = await run.api.status("sums")
    await run.api.finish("sums", run.incarnation)
    await asyncio.wait_for(run.serving, 300)
    assert set(status.dropped) == {"reward_error", "bad_row"}
    folder = tmp_path / "runs" / "sums"
    record = await run.api.get_run("sums")
    kept = [json.loads(line) for line in (folder / "dropped" / "reward_error.jsonl").read_text().splitlines()]
    drops = [
        Drop(creation=round(record.created_at * 1000), group_id=one["group_id"], row=one["row"], what="dropped",
             reason=one["reason"], time_ms=1)
        for name in ("reward_error", "bad_row")
        for one in map(json.loads, (folder / "dropped" / f"{name}.jsonl").read_text().splitlines())
    ]  # fmt: skip
    append_drops(folder, drops)
    found = sql(folder, "SELECT * FROM rollouts ORDER BY row, sequence").to_pylist()
    failed = [row for row in found if row["outcome_reason"] == "reward_error"]
    assert len(failed) == GROUP_SIZE * len(kept) > 0
    for row in failed:
        assert (row["index"], row["sequence"] in range(GROUP_SIZE), row["reward"]) == (1, True, None)
        assert "2 + 2?" in row["prompt"]
        assert row["answer"] == "4"
        assert row["completion"]
        assert row["error"] == "divides: ZeroDivisionError: division by zero"
    bad = [row for row in found if row["outcome_reason"] == "bad_row"]
    assert bad
    assert {(row["index"], row["prompt"], row["completion"], "'gold' of row 2" in row["error"]) for row in bad} == {
        (2, None, None, True)
    }


GAME = """
from gristmill_env.environments import Environment

class Game(Environment):
    def reset(self, item):
        return item.messages
    def step(self, reply):
        raise KeyError("no board")
"""
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("files", "dataset", "environment", "words", "kept"),
    rest_is_long(
        (
            {"tokenizer/chat_template.jinja": REFUSES_SYSTEM},
            {"system_prompt": "Think.", "eval_split": None},
            "dataset",
            ("System role not supported", "leave system_prompt out"),
            ("bad_row", range(1)),
        ),
        (
            {},
            {"eval_split": None},
            "game.py:Game",
            ("Game.step", "no board"),
            ("environment_error", range(1, GROUP_SIZE + 1)),
        ),
    ),
    ids=["template refuses every prompt", "step always raises"],
)
async def test_run_in_which_every_row_fails_ends_with_the_first_error(
    run: Run, words: tuple[str, ...], kept: tuple[str, range], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await run.take()
    with raises(EnvError, "every_row_fails") as raised:
        await asyncio.wait_for(run.serving, 300)
    assert [word for word in words if word not in str(raised.value)] == []
    dropped = sum((await run.api.status("sums")).dropped.values())
    assert 64 <= dropped < 200
    lines = [record for record in caplog.records if record.name.startswith("gristmill_env.")]
    assert len(lines) < dropped / 2, "no line per row"
    reason, replies = kept
    lines_kept = (tmp_path / "runs" / "sums" / "dropped" / f"{reason}.jsonl").read_text().splitlines()
    assert len(lines_kept) >= dropped, "one line per dropped row, and one per row that the end interrupted"
    group = json.loads(lines_kept[0])
    assert (words[0] in group["error"], group["prompt"]) == (True, "1 + 1?")
    assert [message["role"] for message in group["messages"]] == ["user"]
    assert len(group["completions"]) in replies, "the replies on which step failed are kept"


LOSES_ONE = """
from collections import Counter
from gristmill_env.environments import Environment, StepResult

RESETS = Counter()

class LosesOne(Environment):
    async def reset(self, item):
        RESETS[item.row] += 1
        if RESETS[item.row] == 2:
            raise KeyError("no board")
        return item.messages
    def step(self, reply):
        return StepResult.end()
"""


@pytest.mark.parametrize(("files", "environment"), [({"loses.py": LOSES_ONE}, "loses.py:LosesOne")], ids=[""])
@pytest.mark.parametrize(
    ("settings", "sizes", "failed"),
    [
        ({"group_size": 4, "rollout_retries": 0}, [3] * 2, [[{"error": "environment_raised"}]] * 2),
        ({"group_size": 4}, [4] * 2, [[]] * 2),
    ],
    ids=["left out", "played again"],
)
@pytest.mark.parametrize("dataset", [{"eval_split": None}], ids=[""])
async def test_group_is_submitted_without_its_failed_rollout(
    run: Run, sizes: list[int], failed: list[list[dict[str, str]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await run.take()
    groups = await run.api.lease("sums", run.incarnation, "b1", 1, wait=30) or []
    await run.api.ack("sums", run.incarnation, ["b1"])
    await run.api.record_version("sums", PolicyVersion(run.incarnation, 1))
    groups += await run.api.lease("sums", run.incarnation, "b2", 1, wait=30) or []
    await run.api.ack("sums", run.incarnation, ["b2"])
    await run.api.record_version("sums", PolicyVersion(run.incarnation, 2))
    await run.api.finish("sums", run.incarnation)
    await asyncio.wait_for(run.serving, 300)
    assert [group.size for group in groups] == sizes
    found = [[{"error": one["error"]} for one in group.meta.get("failed", [])] for group in groups]
    assert found == failed
    assert (await run.api.status("sums")).dropped == {}
    tally = next(
        record.getMessage() for record in reversed(caplog.records) if "groups submitted" in record.getMessage()
    )
    assert ("rollouts failed" in tally) == any(failed)


async def test_cancelled_serve_gives_its_permits_back(run: Run, held: dict[int, threading.Event]) -> None:
    held[GROUP_SIZE].clear()
    await run.take()
    await run.until_asked(GROUP_SIZE)
    assert (await run.api.status("sums")).outstanding > 0
    run.serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.serving
    assert (await run.api.status("sums")).outstanding == 0


@pytest.mark.parametrize("dataset", [{"eval_split": None}], ids=[""])
async def test_generation_of_a_group_ends_when_its_weights_are_too_old(
    run: Run, held: dict[int, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_env.serve._AGE_EVERY", 0.05)
    held[GROUP_SIZE].clear()
    await run.take()
    await run.until_asked(GROUP_SIZE)
    begun = (await run.api.status("sums")).outstanding
    # One step later the groups are as old as the trainer accepts none any more (max_staleness: 0).
    await run.api.record_version("sums", PolicyVersion(run.incarnation, 1))
    for _ in range(6000):
        if (await run.api.status("sums")).dropped.get("stale", 0) == begun:
            break
        await asyncio.sleep(0.02)
    assert (await run.api.status("sums")).dropped == {"stale": begun}
    held[GROUP_SIZE].set()
    groups = await run.api.lease("sums", run.incarnation, "b1", 1, wait=30)
    assert groups is not None
    assert groups[0].oldest_version == PolicyVersion(run.incarnation, 1)


async def test_rows_wait_while_a_due_evaluation_runs(run: Run, held: dict[int, threading.Event]) -> None:
    held[1].clear()
    await run.take()
    await run.until_asked(1)
    await asyncio.sleep(0.5)
    assert run.asked(GROUP_SIZE) == 0
    held[1].set()
    await run.until_asked(GROUP_SIZE)
