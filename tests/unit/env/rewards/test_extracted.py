"""The canonical form of a completion's answer: wrong answers with the same meaning are one candidate in a vote."""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Execution, Scorer, WeightedReward, create_reward, reward
from gristmill_env.rewards.registry import _REGISTRY
from gristmill_env.rewards.reward import FunctionReward
from gristmill_env.running.limiter import Limits


def extracted(name: str, params: dict[str, Any], *completions: str, **row: Any) -> set[str | None]:
    made = create_reward(name, params)
    return {made.extracted(completion, row) for completion in completions}


@pytest.mark.parametrize(
    "completions",
    [
        (r"#### $\sqrt2$", r"\boxed{\sqrt{2}}", "answer: √2".replace("√2", r"\sqrt 2")),
        ("#### 72", "#### $72.00", r"\boxed{72}", "The answer is 72."),
        (r"\boxed{\frac{3\sqrt{2}}{2}}", r"\boxed{\frac{3}{\sqrt{2}}}"),
        ("#### Paris", "#### paris.", r"\boxed{\text{Paris}}"),
        ("#### x = 5", "#### 5"),
        (r"\boxed{(1, 0.5)}", r"\boxed{\left(1,\frac12\right)}"),
        (r"\boxed{\{2, 1\}}", r"\boxed{\{1,2,2\}}"),
    ],
)
def test_accuracy_canonical_answer_does_not_depend_on_notation(completions: tuple[str, ...]) -> None:
    found = extracted("accuracy", {}, *completions)
    assert len(found) == 1
    assert None not in found


def test_canonical_answers_with_different_meanings_differ() -> None:
    completions = ["#### 1", "#### -1", "#### 25%", "#### Paris", "#### Rome", "#### x", "#### X", r"\boxed{(1,2)}"]
    completions += [r"\boxed{(2,1)}", r"\boxed{[1,2]}", r"\boxed{\sqrt{2}}", r"\boxed{-\sqrt{2}}", r"\boxed{\pi}"]
    assert len(extracted("accuracy", {}, *completions)) == len(completions)


def test_accuracy_canonical_answer_follows_the_extract_options() -> None:
    assert extracted("accuracy", {}, "so it is 71") == {None}
    assert extracted("accuracy", {"last_number": True}, "so it is 71", "71.0") == {"71"}
    assert extracted("accuracy", {}, "<think>#### 7\n</think>") == {None}
    assert extracted("accuracy", {"split_on_think_tag": False}, "<think>#### 7\n</think>") == {"7"}


def test_exact_match_canonical_answer_is_the_compared_text() -> None:
    assert extracted("exact_match", {}, "#### Paris", "paris.", "<think>Rome</think>PARIS") == {"paris"}
    assert extracted("exact_match", {"ignore_case": False}, "#### Paris", "#### paris") == {"Paris", "paris"}
    assert extracted("exact_match", {"whole_if_unmarked": False}, "Paris") == {None}
    assert extracted("exact_match", {}, "<think>never ends") == {None}


def test_mcq_canonical_answer_is_the_chosen_letters() -> None:
    said = ["<answer>B</answer>", "(B)", "Answer: B) Paris", r"\boxed{\text{b}}", "#### B"]
    assert extracted("mcq", {}, *said) == {"B"}
    assert extracted("mcq", {}, "answer: Rome", "answer: C", choices=["Oslo", "Paris", "Rome"]) == {"C"}
    assert extracted("mcq", {"letters": "12345"}, "answer: (2)", "answer: 2") <= {"2", None}
    assert extracted("mcq", {}, "I do not know") == {None}
    assert extracted("mcq", {}, "answer: B. Or rather \\boxed{C}") == {"B, C"}


def test_custom_reward_may_define_its_canonical_answer() -> None:
    def last_word(completion: str, row: Any, *, upper: bool = False) -> str | None:
        words = completion.split()
        return (words[-1].upper() if upper else words[-1]) if words else None

    try:

        @reward("final_word", extract_answer=last_word)
        def judge(completion: str, answer: str, *, upper: bool = False) -> float:
            return float(completion.split()[-1] == answer)

        assert extracted("final_word", {}, "it is so", "so") == {"so"}
        assert extracted("final_word", {"upper": True}, "it is so", "so") == {"SO"}
    finally:
        _REGISTRY.pop("final_word", None)


@pytest.mark.parametrize("answer", [5, 1.0, b"5", ["5"], {"answer": "5"}, object()])
def test_extracted_answer_that_is_not_text_is_an_error_of_its_reward(answer: Any) -> None:
    def judge(completion: str, answer: str) -> float:
        return 1.0

    made = create_reward(judge)
    assert isinstance(made, FunctionReward)
    with raises(RewardError, "value_invalid", reward="judge"):
        dataclasses.replace(made, extract_answer=lambda completion, row: answer).extracted("5", {})


async def test_extraction_of_a_users_code_runs_on_no_event_loop_and_its_error_is_of_one_text() -> None:
    threads = set()

    def stated(completion: str, row: Any) -> str | None:
        threads.add(threading.current_thread())
        if completion == "fails":
            raise KeyError("no answer")
        return sys.exit(1) if completion == "exits" else completion

    made = create_reward("length")
    assert isinstance(made, FunctionReward)
    judge = dataclasses.replace(made, extract_answer=stated)
    async with Scorer([WeightedReward(judge, 1.0)], has_answer=True) as scorer:
        first, failed, exits = await scorer.extracted(["5", "fails", "exits"], {})
    assert first == "5"
    assert [type(one) for one in (failed, exits)] == [RewardError] * 2
    assert threading.current_thread() not in threads


async def test_extraction_that_hangs_ends_with_the_limits_of_rewards() -> None:
    let_go = threading.Event()

    def stated(completion: str, row: Any) -> str | None:
        let_go.wait()
        return None

    made = create_reward("length")
    assert isinstance(made, FunctionReward)
    judge = dataclasses.replace(made, extract_answer=stated)
    limits = Execution(Limits(cpu=60, wall=0.2))
    async with Scorer([WeightedReward(judge, 1.0)], has_answer=True, execution=limits) as scorer:
        (found,) = await scorer.extracted(["5"], {})
        let_go.set()
    assert isinstance(found, RewardError)
    assert found.code == "call_overran"


def test_canonical_answer_of_other_rewards_is_the_marked_answer() -> None:
    assert extracted("cosine_scaled", {"base_url": "http://localhost:1"}, "#### 7.0", "answer: 7") == {"7"}
