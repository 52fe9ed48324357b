"""Accuracy: which completions must score 1, which must score 0, and which have no score."""

from __future__ import annotations

import pytest

from gristmill_env.answers.symbolic_pool import SymbolicPool
from gristmill_env.rewards.accuracy import accuracy

pytestmark = pytest.mark.slow

EXACTLY_RIGHT = [
    ("72", "The answer is 72."),
    ("72", "The answer is 72"),
    ("72", "the final answer is: **72**."),
    ("72", "**The answer is 72.**"),
    ("72", "The answer is $72. I am sure."),
    ("72", "The answer is:\n\n72\n"),
    ("72", "The answer is\n\\[\n72\n\\]\nas wanted."),
    ("72", "The answer is $72$."),
    ("72", "The answer is \\(72\\)."),
    ("72", "Answer: 72"),
    ("72", "**Answer:** 72"),
    ("72", "**Final answer**: 72 apples"),
    ("72", "#### 72."),
    ("72", "#### $72"),
    ("72", "#### 72.00"),
    ("72", "####72"),
    ("72", r"#### $\boxed{72}$."),
    (r"#### \boxed{72}", "#### 72"),
    ("72", "##### 72"),
    ("72", "#### Answer: 72"),
    ("72", "#### Step 4: add\n8 · 9\n\\boxed{72}"),
    ("72", "#### Step 4: add\nSo the answer is 72."),
    ("72", "Half of 144 is\n#### 72\n"),
    ("72", "#### 71\n#### 72"),
    ("72", r"\boxed{72}"),
    ("72", r"\boxed {72}"),
    ("72", r"\fbox{72}"),
    ("72", r"\fbox{71} \boxed{72}"),
    ("72", r"\boxed{71} \fbox{72}"),
    ("72", r"so it is $\boxed{72}$."),
    ("72", r"\boxed{1} no, \boxed{72}"),
    ("72", r"\boxed{72} and \boxed{7"),  # the last that closes
    ("72", r"\boxed{\boxed{72}}"),
    ("72", r"\boxed{x = \boxed{72}}"),
    ("72", r"\boxed{x = 72}"),
    ("72", r"\boxed{\text{72}}"),
    ("72", r"\boxed{72\text{ cm}}"),
    ("72", r"\boxed{72^\circ}"),
    ("72", r"\boxed{\$72}"),
    ("72", r"\boxed{\frac{144}{2}}"),
    ("72", "<answer>72</answer>"),
    ("72", "<think>1 + 1</think><answer> 72 </answer>"),
    ("72", "<answer>1</answer> no, <answer>72</answer>"),
    ("72", r"<answer>\boxed{72}</answer>"),
    ("72", "<answer>The answer is 72.</answer>"),
    ("72", "<answer>#### 72</answer>"),
    ("72", "<answer>72</answer> #### 73"),
    ("72", "<think>The answer is 5.</think>The answer is 72."),
    ("72", "1</think>2</think>The answer is 72."),
    ("72", "The answer is 5. No, the answer is 72."),
    ("72", "#### 72 apples"),
    ("72", "#### 72 miles per hour"),
    ("72", "#### 72%"),
    ("72%", "#### 72"),
    ("0.72", "#### 72%"),
    ("#### -5", "#### -5"),
    ("#### -5", "The answer is −5."),
    ("#### -5", "The answer is -$5."),
    ("#### -5", "The answer is $-5."),
    ("#### -5", "#### - 5"),
    ("#### −5", "#### -5"),
    ("#### 1,234", "#### 1,234"),
    ("#### 1,234", "The answer is 1234."),
    ("#### 1,234", "The answer is $1,234.00."),
    ("1234", r"\boxed{1{,}234}"),
    ("1234", r"\boxed{1,\!234}"),
    ("1234", r"\boxed{1\,234}"),
    ("1234567", "#### 1,234,567"),
    ("0.5", "#### .5"),
    ("0.5", "#### 1/2"),
    ("0.5", "#### ½"),
    ("0.00001", "#### 1e-05"),
    ("1e-05", "#### 0.00001"),
    ("3 + 4 = 7\n#### 7", "<answer>7.0</answer>"),
    (r"The answer is \boxed{7}", "#### 7"),
    ("0.1", "#### 0.10000000000000000000"),
    ("9/7", r"\boxed{\dfrac{9}{7}}"),
    (r"\dfrac{9}{7}", r"\boxed{9/7}"),
    (r"\frac97", r"\boxed{\frac{18}{14}}"),
    (r"-\frac{1}{2}", r"\boxed{\frac{-1}{2}}"),
    (r"3\frac{1}{2}", r"\boxed{3.5}"),
    ("3 1/2", r"\boxed{\frac{7}{2}}"),
    ("1/3", "#### 0.333333"),
    (r"3\sqrt{2}", r"\boxed{3 \sqrt{2}}"),
    (r"\left( 3, \frac{1}{2} \right)", r"\boxed{(3, 0.5)}"),
    (r"(3, \pi)", r"\boxed{(3.0,\pi)}"),
    ("[0, 1)", r"\boxed{[0,1)}"),
    ("1, -2", r"\boxed{-2, 1}"),
    ("1,234, 5,678", r"\boxed{5678, 1{,}234}"),
    (r"\{1, 2\}", r"\boxed{\{2,1\}}"),
    ("1, 2", r"\boxed{2} and \boxed{1}"),
    ("x = 5", "#### 5"),
    ("5", "#### x=5"),
    (r"y = \sqrt{2}", r"\boxed{\sqrt{2}}"),
    (r"\dfrac{9\sqrt{2}}{7}", r"\boxed{\frac{9}{7}\sqrt{2}}"),
    (r"3\sqrt{2}", r"\boxed{\sqrt{18}}"),
    (r"3\sqrt{2}", "#### 3√2"),
    (r"\sqrt{2}", "#### sqrt(2)"),
    ("72", r"\boxed{8 \cdot 9}"),
    (r"(\frac{1}{2}, 3\sqrt{2})", r"\boxed{(0.5, \sqrt{18})}"),
    (r"\frac{\sqrt3}{2}", r"\boxed{\frac{3}{2\sqrt{3}}}"),
    (r"\frac{\pi}{2}", r"\boxed{\frac{1}{2}\pi}"),
    ("2", r"\boxed{\sqrt{4}}"),
    (r"\text{Friday}", "The answer is Friday."),
    (r"\text{(C)}", r"\boxed{C}"),
]

EXACTLY_WRONG = [
    ("72", "172"),
    ("72", "#### 172"),
    ("72", "#### 7.2"),
    ("72", "#### 0.72"),
    ("72", "72"),  # no mark: the completion states no final answer
    ("72", "It is 72."),
    ("72", ""),
    ("72", "<answer></answer>"),
    ("72", "<answer>73</answer> The answer is 72."),  # the tag was required
    ("72", "<answer>72"),
    ("72", r"\boxed{72"),
    ("72", r"\boxed{}"),
    ("72", "#### 72\n#### 73"),
    ("72", r"#### 73 \boxed{72}"),
    ("72", r"\boxed{73} The answer is 72."),
    ("72", "The answer is not 72."),
    ("72", "The answer is 72 million."),
    ("72", "The answer is 72 dozen."),
    ("72", "The answer is 72. No, the answer is unknown."),
    ("72", "<think>#### 72</think> I do not know."),
    ("72", r"<think>It may be \boxed{72}, let me see"),  # cut off while it was thinking
    ("72", "#### 72 is wrong"),
    ("72", "#### 1 000"),
    ("1000", "#### 1 000"),
    ("0", r"\boxed{1 000}"),
    ("2", r"\boxed{3 1/2}"),
    ("0.1", "#### 0.1000000000000000000001"),
    ("5", "#### -5"),
    ("-5", "#### 5"),
    ("72", "#### ٧٢"),  # digits, but not in a form that a table of results would accept
    ("0.5", "#### 0.5%"),
    ("1/3", "#### 0.33"),
    ("1/2", "#### 0.5000001"),
    ("9/7", r"\boxed{7/9}"),
    ("(3, 4)", r"\boxed{(3, 5)}"),
    ("(3, 4)", r"\boxed{(4, 3)}"),
    ("(3, 4)", r"\boxed{(3, 4, 5)}"),
    ("1, 2", r"\boxed{1, 3}"),
    ("1,234, 5,678", "#### 5,234, 1,678"),
    ("1, 2", r"\boxed{1, 2, 3}"),
    ("x = 5", r"\boxed{x = 6}"),
    (r"3\sqrt{2}", r"\boxed{2\sqrt{3}}"),
    (r"3\sqrt{2}", r"\boxed{-3\sqrt{2}}"),
    (r"\pi", r"\boxed{\sqrt{10}}"),
    (r"\pi", r"\boxed{\frac{22}{7}}"),
    (r"3\sqrt{2}", "The answer is the root."),
    (r"\text{Friday}", "The answer is Monday."),
    (r"\text{Friday}", r"\boxed{72}"),
]

RIGHT_BY_ALGEBRA = [
    (r"\{1, 2\}", r"\boxed{1} and \boxed{2}"),
    (r"\{1, 2\}", r"$x = \boxed{1}$ or $x = \boxed{2}$"),
    (r"\{1, 234\}", r"\boxed{1} and \boxed{234}"),
    (r"1+\sqrt{2}", r"\boxed{\sqrt{2}+1}"),
    (r"\frac{\pi}{2}", r"\boxed{1.570796}"),
    (r"\frac{\pi}{2}", "#### pi/2"),
    ("(x+1)^2", r"\boxed{x^2+2x+1}"),
    ("1024", r"\boxed{2^{10}}"),
    ("1024", "#### 2**10"),
    ("5050", r"\boxed{\binom{101}{2}}"),
    (r"(-\infty, 2) \cup (3, \infty)", r"\boxed{(3,\infty)\cup(-\infty,2)}"),
    (r"5 \text{ or } 7", r"\boxed{7, 5}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}"),
    ("2x+3=y", r"\boxed{y=2x+3}"),
    ("1 < x < 2", r"\boxed{(1,2)}"),  # not so the other way round: see below
]

WRONG_BY_ALGEBRA = [
    ("72", r"\boxed{71} or \boxed{72}"),
    (r"\{1, 2\}", r"\boxed{1} and \boxed{3}"),
    ("1234", "#### 12,34"),
    ("7273", "#### 72,73"),
    ("72", "The answer is 72 or 73."),
    ("72", "#### 72 or 73"),
    ("72", r"\boxed{72 \text{ or } 73}"),
    ("72", r"\boxed{72, 73}"),
    ("72", r"\boxed{72x}"),
    ("72", r"\boxed{72!}"),
    (r"\frac{\pi}{2}", r"\boxed{1.57}"),
    ("(x+1)^2", r"\boxed{x^2+2x+2}"),
    ("x+1", r"\boxed{y+1}"),
    ("x = 5", r"\boxed{y = 5}"),
    ("[0, 1)", r"\boxed{[0, 1]}"),
    ("(1,2)", r"\boxed{1 < x < 2}"),
    (r"3\sqrt{2}", r"\boxed{\foo{}"),
]


@pytest.mark.parametrize(("gold", "completion"), EXACTLY_RIGHT)
async def test_right_answers_score_one(gold: str, completion: str, untouched_pool: SymbolicPool) -> None:
    assert await accuracy(completion, gold) == 1.0
    assert (untouched_pool.asked, untouched_pool.pids) == (0, [])


@pytest.mark.parametrize(("gold", "completion"), EXACTLY_WRONG)
async def test_wrong_answers_score_zero(gold: str, completion: str, untouched_pool: SymbolicPool) -> None:
    assert await accuracy(completion, gold) == 0.0
    assert (untouched_pool.asked, untouched_pool.pids) == (0, [])


@pytest.mark.parametrize(("gold", "completion"), RIGHT_BY_ALGEBRA)
async def test_answers_that_algebra_finds_equal_score_one(gold: str, completion: str) -> None:
    assert await accuracy(completion, gold) == 1.0


@pytest.mark.parametrize(("gold", "completion"), WRONG_BY_ALGEBRA)
async def test_answers_that_algebra_finds_different_score_zero(gold: str, completion: str) -> None:
    assert await accuracy(completion, gold) == 0.0


@pytest.mark.parametrize(
    "gold", ["Paris", "no", "the cat", "", "#### ", "?", "5 hours and 20 minutes", "1 000", r"\frac{1"]
)
async def test_accuracy_gives_no_score_for_a_gold_that_is_not_mathematics(
    gold: str, untouched_pool: SymbolicPool
) -> None:
    assert await accuracy("The answer is 72.", gold) is None
    assert await accuracy("The answer is Paris.", gold) is None
    assert await accuracy("I do not know.", gold) is None
    assert untouched_pool.asked == 0


async def test_a_gold_that_only_algebra_finds_unreadable_gives_no_score() -> None:
    assert await accuracy(r"\boxed{\frac{1}{3}}", r"1, 2, \ldots") is None


async def test_accuracy_uses_the_last_number_only_if_configured() -> None:
    assert await accuracy("First 5, then 72.", "72", last_number=True) == 1.0
    assert await accuracy("First 72, then 5.", "72", last_number=True) == 0.0
    assert await accuracy("First 72. The answer is 5.", "72", last_number=True) == 0.0
    assert await accuracy("172", "72", last_number=True) == 0.0
    assert await accuracy("77-5", "5", last_number=True) == 1.0
    assert await accuracy("It is -5", "-5", last_number=True) == 1.0
    assert await accuracy("It is −5.", "-5", last_number=True) == 1.0


async def test_tolerance_is_relative_to_the_gold() -> None:
    assert await accuracy("#### 101", "100", tolerance=0.01) == 1.0
    assert await accuracy("#### 101.01", "100", tolerance=0.01) == 0.0
    assert await accuracy("#### 0.001", "0", tolerance=0.01) == 0.0
    assert await accuracy("#### 4.2426", r"3\sqrt{2}", tolerance=1e-4) == 1.0
    assert await accuracy("#### 4.2426", r"3\sqrt{2}") == 0.0
    assert await accuracy("#### 4.2", r"3\sqrt{2}", tolerance=1e-4) == 0.0


async def test_accuracy_searches_the_reasoning_only_if_configured() -> None:
    completion = r"<think>\boxed{72}</think> As I said."
    assert await accuracy(completion, "72") == 0.0
    assert await accuracy(completion, "72", split_on_think_tag=False) == 1.0
    assert await accuracy(completion + r"\boxed{5}", "72", split_on_think_tag=False) == 0.0


async def test_accuracy_treats_more_boxes_than_the_threshold_as_a_guess() -> None:
    completion = r"<think>\boxed{1}\boxed{2}</think>\boxed{71}, no: \boxed{72}"
    assert await accuracy(completion, "72", max_boxed_threshold=2) == 1.0
    assert await accuracy(completion, "72", max_boxed_threshold=1) == 0.0
    assert await accuracy(completion, "72", max_boxed_threshold=3, split_on_think_tag=False) == 0.0


@pytest.mark.parametrize(
    "bomb",
    [
        "<answer>" * 50_000,
        "<answer>" + ",1" * 100_000 + "</answer>",
        r"\boxed{" * 50_000,
        r"\boxed{" * 50_000 + "}" * 50_000,
        r"\boxed{" + r"\text{" * 100 + "}" * 101,
        "{" * 100_000,
        "answer is " * 40_000,
        "answer" + " " * 200_000,
        "answer" + "*" * 200_000,
        "#### " + "9" * 200_000,
        "#### 1e999999999",
        "#### 1e99",
        "#### " + "{" * 3000 + "}" * 3000,
        "#### " + "1,111" * 300,
        "#### " + "(" * 900,
        "#### " + "** " * 600,
    ],
)
async def test_accuracy_scores_hostile_text_without_the_symbolic_pool(bomb: str, untouched_pool: SymbolicPool) -> None:
    assert await accuracy(bomb, "72") == 0.0
    assert await accuracy(bomb, "72", last_number=True) == 0.0
    assert untouched_pool.asked == 0
