"""A run with several sources against the real API. A stand-in that generates one token replaces the model server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
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

from gristmill import Client, PolicyVersion, TrajectoryGroup
from gristmill_env.commands import ProcessOptions
from gristmill_env.commands.process import process
from gristmill_env.commands.source import open_groups
from gristmill_env.commands.try_items import try_items
from gristmill_env.data.dataset import RowOrder
from gristmill_env.data.schedule import Schedule
from gristmill_env.errors import EnvError, RewardError
from gristmill_env.evaluation.folder import read_plan
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import read_groups
from gristmill_env.serve import serve

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
WEIGHTS = {"few": 1, "many": 3}
ROWS = {"few": 5, "many": 7}
RUN = {
    "group_size": 2,
    "max_num_workers": 2,
    "ensure_scores_are_not_same": False,
    "dataset": {"prompt_field": "question", "max_tokens": 4},
    "sources": [
        {"name": "many", "weight": 3, "dataset": {"dataset_path": "many.jsonl"}, "rewards": ["length"]},
        {"name": "few", "dataset": {"dataset_path": "few.jsonl", "max_tokens": 3}, "rewards": ["format", "length"]},
    ],
}


@dataclass
class Model:
    """A model server that may hold requests back."""

    server: FailingServer = field(default_factory=FailingServer)
    open: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.open.set()
        self.server.answers[GENERATE] = self._complete

    def hold(self) -> None:
        """Holds requests back until `open` is set. `waiting` counts them."""
        self.waiting = threading.Semaphore(0)
        self.open.clear()

    def _complete(self) -> tuple[int, object]:
        if not self.open.is_set():
            self.waiting.release()
        assert self.open.wait(120)
        return 200, {"choices": [choice(weight_versions=None)] * self.server.now.body["sampling_params"]["n"]}


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.open.set()
    made.server.close()


@pytest.fixture
def environ(tmp_path: Path, session_api: ApiServer, model: Model) -> dict[str, str]:
    named = {"GRISTMILL_API_URL": session_api.url, "GRISTMILL_MODEL_URL": model.server.url}
    return named | {"GRISTMILL_RUNS_DIR": str(tmp_path / "runs"), "GRISTMILL_MODELS_DIR": "/nowhere"}


@pytest.fixture
def config(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:  # noqa: F811
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    for name, count in ROWS.items():
        lines = [json.dumps({"question": f"{name} {number}?"}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path = tmp_path / "mixed.yaml"
    path.write_text(json.dumps({**RUN, "tokenizer_name": str(tmp_path / "tokenizer")}))
    return path


@pytest.fixture
def launch(config: Path, environ: dict[str, str]) -> RunSettings:
    return RunSettings.read(["--config", str(config)], environ, "test")


class Trainer:
    """The test as the trainer of the run. A step takes four groups."""

    def __init__(self, api: Client) -> None:
        self.api, self.step = api, 0
        self.groups: list[TrajectoryGroup] = []

    async def take(self) -> None:
        async with asyncio.timeout(120):
            while await self.api.open_run(5) is None:
                pass
        settings = {**TRAINER, "batch_size": 8, "training_steps": 12, "publisher": "none"}
        self.incarnation, _ = await self.api.take("mixed", settings, [])
        await self.api.record_version("mixed", PolicyVersion(self.incarnation, 0))

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            groups = await self.api.lease("mixed", self.incarnation, f"b{self.step}", 4, wait=120)
            assert groups is not None
            self.groups += groups
            await self.api.ack("mixed", self.incarnation, [f"b{self.step}"])
            await self.api.record_version("mixed", PolicyVersion(self.incarnation, self.step))

    def check(self) -> None:
        """Every permit has one group, of the source and the row that its number decides."""
        groups = {group.row: group for group in self.groups}
        assert sorted(groups) == list(range(len(self.groups))), "no permit is lost or done twice"
        schedule, counts = Schedule(WEIGHTS), dict.fromkeys(WEIGHTS, 0)
        orders = {name: RowOrder(count, seed=42, shuffle=True) for name, count in ROWS.items()}
        for number, group in sorted(groups.items()):
            source, row = schedule.at(number)
            assert (group.meta["source"], group.meta["index"]) == (source, orders[source].index(row))
            counts[source] += 1
            assert all(abs(counts[name] - (number + 1) * weight / 4) < 1 for name, weight in WEIGHTS.items())
            assert group.sampling.max_tokens == (3 if source == "few" else 4)
            assert ("format" in group.reward_parts) == (source == "few")


@pytest.fixture
async def trainer(redis_url: str, session_api: ApiServer) -> AsyncIterator[Trainer]:
    async with Client(session_api.url) as api:
        yield Trainer(api)


async def test_serve_takes_the_sources_of_a_run_by_their_weights(launch: RunSettings, trainer: Trainer) -> None:
    serving = asyncio.create_task(serve(launch, {}))
    await trainer.take()
    await trainer.train(7)
    await trainer.api.finish("mixed", trainer.incarnation)
    await asyncio.wait_for(serving, 120)
    trainer.check()
    assert {group.meta["source"] for group in trainer.groups} == set(WEIGHTS)


@contextlib.asynccontextmanager
async def killed_twice(
    config: Path, environ: dict[str, str], trainer: Trainer, model: Model, tmp_path: Path
) -> AsyncIterator[None]:
    """Trains with two environments, of which one is killed twice. The block runs before the end of the run."""
    command = [sys.executable, "-m", "gristmill_env", "serve", "--config", str(config)]
    everything = {**os.environ, **environ, "TMPDIR": str(tmp_path)}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=everything)

    first, second = start(), start()
    try:
        await trainer.take()
        await trainer.train(2)
        for _ in range(2):
            model.hold()
            assert await asyncio.to_thread(model.waiting.acquire, True, 120), "it holds no request"
            first.kill()
            first.wait()
            model.open.set()
            await trainer.train(1)
            first = start()
            await trainer.train(1)
        await trainer.train(1)
        yield
        await trainer.api.finish("mixed", trainer.incarnation)
        assert [await asyncio.to_thread(process.wait, 120) for process in (first, second)] == [0, 0]
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


@pytest.mark.long
async def test_killed_environment_changes_no_source_and_no_row(
    config: Path, environ: dict[str, str], trainer: Trainer, model: Model, tmp_path: Path
) -> None:
    async with killed_twice(config, environ, trainer, model, tmp_path):
        pass
    trainer.check()


@pytest.fixture
def curriculum(config: Path) -> Path:
    """A run in plain order, whose even rows always have the reward 1. Their groups are dropped."""
    (config.parent / "own.py").write_text(
        "def solved(completions, prompts):\n"
        "    return [1.0 if int(p.split()[1][:-1]) % 2 == 0 else n % 2 for n, p in enumerate(prompts)]\n"
    )
    changed = {**json.loads(config.read_text()), "curriculum": {"rest": 2}, "ensure_scores_are_not_same": True}
    changed["dataset"]["shuffle_dataset"] = False
    for source in changed["sources"]:
        source["rewards"] = ["own.py:solved"]
    config.write_text(json.dumps(changed))
    return config


async def issued(url: str) -> set[int]:
    """Returns the numbers of all permits of an open run. Checks that the rows of the other numbers may rest."""
    async with Redis.from_url(url) as redis, redis.pipeline(transaction=True) as pipe:  # all at one instant
        for name in ("trained", "leased", "dropped", "counters"):
            pipe.hgetall(f"gm:{{mixed}}:{name}")
        for name in ("ready", "permits", "reissue"):
            pipe.zrange(f"gm:{{mixed}}:{name}", 0, -1)
        trained, leased, dropped, counters, *others = await pipe.execute()
    found = {int(name[1:]) for names in (trained, leased, dropped, *others) for name in names}
    schedule = Schedule(WEIGHTS)
    for number in set(range(max(found))) - found:
        source, row = schedule.at(number)
        assert row % ROWS[source] % 2 == 0
        earlier = [row - epochs * ROWS[source] for epochs in (1, 2) if row >= epochs * ROWS[source]]
        assert any(schedule.number(source, turn) in found for turn in earlier), "it rests for two epochs"
    assert set(dropped.values()) == {b"same_scores"}
    assert (counters[b"rows_within"], counters[b"rows_above"]) == (b"5", b"7"), "odd rows and even rows"
    assert int(counters[b"passed"]) == max(found) + 1 - len(found) > 0
    return found


async def test_solved_rows_rest_in_each_source_although_their_groups_are_dropped(
    curriculum: Path, environ: dict[str, str], trainer: Trainer, redis_url: str
) -> None:
    serving = asyncio.create_task(serve(RunSettings.read(["--config", str(curriculum)], environ, "test"), {}))
    await trainer.take()
    await trainer.train(9)
    found, schedule = await issued(redis_url), Schedule(WEIGHTS)
    await trainer.api.finish("mixed", trainer.incarnation)
    await asyncio.wait_for(serving, 120)
    for number in found:
        source, row = schedule.at(number)
        epoch, index = divmod(row, ROWS[source])
        if index % 2 == 0 and epoch % 3 != 0:
            # The row's next turn was issued before its result arrived: the environment holds up to four permits.
            before = schedule.number(source, row - ROWS[source])
            assert epoch % 3 == 1
            assert sum(before < other < number for other in found) < 4, (source, row)


@pytest.mark.long
async def test_killed_environment_changes_no_row_that_rests(
    curriculum: Path, environ: dict[str, str], trainer: Trainer, model: Model, tmp_path: Path, redis_url: str
) -> None:
    async with killed_twice(curriculum, environ, trainer, model, tmp_path):
        await issued(redis_url)


@pytest.fixture
def evaluated(config: Path, environ: dict[str, str]) -> RunSettings:
    """A run with an evaluation of a source and two other evaluations, of which one fails."""
    (config.parent / "own.py").write_text("def fails(completion):\n    raise ValueError(completion)\n")
    held_out = {"dataset_path": "few.jsonl", "split": "train[:2]"}
    evaluations = [
        {"name": "bad", "dataset": {**held_out, "eval_samples": 32}, "rewards": ["own.py:fails"]},
        {"name": "good", "dataset": {**held_out, "max_tokens": 2}, "rewards": ["format"]},
    ]
    changed = {**json.loads(config.read_text()), "evaluations": evaluations}
    changed["sources"][1]["dataset"]["eval_split"] = "train[:1]"
    config.write_text(json.dumps(changed))
    return RunSettings.read(["--config", str(config)], environ, "test")


async def test_evaluations_have_figures_by_name_and_one_that_fails_hides_no_other(
    evaluated: RunSettings, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    serving = asyncio.create_task(serve(evaluated, {}))
    await trainer.take()
    await trainer.train(1)
    await trainer.api.finish("mixed", trainer.incarnation)
    await asyncio.wait_for(serving, 120)
    rows = await trainer.api.metrics("mixed", "eval")
    assert [row.step for row in rows] == [0, 1]
    for row in rows:
        assert [row.values["good/prompts"], row.values["few/prompts"]] == [2, 1]
        assert {"good/reward/format", "few/reward/format", "few/reward/length"} <= row.values.keys()
        assert "bad/prompts" not in row.values
    assert [str(record.args[1]) for record in caplog.records if "evaluation bad " in record.getMessage()]  # type: ignore[index]
    folders = sorted((evaluated.run_folder / "evaluations").iterdir())
    assert (
        sorted(read_plan(folder).settings["evaluation"] for folder in folders)
        == ["bad"] * 2 + ["few"] * 2 + ["good"] * 2
    )


@pytest.mark.parametrize(
    ("rows", "rewards", "error", "code"),
    [
        ('{"question": null}', "[length]", EnvError, "every_row_fails"),
        ('{"question": "few 0?"}', "['own.py:fails']", RewardError, "too_many_failures"),
    ],
)
async def test_source_whose_rows_or_rewards_fail_ends_the_run_with_its_name(
    config: Path, environ: dict[str, str], trainer: Trainer, tmp_path: Path,
    rows: str, rewards: str, error: type[EnvError], code: str,
) -> None:  # fmt: skip
    (tmp_path / "few.jsonl").write_text(rows)
    (tmp_path / "own.py").write_text("def fails(completion):\n    raise ValueError(completion)\n")
    flags = ["--config", str(config), "--set", "sources.1.weight=60", "--set", f"sources.1.rewards={rewards}"]
    serving = asyncio.create_task(serve(RunSettings.read(flags, environ, "test"), {}))
    await trainer.take()
    training = asyncio.create_task(trainer.train(12))
    try:
        with raises(error, code, source="few"):
            try:
                await asyncio.wait_for(serving, 240)
            except* EnvError as group:
                raise group.exceptions[0] from None
    finally:
        training.cancel()
        await asyncio.wait([training])


async def test_try_shows_items_of_every_source(config: Path, environ: dict[str, str], model: Model) -> None:
    launch = RunSettings.read(["--config", str(config), "--top_k", "3", "--min_p", "0.5"], environ, "test")
    console = Console(file=io.StringIO(), width=100)
    await try_items(launch, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert [shown.count(f"source {name}: ") for name in WEIGHTS] == [1, 1]
    assert shown.count("item 2: row") == 2
    sampling = [body["sampling_params"] for body in model.server.bodies]
    assert {(one["top_k"], one["min_p"], "repetition_penalty" in one) for one in sampling} == {(3, 0.5, False)}


async def test_process_writes_the_source_of_each_group_and_reads_it_again(
    launch: RunSettings, model: Model, tmp_path: Path
) -> None:
    out = tmp_path / "groups.jsonl"
    for count in (3, 8):
        await process(launch, ProcessOptions(groups=count, out=out), Console(quiet=True))
    schedule = Schedule(WEIGHTS)
    found = {group.row: group for group in read_groups(out)}
    assert {row: group.source for row, group in found.items()} == {row: schedule.at(row)[0] for row in range(8)}
    for group in open_groups(launch, out):
        assert group.settings is not None
        assert group.settings["dataset"]["dataset_path"] == f"{group.source}.jsonl"
        assert group.prompt == f"{group.source} {group.index}?"


async def test_dropped_rows_are_saved_with_their_source(launch: RunSettings, trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"question": null}\n')
    serving = asyncio.create_task(serve(launch, {}))
    await trainer.take()
    await trainer.train(3)
    await trainer.api.finish("mixed", trainer.incarnation)
    await asyncio.wait_for(serving, 120)
    dropped = launch.run_folder / "dropped" / "bad_row.jsonl"
    found = [json.loads(line) for line in dropped.read_text().splitlines()]
    assert {(group["source"], group["settings"]["dataset"]["dataset_path"]) for group in found} == {
        ("few", "few.jsonl")
    }  # fmt: skip
    assert {group.meta["source"] for group in trainer.groups} == {"many"}


@pytest.fixture
def of_several_turns(config: Path, environ: dict[str, str]) -> RunSettings:
    """A run with a data set and an environment of several turns."""
    rows = {"dataset_path": str(CONFIGS / "datasets/quickstart/train.jsonl")}
    sources = [
        {"name": "sums", "weight": 3, "dataset": rows, "rewards": ["format", "accuracy"]},
        {"name": "guess", "environment": {"type": "guess", "params": {"tries": 2}}, "dataset": rows,
         "rewards": ["format", "episode"]},
    ]  # fmt: skip
    dataset = {"prompt_field": "question", "answer_field": "answer", "max_tokens": 24}
    config.write_text(json.dumps({**json.loads(config.read_text()), "dataset": dataset, "sources": sources}))
    return RunSettings.read(["--config", str(config)], environ, "test")


async def test_run_mixes_a_data_set_and_an_environment_of_several_turns(
    of_several_turns: RunSettings, trainer: Trainer
) -> None:
    serving = asyncio.create_task(serve(of_several_turns, {}))
    await trainer.take()
    await trainer.train(3)
    await trainer.api.finish("mixed", trainer.incarnation)
    await asyncio.wait_for(serving, 120)
    names = [group.meta["source"] for group in trainer.groups]
    assert [names.count(name) for name in ("sums", "guess")] == [9, 3]
    for group in trainer.groups:
        assert ("episode" in group.reward_parts) == (group.meta["source"] == "guess")
        replies = {"sums": 1, "guess": 2}[group.meta["source"]]
        assert int(group.mask.sum()) == 2 * replies, "one token for each reply of two rollouts"
