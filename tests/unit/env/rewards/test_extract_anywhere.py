"""`extract: anywhere` compared with Math-Verify itself, and the differences of the marked form."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from math_verify import parse, verify
from tests.unit.env.rewards.test_accuracy import EXACTLY_RIGHT, EXACTLY_WRONG, RIGHT_BY_ALGEBRA, WRONG_BY_ALGEBRA

from gristmill_env.answers.comparison import canonical_answer
from gristmill_env.answers.extraction import after_thinking, gold_answer
from gristmill_env.answers.symbolic_pool import SymbolicPool
from gristmill_env.errors import RewardError
from gristmill_env.rewards import create_reward
from gristmill_env.rewards.accuracy import accuracy, as_latex, surely_same

pytestmark = pytest.mark.slow

logging.getLogger("math_verify").setLevel(logging.ERROR)

GUIDE = Path(__file__).parents[4] / "docs" / "rewards.md"

UNMARKED = [
    (r"x \geq 5", r"Therefore $x \geq 5$.", 1.0),
    (r"[5, \infty)", r"Therefore $x \in [5, \infty)$.", 1.0),
    ("72", "Half of 144 is 72", 1.0),
    ("72", "Half of 144 is 72, so she has 73", 0.0),
    ("72", "It is $72$ or so.", 1.0),
    (r"\frac{9}{7}", r"That gives \(\frac{18}{14}\).", 1.0),
    (r"\{1, 2\}", r"The roots are \boxed{1} and \boxed{2}.", 1.0),
    (r"\{1, 2\}", "The roots are $1$ and $2$.", 1.0),
    ("72", "The final answer is 72. I hope it is correct.", 1.0),
    ("72", "I do not know.", 0.0),
    ("72", "", 0.0),
    ("72", r"\boxed{7", 0.0),
]


REFUSED = [("0", r"\boxed{1 000}"), ("2", r"\boxed{3 1/2}")]
"""Wrong answers that Math-Verify accepts, because it multiplies and adds numbers with a blank between them."""


def differences() -> list[tuple[str, str, float, float]]:
    """Rows of the table in docs/rewards.md: answer, completion, and the scores of both forms."""
    table = re.findall(r"<!-- differences: .*?-->(.*?)<!-- differences: end", GUIDE.read_text(), re.DOTALL)[0]
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| ([01]) \| ([01]) \|", table, re.MULTILINE)
    assert len(rows) == table.strip().count("\n") - 1
    return [(gold, completion, float(marked), float(anywhere)) for gold, completion, marked, anywhere in rows]


def accepts(gold: str, completion: str) -> bool:
    """Returns Math-Verify's score, with its own settings."""
    golds, found = (parse(side, parsing_timeout=None) for side in (as_latex(gold_answer(gold)), completion))
    return bool(verify(golds, found, timeout_seconds=None))


@pytest.mark.parametrize(("gold", "completion", "score"), UNMARKED)
async def test_extract_anywhere_accepts_unmarked_answers(gold: str, completion: str, score: float) -> None:
    assert await accuracy(completion, gold, extract="anywhere") == score == accepts(gold, completion)


@pytest.mark.parametrize(("gold", "completion"), [*EXACTLY_RIGHT, *EXACTLY_WRONG, *RIGHT_BY_ALGEBRA, *WRONG_BY_ALGEBRA])
async def test_extract_anywhere_matches_math_verify(gold: str, completion: str) -> None:
    expected = accepts(gold, after_thinking(completion)) and (gold, completion) not in REFUSED
    assert await accuracy(completion, gold, extract="anywhere") == expected


pieces = st.lists(
    st.sampled_from([
        "$", "$$", r"\(", r"\)", r"\[", r"\]", "[", "]", "{", "}", " ", "\n", ".", ",", "=", "-", "%", "x", "5", "72",
        "1/2", r"\frac{1}{2}", r"\fbox{72}", "boxed{72}", r"\boxed", r"\fbox", r"\text{ apples}", "and", "or", "answer",
        "The answer is", "The final answer is", "percent",
    ]),
    max_size=8,
)  # fmt: skip
insides = st.sampled_from(["72", "-72", "5", "x", "0.5", "{72}", "72 ", ""])


@given(pieces, insides, pieces, st.sampled_from(["72", "-72"]))
@example(["$"], "72", ["$", "%"], "72")
@example([], "72", ["The final answer is", " ", "5"], "72")
@example(["$"], "72", ["$", "and", "$", "5", "$"], "72")
@example([], "72", ["\n", r"\boxed", r"\text{ apples}"], "72")
def test_the_fast_path_agrees_with_math_verify(before: list[str], boxed: str, after: list[str], gold: str) -> None:
    text = "".join(before) + rf"\boxed{{{boxed}}}" + "".join(after)
    same = surely_same(gold, text)
    assert same is None or same == accepts(gold, text)


@given(pieces, st.sampled_from(["72", "-72"]))
def test_the_fast_path_without_a_box_agrees_with_math_verify(text: list[str], gold: str) -> None:
    same = surely_same(gold, "".join(text))
    assert same is None or same == accepts(gold, "".join(text))


@pytest.mark.parametrize(("gold", "completion", "marked", "anywhere"), differences())
async def test_the_differences_from_math_verify_are_as_documented(
    gold: str, completion: str, marked: float, anywhere: float
) -> None:
    assert await accuracy(completion, gold) == marked
    assert await accuracy(completion, gold, extract="anywhere") == anywhere == accepts(gold, completion)


async def test_integers_in_a_box_and_texts_without_mathematics_need_no_process(untouched_pool: SymbolicPool) -> None:
    assert await accuracy(r"So $x = \boxed{72}$.", "72", extract="anywhere") == 1.0
    assert await accuracy(r"So $x = \boxed{71}$.", "#### 72", extract="anywhere") == 0.0
    assert await accuracy("I do not know.", "72", extract="anywhere") == 0.0
    assert untouched_pool.asked == 0


@pytest.mark.parametrize("piece", [r"\[ x ", r"\( ", "$ x ", r"\boxed{"])
async def test_a_long_hostile_text_does_not_exceed_the_limit_of_a_check(piece: str) -> None:
    assert await accuracy(piece * 50_000, "72", extract="anywhere") == 0.0
    assert await accuracy(piece * 50_000 + r" $x$ \boxed{72}", "72", extract="anywhere") in (0.0, 1.0)


async def test_extract_anywhere_respects_the_other_options() -> None:
    thought = "<think>It is 72.</think> I do not know."
    assert await accuracy(thought, "72", extract="anywhere") == 0.0
    assert await accuracy(thought, "72", extract="anywhere", split_on_think_tag=False) == 1.0
    assert await accuracy("It is 73.", "72", extract="anywhere", tolerance=0.1) == 1.0
    assert await accuracy("It is 73.", "72", extract="anywhere", tolerance=0.001) == 0.0
    assert await accuracy(r"\boxed{72}, or \boxed{72}", "72", extract="anywhere", max_boxed_threshold=1) == 0.0


@pytest.mark.parametrize("gold", ["Paris", "no", "?", ""])
async def test_a_gold_without_mathematics_gives_no_score(gold: str, untouched_pool: SymbolicPool) -> None:
    assert await accuracy("It is Paris.", gold, extract="anywhere") is None
    assert untouched_pool.asked == 0


@pytest.mark.parametrize(
    ("completion", "extracted"),
    [
        (r"Therefore $x \geq 5$.", r"x \geq 5"), ("It is 72.", "72"), (r"\boxed{5}, of 72", "5"),
        ("I do not know.", None), ("<think>7</think>It is $5$", "5"),
    ],
)  # fmt: skip
def test_extract_anywhere_extracts_unmarked_answers_for_votes(completion: str, extracted: str | None) -> None:
    reward = create_reward({"type": "accuracy", "params": {"extract": "anywhere"}})
    assert reward.extracted(completion, {}) == (None if extracted is None else canonical_answer(extracted))
    assert create_reward("accuracy").extracted(completion, {}) == ("5" if "boxed" in completion else None)


def test_accuracy_refuses_an_unknown_value_of_extract() -> None:
    with pytest.raises(RewardError):
        create_reward({"type": "accuracy", "params": {"extract": "everywhere"}})
