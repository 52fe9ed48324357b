"""Signature injection: the meaning of an argument's name, and which signatures are refused before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, create_reward
from gristmill_env.rewards.inputs import RowSchema
from gristmill_env.rewards.reward import BoundReward

GROUP = [
    Sample("a", "4", "2+2?", (1, 2), "stop", {"topic": "sums", "entry": 7}, ({"role": "user"},)),
    Sample("b", "4", "2+2?", (3,), "length", {"topic": "sums", "entry": 7}, ({"role": "user"},)),
]
Seen = list[dict[str, Any]]


def bound(function: Callable[..., Any], schema: RowSchema, name: str | None = None) -> BoundReward:
    [(full, leaf)] = create_reward(function, name=name).leaves().items()
    return leaf.bind(schema, full)


def seen(function: Callable[..., Any], columns: Sequence[str] = ("topic", "entry")) -> Seen:
    """Returns the arguments of each call that scores the group."""
    reward = bound(function, RowSchema(columns), "reward")
    return [dict(reward.arguments(call)) for call in reward.calls(GROUP)]


def test_reward_gets_only_its_declared_inputs() -> None:
    def own(completion: str, tokens: list[int], finish_reason: str) -> None: ...
    def of_the_row(answer: str, ground_truth: str, prompt: str, messages: list[Any], row: dict[str, Any]) -> None: ...
    def columns(topic: str, entry: int) -> None: ...
    def none() -> None: ...

    assert seen(own) == [
        {"completion": "a", "tokens": (1, 2), "finish_reason": "stop"},
        {"completion": "b", "tokens": (3,), "finish_reason": "length"},
    ]
    row = {
        "answer": "4",
        "ground_truth": "4",
        "prompt": "2+2?",
        "messages": ({"role": "user"},),
        "row": {"topic": "sums", "entry": 7},
    }
    assert seen(of_the_row) == [row, row]
    assert seen(columns) == [{"topic": "sums", "entry": 7}] * 2
    assert seen(none) == [{}, {}]


def test_plural_argument_gets_a_list_in_one_call() -> None:
    def group(completions: list[str], token_lists: Any, finish_reasons: Any, answers: Any) -> None: ...
    def more(ground_truths: Any, prompts: Any, message_lists: Any, rows: Any) -> None: ...
    def columns(topics: list[str], entries: list[int]) -> None: ...

    assert seen(group) == [
        {
            "completions": ["a", "b"],
            "token_lists": [(1, 2), (3,)],
            "finish_reasons": ["stop", "length"],
            "answers": ["4", "4"],
        }
    ]
    assert set(seen(more)[0]) == {"ground_truths", "prompts", "message_lists", "rows"}
    assert seen(columns) == [{"topics": ["sums", "sums"], "entries": [7, 7]}]


def test_group_reward_may_have_singular_arguments_for_values_of_the_row() -> None:
    def group(completions: list[str], answer: str, row: dict[str, Any], topic: str) -> None: ...

    assert seen(group) == [
        {"completions": ["a", "b"], "answer": "4", "row": {"topic": "sums", "entry": 7}, "topic": "sums"}
    ]


def test_argument_with_the_exact_name_of_a_column_is_not_a_plural() -> None:
    def reward(topics: str) -> None: ...

    sample = Sample("", row={"topic": "x", "topics": "all of them"})
    found = bound(reward, RowSchema(("topic", "topics")))
    [call] = found.calls([sample])
    assert not found.group_level
    assert found.arguments(call) == {"topics": "all of them"}


def test_an_argument_with_a_default_may_be_missing() -> None:
    def reward(completion: str, answer: str = "none", level: int = 3) -> None: ...

    schema = RowSchema((), has_answer=False)
    assert bound(reward, schema).arguments(GROUP[:1]) == {"completion": "a"}
    assert seen(reward) == [{"completion": "a", "answer": "4"}, {"completion": "b", "answer": "4"}]


def mixed(completion: str, answers: list[str]) -> None: ...
def mixed_columns(tokens: list[int], topics: list[str]) -> None: ...
def mistyped(completoin: str) -> None: ...
def mistyped_column(topik: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "code", "values", "remedy"),
    [
        (mixed, "mixed_inputs", {"plural": ["answers"], "singular": ["completion"]}, "'completions' for 'completion'"),
        (mixed_columns, "mixed_inputs", {"plural": ["topics"], "singular": ["tokens"]}, "'token_lists' for 'tokens'"),
        (mistyped, "unknown_input", {"reward": "mistyped", "input": "completoin"}, "'completion'"),
        (mistyped_column, "unknown_input", {"input": "topik", "columns": ["topic", "entry"]}, "'topic'"),
    ],
)
def test_argument_that_cannot_be_filled_is_refused_when_the_run_is_loaded(
    function: Callable[..., Any], code: str, values: dict[str, Any], remedy: str
) -> None:
    with raises(RewardError, code, **values) as raised:
        bound(function, RowSchema(("topic", "entry")))
    assert remedy in str(raised.value)


def variadic(*texts: str) -> None: ...
def keywords(completions: list[str], **kwargs: Any) -> None: ...
def positional(completion: str, /) -> None: ...
def unreadable(completion: str, *, mark: Missing = 1) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Misplaced:
    def __init__(self, mark: str) -> None: ...
    def __call__(self, completion: str, *, scale: float = 1.0) -> None: ...


class Silent:
    def __init__(self, *, mark: str) -> None: ...


@pytest.mark.parametrize(
    ("target", "code", "values"),
    [
        (variadic, "argument_without_name", {"argument": "texts"}),
        (keywords, "argument_without_name", {"argument": "kwargs"}),
        (positional, "argument_without_name", {"argument": "completion"}),
        (unreadable, "annotation_unreadable", {}),
        (Misplaced, "argument_misplaced", {"arguments": ["scale", "mark"]}),
        (Silent, "reward_not_callable", {}),
    ],
)
def test_invalid_reward_signature_is_refused_with_the_reason(
    target: Callable[..., Any], code: str, values: dict[str, Any]
) -> None:
    with raises(RewardError, code, reward=target.__name__, **values):
        create_reward(target)


async def test_the_annotation_of_an_input_need_not_exist() -> None:
    def reward(completion: OnlyForTypeCheckers, *, scale: float = 2.0) -> float:  # type: ignore[name-defined]  # noqa: F821
        return len(completion) * scale

    assert create_reward(reward, {"scale": "3"}).score(["ab"]) == [6.0]


def test_unknown_tokens_are_an_error_and_not_an_empty_list() -> None:
    text_only = Sample("a", tokens=None)
    with raises(RewardError, "tokens_unknown"):
        create_reward("length").score([text_only])
