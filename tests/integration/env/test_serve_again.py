"""`serve` when it is started again: work that a kill left unfinished, and changes since then. Against the real API. A
stand-in that generates one token replaces the model server, because no test trains on the tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from rich.console import Console
from tests.integration.env.conftest import TRAINER
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer, tokenizer  # noqa: F401
from tests.unit.env.inference.conftest import GENERATE, choice
from transformers import PreTrainedTokenizerFast

from gristmill import Client, PolicyVersion, RunState
from gristmill.archive.run_file import write_run_file
from gristmill_env.commands import ProcessOptions
from gristmill_env.commands.process import process
from gristmill_env.errors import SavedError
from gristmill_env.evaluation.folder import read_plan
from gristmill_env.run_settings import RunSettings
from gristmill_env.serve import record_row_counts, serve
from gristmill_view.facts import read_files


@pytest.fixture
def server() -> Iterator[FailingServer]:
    made = FailingServer()
    made.answers[GENERATE] = lambda: (200, {"choices": [choice(weight_versions=None)]})
    yield made
    made.close()


@pytest.fixture
def launch(
    tmp_path: Path, session_api: ApiServer, server: FailingServer, tokenizer: PreTrainedTokenizerFast  # noqa: F811
) -> RunSettings:  # fmt: skip
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?"}\n' * 3)
    dataset = {"dataset_path": "rows.jsonl", "prompt_field": "question", "reward_functions": ["length"]}
    run = {"dataset": {**dataset, "eval_split": "train[:2]"}, "group_size": 2}
    (tmp_path / "sums.yaml").write_text(json.dumps({**run, "tokenizer_name": str(tmp_path / "tokenizer")}))
    environ = {"GRISTMILL_RUNS_DIR": str(tmp_path / "runs"), "GRISTMILL_MODELS_DIR": "/nowhere"}
    environ |= {"GRISTMILL_API_URL": session_api.url, "GRISTMILL_MODEL_URL": server.url}
    return RunSettings.read(["--config", str(tmp_path / "sums.yaml")], environ, "test")


@pytest.fixture
async def api(redis_url: str, session_api: ApiServer, launch: RunSettings) -> AsyncIterator[Client]:
    """A client of an API that knows the run."""
    async with Client(session_api.url) as client:
        await client.create_run("sums", launch.config.recorded("tiny"), launch.config.group_size)
        yield client


async def finish(api: Client, publisher: str = "filesystem") -> None:
    incarnation, _ = await api.take("sums", {**TRAINER, "publisher": publisher}, [])
    await api.record_version("sums", PolicyVersion(incarnation, 0))
    await api.record_version("sums", PolicyVersion(incarnation, 4))
    await api.finish("sums", incarnation)


async def evaluated(api: Client) -> list[int]:
    return [row.step for row in await api.metrics("sums", "eval")]


async def test_serve_runs_a_last_evaluation_that_a_kill_prevented(
    api: Client, launch: RunSettings, server: FailingServer
) -> None:
    server.answers["/weight_info"] = lambda: (200, {"weight_version": "1.4"})
    await finish(api)
    await serve(launch, {})
    assert await evaluated(api) == [4]
    asked = len(server.bodies)
    assert asked == 2
    await serve(launch, {})
    assert (await evaluated(api), len(server.bodies)) == ([4], asked), "done once, it is not done again"


async def test_files_of_a_deleted_training_are_not_those_of_its_successor(
    api: Client, launch: RunSettings, server: FailingServer, redis_url: str
) -> None:
    """Redis lost its data and the run's folder remained: run id, versions and settings are the same again."""
    folder = launch.run_folder
    server.answers["/weight_info"] = lambda: (200, {"weight_version": "1.4"})
    creations = []
    for training in range(2):
        async with Redis.from_url(redis_url) as redis:
            await redis.flushall()
        record = await api.create_run("sums", launch.config.recorded("tiny"), launch.config.group_size)
        creations.append(record.creation)
        await finish(api)
        await serve(launch, {})
        assert await evaluated(api) == [4]
        assert len(server.bodies) == 2 * (training + 1), "each training is measured"
    plans = [read_plan(path) for path in (folder / "evaluations").iterdir()]
    assert {plan.creation for plan in plans} == set(creations)
    write_run_file(folder, record)
    assert len(read_files("sums", [folder.parent]).evaluations) == 1


async def test_process_does_not_continue_groups_of_other_weights(
    launch: RunSettings, server: FailingServer, tmp_path: Path
) -> None:
    label = "1.4"
    server.answers["/weight_info"] = lambda: (200, {"weight_version": label})
    spans = [{"version": "1.4", "start": 0, "end": 1}]
    server.answers[GENERATE] = lambda: (200, {"choices": [choice(weight_versions=spans)] * 2})
    options = ProcessOptions(groups=1, out=tmp_path / "groups.jsonl")
    for _ in range(2):
        await process(launch, options, Console(quiet=True))
    assert len(server.bodies) == 1
    label = "1.5"
    with raises(SavedError, "config_differs"):
        await process(launch, options, Console(quiet=True))


async def test_close_command_ends_the_run(api: Client, session_api: ApiServer) -> None:
    async def close(run: str) -> int | None:
        environ = {**os.environ, "GRISTMILL_API_URL": session_api.url}
        command = [sys.executable, "-m", "gristmill_env", "close", run]
        return await (await asyncio.create_subprocess_exec(*command, env=environ)).wait()

    assert await close("sums") == 0
    assert (await api.get_run("sums")).state == RunState.FINISHED
    assert await close("other") == 1


async def test_serve_does_not_evaluate_weights_other_than_the_runs_last(
    api: Client, launch: RunSettings, server: FailingServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers["/weight_info"] = lambda: (200, {"weight_version": "default"})
    await finish(api)
    await serve(launch, {})
    assert await evaluated(api) == []
    told = [record.getMessage() for record in caplog.records if record.name == "gristmill_env.evaluation.run"]
    (missing,) = [text for text in told if "the last evaluation of run sums is missing" in text]
    assert "'default'" in missing
    assert "1.4" in missing


async def test_serve_ignores_weight_labels_if_the_run_has_no_publisher(
    api: Client, launch: RunSettings, server: FailingServer
) -> None:
    server.answers["/weight_info"] = lambda: (200, {"weight_version": "default"})
    await finish(api, publisher="none")
    await serve(launch, {})
    assert await evaluated(api) == [4]


async def test_changed_row_count_is_warned_about_once(
    api: Client, launch: RunSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for rows in (800, 800):
        await record_row_counts(api, "sums", {"rows/a": ("data set 'a'", rows), "rows/b": ("data set 'b'", 3)})
    assert caplog.text == ""
    await record_row_counts(api, "sums", {"rows/a": ("data set 'a'", 820), "rows/b": ("data set 'b'", 3)})
    assert [record.args for record in caplog.records] == [("data set 'a'", 820, 800, "sums")]
    caplog.clear()
    await record_row_counts(api, "sums", {"rows/a": ("data set 'a'", 820), "rows/b": ("data set 'b'", 3)})
    assert caplog.text == ""
