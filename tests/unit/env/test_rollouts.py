"""Rollouts of a group that fail, are slow or run out of time: the group keeps the others, or is dropped."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, cast

import pytest
from tests.support.errors import raises
from tests.support.grids import rest_is_long
from tests.unit.env.conftest import PassTime
from transformers import PreTrainedTokenizerFast

from gristmill import Permit
from gristmill_env.data import Item, Message, user
from gristmill_env.environments import Environment, EnvironmentFactory, EnvironmentRunner, Reply, StepResult
from gristmill_env.environments.base import DatasetEnvironment
from gristmill_env.errors import (
    DatasetError,
    EnvError,
    EpisodeError,
    PromptError,
    PromptTooLongError,
    RequestTimeoutError,
    RolloutTimeoutError,
)
from gristmill_env.gateway import Policy
from gristmill_env.inference import Completion, GenerationRequest, ModelServers
from gristmill_env.inference.types import LabelSpan
from gristmill_env.rewards import Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.groups import RolloutGroup, build_group, version_spans
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.rollouts.turns import RolloutPlayer
from gristmill_env.saved.group import Attempt, saved_group
from gristmill_env.settings.run import EnvConfig

SIZE: Final = 3
LIMIT: Final = 60.0
"""Seconds of a time limit. The clock of the tests passes it when each rollout of the group ended or waits."""
ITEM = Item(row=0, index=0, prompt="?", answer="2")
PATIENT: Final = 30.0


class Model:
    """In place of the model servers: one token per reply, after `before` has returned."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.before: Callable[[GenerationRequest], Awaitable[None]] | None = None

    async def generate(self, request: GenerationRequest, *, evaluation: bool = False) -> list[Completion]:
        self.requests.append(request)
        if self.before is not None:
            await self.before(request)
        label = LabelSpan("1.0", 0, 1)
        return [Completion([50], [-0.5], "stop", [label], server="here") for _ in range(request.count)]


class Settled:
    """Counts the rollouts that ended or wait. With the last of the group, `LIMIT` is over."""

    def __init__(self, pass_time: PassTime) -> None:
        self._pass_time, self._count, self._lock = pass_time, 0, threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == SIZE:
                self._pass_time(LIMIT)


class Game(Environment):
    """Two turns. Each object has a number, in the order of their creation."""

    made: list[Game]
    all_made: threading.Event
    """Set when the first attempt of each rollout of the group exists, so that retries have numbers from SIZE on."""
    let_go: threading.Event
    settled: Settled

    def __init__(self) -> None:
        self.number, self.steps, self.closed = len(self.made), 0, 0
        self.made.append(self)
        if len(self.made) == SIZE:
            self.all_made.set()

    def reset(self, item: Item) -> Sequence[Message]:
        return [user(item.prompt)]

    def step(self, reply: Reply) -> StepResult:
        self.steps += 1
        return StepResult.end(float(self.number)) if self.steps == 2 else StepResult((user("again"),), reward=0.0)

    def close(self) -> None:
        self.closed += 1


class FailsOnce(Game):
    """Rollout 1 fails in its second step."""

    def step(self, reply: Reply) -> StepResult:
        if self.number == 1 and self.steps == 1:
            assert self.all_made.wait(PATIENT)
            raise KeyError("no board")
        return super().step(reply)


class FailsTwice(FailsOnce):
    """Rollout 1 and its retry fail."""

    def step(self, reply: Reply) -> StepResult:
        if self.number >= SIZE and self.steps == 1:
            raise KeyError("no board again")
        return super().step(reply)


class Waits(Game):
    """Rollout 1 waits in its second step until it is closed."""

    def wait(self) -> None:
        self.settled.add()
        self.let_go.wait()

    def step(self, reply: Reply) -> StepResult:
        if self.number == 1 and self.steps == 1:
            self.wait()
        return super().step(reply)

    def close(self) -> None:
        super().close()
        if self.number == 1:
            self.let_go.set()


class WaitsInReset(Waits):
    """Rollout 1 waits in its reset until it is closed, so it has no reply."""

    def reset(self, item: Item) -> Sequence[Message]:
        if self.number == 1:
            self.wait()
        return super().reset(item)


Make = Callable[..., RolloutGenerator]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def make(
    model: Model, tokenizer: PreTrainedTokenizerFast, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Make]:
    """Returns a generator of groups of SIZE rollouts in an environment. The settings are the run's."""
    Game.made, Game.all_made, Game.let_go, Game.settled = [], threading.Event(), threading.Event(), Settled(pass_time)
    runners: list[EnvironmentRunner] = []
    play = RolloutPlayer.play

    async def counted(self: RolloutPlayer, *given: Any) -> Any:
        try:
            return await play(self, *given)
        finally:
            Game.settled.add()

    monkeypatch.setattr(RolloutPlayer, "play", counted)

    def generator(kind: type[Environment], **settings: Any) -> RolloutGenerator:
        runners.append(EnvironmentRunner(EnvironmentFactory(kind), 10 * LIMIT))
        config = EnvConfig.model_validate({"group_size": SIZE, **settings})
        scorer = Scorer([WeightedReward(create_reward("episode"), 1.0)], has_answer=True)
        servers = cast("ModelServers", model)
        return RolloutGenerator(config, Policy("tiny", PromptBuilder(tokenizer), servers, 1024), scorer, runners[-1])

    yield generator
    Game.let_go.set()
    for runner in runners:
        await runner.close()


async def roll(generator: RolloutGenerator, **options: Any) -> RolloutGroup:
    return await generator.generate_and_score(ITEM, "g1", **options)


def ended(group: RolloutGroup) -> list[str]:
    return [rollout.finish_reason for rollout in group.rollouts]


def codes(failed: Sequence[EnvError]) -> list[str]:
    return [error.code for error in failed]


def all_closed() -> bool:
    return [game.closed for game in Game.made] == [1] * len(Game.made)


# --- Failures --------------------------------------------------------------------------------------------------
async def test_rollout_that_fails_once_is_played_again_alone(make: Make) -> None:
    group = await roll(make(FailsOnce))
    assert sorted(rollout.reward or 0 for rollout in group.rollouts) == [0.0, 2.0, 3.0], "rollout 1 became rollout 3"
    assert (len(Game.made), group.failed, all_closed()) == (SIZE + 1, [], True)


async def test_rollout_that_fails_again_is_left_out_and_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    group = await roll(make(FailsTwice))
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 2.0]
    assert [score.total for score in group.scores] == [0.0, 2.0], "a failure is never a score of 0"
    assert (len(Game.made), all_closed()) == (SIZE + 1, True)
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rollout_failed")]
    assert [
        word for word in ("prompt=g1", "n=2", "error=environment_raised", "no board again") if word not in line
    ] == []
    failed = [{"error": "environment_raised", "text": "FailsTwice.step: KeyError: 'no board again'"}]
    spans = [version_spans(rollout, "1.0", published=True) for rollout in group.rollouts]
    sent = build_group(group, Permit(group_id="g00000000", row=0), "run", "env", spans)
    assert (sent.size, sent.rewards.tolist(), sent.meta["failed"]) == (2, [0.0, 2.0], failed)
    assert saved_group(Attempt.of(group), run="run", model="tiny", settings=None).failed == failed


@pytest.mark.parametrize(
    ("kind", "settings", "made"),
    [(FailsTwice, {"min_rollouts": SIZE}, SIZE + 1), (FailsOnce, {"min_rollouts": 9, "rollout_retries": 0}, SIZE)],
    ids=["failed twice", "no retries"],
)
async def test_group_with_too_few_rollouts_raises_the_first_error_and_keeps_its_content(
    make: Make, kind: type[Game], settings: dict[str, int], made: int
) -> None:
    with raises(EpisodeError, "environment_raised", error="KeyError") as raised:
        await roll(make(kind, **settings))
    error = raised.value
    assert codes(error.failed) == ["environment_raised"]
    *finished, unfinished = error.rollouts
    assert {rollout.finish_reason for rollout in finished} <= {"stop"}
    assert (unfinished.finish_reason, unfinished.replies) == ("error", 2), "the reply on which step failed is kept"
    assert (len(Game.made), all_closed()) == (made, True)


async def test_evaluation_takes_no_group_with_fewer_rollouts(make: Make) -> None:
    with raises(EpisodeError, "environment_raised"):
        await roll(make(FailsTwice), count=SIZE)
    assert len((await roll(make(Game), count=5)).rollouts) == 5


async def test_request_that_fails_at_servers_that_answer_others_fails_its_rollout(make: Make, model: Model) -> None:
    failed: list[GenerationRequest] = []

    async def fail_twice(request: GenerationRequest) -> None:
        if len(failed) < 2 and request.earlier is None:
            failed.append(request)
            raise RequestTimeoutError("request_failed", "the request failed for 600 s while others were answered")

    model.before = fail_twice
    group = await roll(make(Game, rollout_retries=0, group_size=4))
    assert (len(group.rollouts), codes(group.failed)) == (2, ["request_failed"] * 2)
    failed.clear()
    assert len((await roll(make(DatasetEnvironment, rollout_retries=2))).rollouts) == SIZE, (
        "a shared request is repeated"
    )


ROW_ERRORS: dict[str, tuple[dict[str, Any], type[EnvError], str]] = {
    "too long": ({"prompt": "x" * 2000}, PromptTooLongError, "prompt_too_long"),
    "no text": ({"prompt": "\ud800"}, PromptError, "half_character"),
    "bad row": ({"prompt": "bad"}, DatasetError, "no_answer"),
}


@pytest.mark.parametrize(("changes", "kind", "code"), ROW_ERRORS.values(), ids=ROW_ERRORS)
@pytest.mark.parametrize("environment", [Game, DatasetEnvironment])
async def test_error_of_the_row_ends_the_group_without_a_retry(
    make: Make, model: Model, changes: dict[str, Any], kind: type[EnvError], code: str, environment: type[Environment]
) -> None:
    class Reads(environment):  # type: ignore[misc, valid-type]
        def reset(self, item: Item) -> Any:
            if item.prompt == "bad":
                raise DatasetError("no_answer", "the row has no answer")
            return super().reset(item)

    class ReadsLater(Reads):
        async def reset(self, item: Item) -> Any:
            return await super().reset(item)

    with raises(kind, code):
        await make(Reads if environment is Game else ReadsLater, rollout_retries=5).generate(
            Item(row=0, index=0, answer=None, **changes), "g1"
        )
    assert model.requests == []
    assert len(Game.made) <= SIZE, "no rollout is played again"


# --- One slow rollout ------------------------------------------------------------------------------------------
class SlowToReset(Game):
    """Rollout 0 is reset only after the other rollouts are closed."""

    def reset(self, item: Item) -> Sequence[Message]:
        if self.number == 0:
            assert self.let_go.wait(PATIENT), "the others wait for this rollout"
        return super().reset(item)

    def close(self) -> None:
        super().close()
        if sum(game.closed for game in self.made) == SIZE - 1:
            self.let_go.set()


class LastClosedLetsGo(SlowToReset):
    def reset(self, item: Item) -> Sequence[Message]:
        return Game.reset(self, item)


async def test_slow_reset_of_a_rollout_delays_no_other(make: Make) -> None:
    group = await roll(make(SlowToReset, rollout_retries=0, min_rollouts=SIZE))
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]


async def test_slow_first_reply_of_a_rollout_delays_no_other(make: Make, model: Model) -> None:
    async def hold_the_first(request: GenerationRequest) -> None:
        if len(model.requests) == 1:
            assert await asyncio.to_thread(Game.let_go.wait, PATIENT), "the others wait for this reply"

    model.before = hold_the_first
    group = await roll(make(LastClosedLetsGo, rollout_retries=0, min_rollouts=SIZE))
    assert ended(group) == ["stop"] * SIZE


async def test_equal_prompts_of_a_group_are_tokenized_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = PromptBuilder.build

    def counted(self: PromptBuilder, opening: Any, options: Any) -> Any:
        built.append(opening)
        return build(self, opening, options)

    monkeypatch.setattr(PromptBuilder, "build", counted)
    await roll(make(Game))
    assert len(built) == 1


async def test_single_replies_of_the_data_set_share_one_request(make: Make, model: Model) -> None:
    await make(DatasetEnvironment).generate(ITEM, "g1")
    await make(DatasetEnvironment, rollout_timeout=60).generate(ITEM, "g1")
    await make(Game).generate(ITEM, "g1")
    assert [request.count for request in model.requests] == [SIZE] + [1] * SIZE + [1] * 2 * SIZE


# --- Time limits -----------------------------------------------------------------------------------------------
async def test_rollout_beyond_its_time_is_left_out(make: Make) -> None:
    group = await roll(make(Waits, rollout_timeout=LIMIT, rollout_retries=0))
    assert ([rollout.reward for rollout in group.rollouts], codes(group.failed)) == ([0.0, 2.0], ["rollout_timeout"])
    assert all_closed()


async def test_group_with_too_few_rollouts_in_time_is_dropped_with_its_unfinished_rollouts(make: Make) -> None:
    with raises(RolloutTimeoutError, "rollout_timeout", seconds=LIMIT) as raised:
        await roll(make(Waits, rollout_timeout=LIMIT, rollout_retries=0, min_rollouts=SIZE))
    assert [rollout.finish_reason for rollout in raised.value.rollouts] == ["stop", "stop", "error"]


async def test_rollout_beyond_its_time_is_played_again(make: Make) -> None:
    group = await roll(make(Waits, rollout_timeout=LIMIT))
    assert ([rollout.reward for rollout in group.rollouts], group.failed) == ([0.0, 3.0, 2.0], [])


async def test_rollout_beyond_its_time_is_truncated_at_its_last_reply(make: Make, model: Model) -> None:
    held: list[GenerationRequest] = []

    async def hold_one_second_reply(request: GenerationRequest) -> None:
        if request.earlier is not None and not held:
            held.append(request)
            Game.settled.add()
            await asyncio.Event().wait()

    model.before = hold_one_second_reply
    limits = {"rollout_timeout": LIMIT, "rollout_timeout_action": "truncate"}
    group = await roll(make(Game, **limits))
    assert (sorted(ended(group)), group.failed, len(Game.made)) == (["length", "stop", "stop"], [], SIZE)
    [cut] = [rollout for rollout in group.rollouts if rollout.finish_reason == "length"]
    assert (cut.replies, cut.token_ids, cut.mask, cut.reward) == (1, [50], [True], 0.0)
    assert [message["role"] for message in cut.messages] == ["user", "assistant"], "no message without a reply to it"


@pytest.mark.parametrize("kind", [WaitsInReset, Game], ids=["reset", "first reply"])
async def test_rollout_beyond_its_time_without_a_reply_is_left_out(make: Make, model: Model, kind: type[Game]) -> None:
    async def hold_the_first_reply(request: GenerationRequest) -> None:
        if kind is Game and len(model.requests) == 1:
            Game.settled.add()
            await asyncio.Event().wait()

    model.before = hold_the_first_reply
    limits = {"rollout_timeout": LIMIT, "rollout_timeout_action": "truncate", "rollout_retries": 0}
    group = await roll(make(kind, **limits))
    assert (ended(group), codes(group.failed)) == (["stop", "stop"], ["rollout_timeout"])


async def test_group_beyond_its_time_goes_on_with_its_finished_rollouts(make: Make) -> None:
    group = await roll(make(Waits, group_timeout=LIMIT))
    assert ([rollout.reward for rollout in group.rollouts], codes(group.failed)) == ([0.0, 2.0], ["group_timeout"])
    assert (len(Game.made), all_closed()) == (SIZE, True), "no rollout is played again"


async def test_group_beyond_its_time_with_too_few_rollouts_is_dropped_with_its_content(make: Make) -> None:
    with raises(RolloutTimeoutError, "group_timeout", seconds=LIMIT) as raised:
        await roll(make(Waits, group_timeout=LIMIT, min_rollouts=SIZE))
    assert [rollout.reward for rollout in raised.value.rollouts] == [0.0, 2.0]
    assert codes(raised.value.failed) == ["group_timeout"]


# --- Many groups -----------------------------------------------------------------------------------------------
class Unreliable(Environment):
    """2 % of all rollouts fail."""

    __module__ = DatasetEnvironment.__module__  # as if it shipped: no threads, which would take most of the time
    chance: random.Random

    async def reset(self, item: Item) -> Sequence[Message]:
        return [user(item.prompt)]

    async def step(self, reply: Reply) -> StepResult:
        if self.chance.random() < 0.02:
            raise EpisodeError("environment_raised", "no board")
        return StepResult.end(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("retries", "left_out"), rest_is_long((1, range(1, 10)), (0, range(50, 200))))
async def test_failures_of_two_in_a_hundred_rollouts_cost_less_than_one_in_a_hundred_groups(
    make: Make, retries: int, left_out: range, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "gristmill_env")
    Unreliable.chance = random.Random(1)
    generator = make(Unreliable, group_size=16, rollout_retries=retries)
    groups = await asyncio.gather(
        *(generator.generate(ITEM, f"g{number}") for number in range(300)), return_exceptions=True
    )
    kept = [group for group in groups if not isinstance(group, BaseException)]
    assert len(kept) >= 0.99 * len(groups)
    assert sum(len(group.failed) for group in kept) in left_out
