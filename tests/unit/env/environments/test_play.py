"""Environments that ask the model themselves: conversations, branches, and the tokens that are trained."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import PassTime
from tests.unit.env.environments.conftest import ITEM, Roll, text, trained
from tests.unit.env.gateway.conftest import SAMPLING, ScriptedModel

from gristmill import Permit, VersionSpan
from gristmill_env.data import Item, user
from gristmill_env.environments import Environment, Model, NoMoreRepliesError, create_environment
from gristmill_env.errors import EnvError, EpisodeError, InferenceError, PromptTooLongError
from gristmill_env.rewards import Score
from gristmill_env.rollouts.groups import RolloutGroup, build_group
from gristmill_env.rollouts.prompts import PromptBuilder

pytestmark = pytest.mark.slow


async def test_conversation_continues_the_sampled_tokens(roll: Roll, model: ScriptedModel) -> None:
    model.says = ["four", "4"]
    tokenized: list[str] = []

    async def play(item: Item, model: Model) -> float:
        first = await model.say(item.messages)
        second = await model.say("In digits.")
        return float((first.text, first.finish_reason, first.tokens, second.text) == ("four", "stop", 5, "4"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptBuilder, "_tokenize", _counting(tokenized))
        rollout = await roll(play)
    assert (rollout.reward, rollout.replies, rollout.text, rollout.others) == (1.0, 2, "4", ())
    whole = text(model, [*rollout.prompt.token_ids, *rollout.token_ids])
    assert whole == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
        "four<|im_end|>\n<|im_start|>user\nIn digits.<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )
    assert [len(body["token_ids"]) for body in model.server.bodies] == [
        len(rollout.prompt.token_ids), len(rollout.prompt.token_ids) + len(rollout.token_ids) - 2
    ]  # fmt: skip
    assert trained(model, rollout) == ["four<|im_end|>4<|im_end|>"]
    assert not any("four" in one for one in tokenized), "no reply is tokenized"
    assert [message["content"] for message in rollout.messages] == ["Be brief.", "2 + 2?", "four", "In digits.", "4"]


def _counting(tokenized: list[str]) -> Any:
    tokenize = PromptBuilder._tokenize

    def counted(self: PromptBuilder, text: str, **options: Any) -> Any:
        tokenized.append(text)
        return tokenize(self, text, **options)

    return counted


async def test_forks_are_branches_and_each_reply_is_trained_once(roll: Roll, model: ScriptedModel) -> None:
    model.says = ["start", "left", "right", "sub"]

    async def play(item: Item, model: Model) -> float:
        await model.say(item.messages)
        forks = [model.fork() for _ in range(2)]
        for fork, word in zip(forks, ("Left?", "Right?"), strict=True):
            await fork.say(word)
        await model.fresh().say("Sum up.")
        return 0.5

    rollout = await roll(play)
    assert [branch.text for branch in rollout.branches] == ["left", "right", "sub"]
    assert (rollout.replies, rollout.reward) == (4, 0.5)
    left, right, sub = rollout.branches
    assert left.prompt == right.prompt
    assert text(model, sub.prompt.token_ids).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSum"
    )
    assert trained(model, rollout) == ["start<|im_end|>left<|im_end|>", "right<|im_end|>", "sub<|im_end|>"]
    assert all(
        (logprob < 0) == mask
        for branch in rollout.branches
        for logprob, mask in zip(branch.logprobs, branch.mask, strict=True)
    )
    group = RolloutGroup(ITEM, SAMPLING, [rollout, rollout], [Score(0.5, {"episode": 0.5})] * 2, 1.0)
    spans = [[VersionSpan("1.0", span.start, span.end) for span in one.labels] for one in rollout.branches] * 2
    made = build_group(group, Permit(group_id="g00000003", row=3), "r", "e", spans, include_messages=True)
    assert made.rollout_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert int(made.mask.sum()) == 2 * sum(len(word) + 1 for word in ("start", "left", "right", "sub"))


async def test_forks_talk_at_the_same_time(roll: Roll) -> None:
    async def play(item: Item, model: Model) -> float:
        await model.say(item.messages)
        replies = await asyncio.gather(*(model.fork().say(f"{number}?") for number in range(8)))
        return float(len({reply.turn for reply in replies}))

    rollout = await roll(play)
    assert (rollout.reward, rollout.replies, len(rollout.branches)) == (8.0, 9, 8)
    assert sum(sum(branch.mask) for branch in rollout.branches) == 9 * 2


async def test_two_replies_at_a_time_in_one_conversation_are_refused(roll: Roll) -> None:
    async def play(item: Item, model: Model) -> None:
        await asyncio.gather(model.say(item.messages), model.say("And?"))

    with raises(EpisodeError, "conversation_busy"):
        await roll(play)


async def test_reply_that_is_left_out_is_context(roll: Roll, model: ScriptedModel) -> None:
    model.says = ["no", "4"]

    async def play(item: Item, model: Model) -> None:
        await model.leave_out(await model.say(item.messages))
        await model.say("Again.")

    rollout = await roll(play)
    assert trained(model, rollout) == ["4<|im_end|>"]
    assert text(model, rollout.token_ids).startswith("no<|im_end|>")
    assert rollout.reward is None


async def test_reply_that_play_does_not_wait_for_is_not_part_of_the_rollout(roll: Roll, model: ScriptedModel) -> None:
    closing = threading.Event()

    def hold() -> None:
        if len(model.prompts) == 2:
            assert closing.wait(60)

    class Leaves(Environment):
        async def play(self, item: Item, model: Model) -> float:
            await model.say(item.messages)
            self.left = asyncio.create_task(model.fork().say("Too late?"))
            await asyncio.wait({self.left}, timeout=0)
            return 1.0

        async def close(self) -> None:
            closing.set()
            await asyncio.wait({self.left})

    model.hold = hold
    rollout = await roll(Leaves)
    assert (rollout.replies, rollout.reward, rollout.others) == (1, 1.0, ())


async def test_conversation_without_room_ends_as_truncated(roll: Roll, model: ScriptedModel) -> None:
    async def play(item: Item, model: Model) -> float:
        while True:
            await model.say("?" * 100)
            model.reward = (model.reward or 0.0) + 1.0

    rollout = await roll(play, max_length=300)
    assert (rollout.finish_reason, rollout.replies, rollout.reward) == ("length", 2, 2.0)

    async def catches(item: Item, model: Model) -> float:
        try:
            while True:
                await model.say("?" * 100)
        except NoMoreRepliesError as end:
            await model.fresh().say(f"Why: {end.reason}.")
        return 7.0

    rollout = await roll(catches, max_length=300)
    assert [branch.finish_reason for branch in rollout.branches] == ["length", "stop"]
    assert (rollout.reward, rollout.messages[1]["content"]) == (7.0, "Why: length.")
    with raises(PromptTooLongError, "prompt_too_long"):
        await roll(play, max_length=50)


async def test_truncated_reply_and_used_up_turns_end_a_rollout(roll: Roll, model: ScriptedModel) -> None:
    async def play(item: Item, model: Model) -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(_talk_on(model))
        raise AssertionError

    async def _talk_on(model: Model) -> None:
        while True:
            await model.say("On.")

    rollout = await roll(play, max_turns=3)
    assert (rollout.finish_reason, rollout.replies) == ("turns", 3)
    generate = model.server.answers["/inference/v1/generate"]

    def cut() -> Any:
        status, body = generate()
        body["choices"][0]["finish_reason"] = "length"
        return status, body

    model.server.answers["/inference/v1/generate"] = cut
    rollout = await roll(play)
    assert (rollout.finish_reason, rollout.replies) == ("length", 1)


async def test_error_of_the_model_servers_is_not_the_environments(roll: Roll, model: ScriptedModel) -> None:
    model.server.answers["/inference/v1/generate"] = lambda: (500, {"error": "no"})

    async def play(item: Item, model: Model) -> float:
        try:
            await model.say(item.messages)
        except Exception:  # noqa: BLE001  what the test is about
            return 0.0
        return 1.0

    with pytest.raises(InferenceError):
        await roll(play)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (None, "environment_value"), (3, "environment_value"), ([], "environment_value"),
        ({"role": "user"}, "environment_value"), ([{"role": "user", "content": None}], "environment_value"),
        ([{"role": "user", "content": "x", "at": b"1"}], "environment_value"),
        (f"half {chr(0xD83D)}", "half_character"),
        ({"role": "assistant", "content": None, "tool_calls": ["x"]}, "environment_value"),
    ],
)  # fmt: skip
async def test_wrong_messages_are_named(roll: Roll, said: Any, code: str) -> None:
    async def play(item: Item, model: Model) -> None:
        await model.say(said)

    with raises(EnvError, code):
        await roll(play)


@pytest.mark.parametrize("value", ["1", float("nan"), [1.0], object()])
async def test_wrong_reward_is_named(roll: Roll, value: Any) -> None:
    async def play(item: Item, model: Model) -> Any:
        await model.say(item.messages)
        return value

    with raises(EpisodeError, "environment_value", method="Playing.play", row=3):
        await roll(play)


async def test_environment_that_says_nothing_has_failed(roll: Roll) -> None:
    async def play(item: Item, model: Model) -> float:
        return 1.0

    with raises(EpisodeError, "environment_said_nothing"):
        await roll(play)


async def test_play_that_takes_too_long_between_two_replies_has_failed(roll: Roll, pass_time: PassTime) -> None:
    async def play(item: Item, model: Model) -> None:
        await model.say(item.messages)
        asyncio.get_running_loop().call_later(0.2, pass_time, 60)
        await asyncio.Event().wait()

    with raises(EpisodeError, "call_overran", method="Playing.play", seconds=60.0) as failed:
        await roll(play, step_timeout=60.0)
    assert failed.value.unfinished is not None
    assert failed.value.unfinished.finish_reason == "error"


GAME = """
from gristmill_env.environments import Environment

class Game(Environment):
    async def play(self, item, model):
        reply = await model.say([*item.messages, user("Well?")])
        best = [await model.fork().say(word) for word in ("One.", "Two.")]
        return float(len(best) + (reply.answer == reply.text))

def user(text):
    return {"role": "user", "content": text}
"""


async def test_play_of_a_users_file_runs_in_its_process(roll: Roll, model: ScriptedModel, tmp_path: Any) -> None:
    (tmp_path / "game.py").write_text(GAME)
    model.says = ["a", "b", "c"]
    rollout = await roll(create_environment("game.py:Game", folder=tmp_path))
    assert (rollout.reward, [branch.text for branch in rollout.branches]) == (3.0, ["b", "c"])
    assert [dict(message) for message in rollout.messages[1:3]] == [dict(user("2 + 2?")), dict(user("Well?"))]
