"""Accuracy: what must score 1, what must score 0, and when nothing can be said."""

from __future__ import annotations

import time

import pytest

from gristmill_env.rewards import Sample, create_reward

RIGHT = [
    ("72", "The answer is 72."),
    ("72", "The answer is 72"),
    ("72", "the final answer is: **72**."),
    ("72", "The answer is $72. I am sure."),
    ("72", "#### 72."),
    ("72", "#### $72"),
    ("72", "#### 72.00"),
    ("72", "####72"),
    ("72", "Half of 144 is\n#### 72\n"),
    ("72", r"\boxed{72}"),
    ("72", r"so it is $\boxed{72}$."),
    ("72", r"\boxed{1} no, \boxed{72}"),
    ("72", "<answer>72</answer>"),
    ("72", "<think>1 + 1</think><answer> 72 </answer>"),
    ("72", "<answer>1</answer> no, <answer>72</answer>"),
    ("72", r"<answer>\boxed{72}</answer>"),
    ("72", "<answer>The answer is 72.</answer>"),
    ("72", "<answer>#### 72</answer>"),
    ("72", "<think>The answer is 5.</think>The answer is 72."),
    ("#### -5", "#### -5"),
    ("#### -5", "The answer is −5."),
    ("#### -5", "The answer is -$5."),
    ("#### 1,234", "#### 1,234"),
    ("#### 1,234", "The answer is 1234."),
    ("1234", r"\boxed{1{,}234}"),
    ("0.5", "#### .5"),
    ("3 + 4 = 7\n#### 7", "<answer>7.0</answer>"),
    (r"The answer is \boxed{7}", "#### 7"),
    ("0.1", "#### 0.10000000000000000000"),
]

WRONG = [
    ("72", "172"),
    ("72", "#### 172"),
    ("72", "72 or 73"),
    ("72", "The answer is 72 or 73."),
    ("72", "#### 72 or 73"),
    ("72", "72"),  # no mark: the completion states no final answer
    ("72", "It is 72."),
    ("72", ""),
    ("72", "<answer></answer>"),
    ("72", "<answer>73</answer> The answer is 72."),  # the tag is what was asked for
    ("72", "<answer>72"),
    ("72", r"\boxed{72"),
    ("72", "#### 72\n#### 73"),
    ("72", "The answer is not 72."),
    ("72", "<think>#### 72</think> I do not know."),
    ("7273", "#### 72,73"),
    ("1234", "#### 12,34"),
    ("0.1", "#### 0.1000000000000000000001"),
    ("5", "#### -5"),
    ("-5", "#### 5"),
    ("72", "#### 72e0"),
    ("72", "#### ٧٢"),  # digits, but not what a table of results would take
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_right_answers_score_one(gold: str, completion: str) -> None:
    assert create_reward("accuracy").score(Sample(completion, answer=gold)) == 1.0


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_wrong_answers_score_zero(gold: str, completion: str) -> None:
    assert create_reward("accuracy").score(Sample(completion, answer=gold)) == 0.0


@pytest.mark.parametrize("gold", ["Paris", "", "#### ", "72 or 73", "x + 1", "1/2"])
def test_a_gold_that_is_no_number_gives_no_score(gold: str) -> None:
    assert create_reward("accuracy").score(Sample("The answer is 72.", answer=gold)) is None


def test_the_last_number_counts_only_when_asked_for() -> None:
    lenient = create_reward("accuracy", {"last_number": True})
    assert lenient.score(Sample("First 5, then 72.", answer="72")) == 1.0
    assert lenient.score(Sample("First 72, then 5.", answer="72")) == 0.0
    assert lenient.score(Sample("First 72. The answer is 5.", answer="72")) == 0.0


@pytest.mark.parametrize(
    "bomb",
    ["<answer>" * 50_000, r"\boxed{" * 50_000, "{" * 100_000, "#### " + "9" * 200_000, "answer is " * 40_000,
     "answer" + " " * 200_000, "#### 1e999999999", "<answer>" + ",1" * 100_000 + "</answer>"],
)  # fmt: skip
def test_no_completion_takes_long(bomb: str) -> None:
    started = time.perf_counter()
    assert create_reward("accuracy").score(Sample(bomb, answer="72")) == 0.0
    assert time.perf_counter() - started < 1.0
