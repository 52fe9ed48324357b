"""TRL's own reward functions run unchanged, and so do functions that use everything TRL passes to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward
from gristmill_env.rewards.trl import trl_reward

pytestmark = pytest.mark.slow

THOUGHT, UNTHOUGHT = "<think>2 + 2</think>4", "It is 4."


def test_think_format_reward_of_trl_scores_messages() -> None:
    made = create_reward({"type": "trl:trl.rewards:think_format_reward", "params": {"conversational": True}})
    assert made.name == "think_format_reward"
    assert made.score([THOUGHT, UNTHOUGHT]) == [1.0, 0.0]


def test_trl_function_gets_messages_if_the_rows_prompt_is_a_message_list() -> None:
    made = create_reward("trl:trl.rewards:think_format_reward")
    assert made.score([Sample(THOUGHT, conversational=True), Sample(UNTHOUGHT, conversational=True)]) == [1.0, 0.0]
    with raises(RewardError, "reward_raised", error="TypeError") as raised:
        made.score([THOUGHT])
    assert "params: {conversational: true}" in str(raised.value)


def test_accuracy_reward_of_trl_reads_the_column_solution() -> None:
    made = create_reward("trl:trl.rewards:accuracy_reward", {"conversational": True})
    answers = [r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"]
    assert made.score(answers, solution=r"$\frac{1}{3}$") == [1.0, 0.0]
    assert made.score(answers, solution="no mathematics") == [None, None]


def test_soft_overlong_punishment_is_made_with_params() -> None:
    params = {"max_completion_len": 100, "soft_punish_cache": 20}
    made = create_reward({"type": "trl:trl.rewards:get_soft_overlong_punishment", "name": "long", "params": params})
    assert made.name == "long"
    samples = [Sample("", tokens=[1] * length) for length in (80, 90, 101)]
    assert made.score(samples) == [0.0, -0.5, -1.0]


def test_token_ids_that_are_not_known_are_an_error_and_not_empty() -> None:
    """An empty list would be a completion without tokens, and never too long."""
    params = {"max_completion_len": 100, "soft_punish_cache": 20}
    made = create_reward({"type": "trl:trl.rewards:get_soft_overlong_punishment", "name": "long", "params": params})
    for unknown in ([Sample("x", tokens=None)], [Sample("x", tokens=[1]), Sample("y", tokens=None)], ["x"]):
        with raises(RewardError, "tokens_unknown"):
            made.score(unknown)


def test_trl_function_with_optional_token_ids_works_without_them() -> None:
    def optional(completions: list[str], completion_ids: list[list[int]] | None = None) -> list[float]:
        return [0.5 if completion_ids is None else 1.0] * len(completions)

    def open_ended(completions: list[str], **kwargs: Any) -> list[float]:
        return [float("completion_ids" in kwargs)] * len(completions)

    for function, unknown in ((optional, 0.5), (open_ended, 0.0)):
        made = trl_reward("made", function, {})
        assert made.score([Sample("x"), Sample("y")]) == [unknown, unknown]
        assert made.score([Sample("x", tokens=(1,)), Sample("y", tokens=())]) == [1.0, 1.0]


def test_trl_function_gets_all_turns_of_a_conversation() -> None:
    seen: list[Any] = []

    def used_a_tool(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(any(message["role"] == "tool" for message in one)) for one in completions]

    asked = {"role": "user", "content": "What is 6 · 7?"}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    several = Sample("It is 42.", messages=[asked], conversation=[asked, *turns], conversational=True)
    one = Sample(
        "42", messages=[asked], conversation=[asked, {"role": "assistant", "content": "42"}], conversational=True
    )
    made = trl_reward("made", used_a_tool, {})
    assert made.score([several, one]) == [1.0, 0.0]
    assert seen == [turns, [{"role": "assistant", "content": "42"}]]
    as_text = trl_reward(
        "made", lambda completions, **kwargs: [float(c == "It is 42.") for c in completions], {"conversational": False}
    )
    assert as_text.score([several]) == [1.0]


def test_trl_function_gets_its_configured_parameter() -> None:
    reference = "trl:trl.rewards:reasoning_accuracy_reward"
    made = create_reward(reference, {"conversational": True, "reasoning_delimiters": ["####"]})
    assert made.score([r"so #### \boxed{4}", r"so \boxed{4}"], solution="$4$") == [1.0, 0.0]


async def test_trl_function_runs_in_the_scorer_and_names_a_missing_column() -> None:
    reward = create_reward("trl:trl.rewards:accuracy_reward", {"conversational": True})
    async with Scorer([WeightedReward(reward, 2.0)], has_answer=False, columns=["solution"]) as scorer:
        samples = [Sample(rf"\boxed{{{n}}}", row={"solution": "$4$"}) for n in (3, 4)]
        assert [score.total for score in await scorer.score(samples)] == [0.0, 2.0]
    with raises(RewardError, "unknown_input", input="solution", columns=["solutions"]) as raised:
        Scorer([WeightedReward(reward, 1.0)], has_answer=False, columns=["solutions"])
    assert "'solutions'" in str(raised.value)


class Seen:
    """Records the arguments that a TRL function received."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def all_of_it(self, prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float | None]:
        self.given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs}
        kwargs["log_extra"]("column", [1, 2])
        kwargs["log_metric"]("metric", 0.5)
        return [None, kwargs["trainer_state"].global_step]

    def two_only(self, completions: list[str], level: list[int], scale: float = 1.0) -> list[float]:
        return [scale * value for value in level]

    async def asynchronous(self, completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(completion)) for completion in completions]


ROW = {"prompt": "2+2?", "completion": "4", "level": 3, "tags": ["easy"]}
MESSAGES = [{"role": "user", "content": "2+2?"}]


def samples(*texts: str, conversational: bool = False) -> list[Sample]:
    return [
        Sample(text, prompt="2+2?", tokens=(1, 2), row=ROW, messages=MESSAGES, conversational=conversational, step=12)
        for text in texts
    ]


def test_trl_calling_convention_holds_for_text_prompts() -> None:
    seen = Seen()
    assert trl_reward("seen", seen.all_of_it, {}).score(samples("4", "5")) == [None, 12.0]
    for name in ("trainer_state", "log_extra", "log_metric"):
        seen.given.pop(name)
    assert seen.given == {
        "prompts": ["2+2?", "2+2?"],
        "completions": ["4", "5"],
        "completion_ids": [[1, 2], [1, 2]],
        "level": [3, 3],
        "tags": [["easy"], ["easy"]],
    }


@pytest.mark.parametrize(("row", "params"), [(True, {}), (False, {"conversational": True})])
def test_trl_calling_convention_holds_for_message_lists(row: bool, params: dict[str, Any]) -> None:
    seen = Seen()
    trl_reward("seen", seen.all_of_it, params).score(samples("4", "5", conversational=row))
    assert seen.given["prompts"] == [MESSAGES, MESSAGES]
    assert seen.given["completions"] == [[{"role": "assistant", "content": text}] for text in ("4", "5")]


def test_trl_function_gets_text_if_configured() -> None:
    seen = Seen()
    trl_reward("seen", seen.all_of_it, {"conversational": False}).score(samples("4", "5", conversational=True))
    assert seen.given["completions"] == ["4", "5"]


def test_trl_function_without_kwargs_gets_only_its_arguments() -> None:
    assert trl_reward("two", Seen().two_only, {"scale": 0.5}).score(samples("4", "5")) == [1.5, 1.5]


def test_trl_async_function_is_awaited() -> None:
    assert trl_reward("lengths", Seen().asynchronous, {}).score(samples("4", "four")) == [1.0, 4.0]


def test_trl_function_that_needs_training_progress_fails_without_a_trainer() -> None:
    made = trl_reward("seen", Seen().all_of_it, {})
    with raises(RewardError, "no_trainer_state"):
        made.score(["4", "5"], tokens=[[1], [2]])


def test_trl_function_is_loaded_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def shout(completions, **kwargs): return [float(c.isupper()) for c in completions]"
    )
    assert create_reward("trl:mine.py:shout", folder=tmp_path).score(["YES", "no"]) == [1.0, 0.0]


def no_function(number: int = 0) -> int:
    return number


def plain(completions: list[str], *, scale: float = 1.0) -> list[float]:
    return [scale] * len(completions)


def needy(number: int) -> Callable[..., Sequence[float]]:
    return plain


@pytest.mark.parametrize(
    ("target", "params", "code", "values"),
    [
        (plain, {"scal": 2}, "unknown_parameter", {"parameter": "scal", "known": ["conversational", "scale"]}),
        (plain, {"conversational": "yes"}, "parameter_invalid", {"parameter": "conversational"}),
        (needy, {"numer": 2}, "unknown_parameter", {"parameter": "numer", "known": ["conversational", "number"]}),
        (needy, {}, "reward_not_made", {"error": "TypeError"}),
        (no_function, {}, "not_a_trl_reward", {}),
    ],
)
def test_invalid_trl_function_is_refused_with_its_code(
    target: Callable[..., Any], params: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with raises(RewardError, code, reward="made", **values) as raised:
        trl_reward("made", target, params)
    if code == "unknown_parameter":
        assert f"'{values['known'][-1]}'" in str(raised.value)
