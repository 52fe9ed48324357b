"""The position of the final answer in a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_env.answers.extraction import after_thinking, count_boxes, final_answer, gold_answer, last_boxed

STATED = [
    ("#### 5", "5"),
    ("#### 5\n", "5"),
    ("####\n5\nmore", "5"),
    ("#### 4\n#### 5", "5"),
    (r"#### \boxed{5}", "5"),
    (r"#### 5 \boxed{6}", r"5 \boxed{6}"),
    (r"#### 5" + "\n" + r"\boxed{6} The answer is 7.", "5"),
    ("#### Answer: 5", "5"),
    ("#### Paris", "Paris"),
    ("#### Summary of it\nThe answer is Paris.", "Paris"),
    (r"\boxed{5} The answer is 6.", "5"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"\boxed{a\\b}", r"a\\b"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{5} \fbox{6}", "6"),
    (r"\boxed{5} \boxed{6", "5"),
    (r"\boxed{5} and \boxed{6}", "5, 6"),
    (r"So $x_1 = \boxed{5}$, $x_2 = \boxed{6}$ and\(x_3=\boxed{7}\).", "5, 6, 7"),
    (r"\boxed{5} \quad\text{or}\quad \fbox{6}", "5, 6"),
    (r"\boxed{5} or \boxed{5}", "5"),
    (r"\boxed{4} no, \boxed{5} and \boxed{6}", "5, 6"),
    (r"\boxed{5}, then \boxed{6}", "6"),
    (r"\boxed{5}," + "\n\n" + r"\boxed{6}", "6"),
    (r"\boxed{5, \boxed{6}}", "6"),
    (r"\boxed{5} and \boxed{}", None),
    (r"\boxed{} and \boxed{5}", "5"),
    (r"#### \boxed{5} and \boxed{6}", "5, 6"),
    (r"\boxed{5} \boxed{}", None),
    (r"} \boxed{5}", "5"),
    ("The answer is 5", "5"),
    ("The answer is: 5.", "5"),
    ("The answer is 3.5. Yes!", "3.5"),
    ("The answer is St. Louis. It is large.", "St. Louis"),
    ("Answer: Dr. Martin Luther King", "Dr. Martin Luther King"),
    ("The answer is U.S. Steel.", "U.S. Steel"),
    ("The answer is C. Paris is in France.", "C"),
    ("The answer is 5! I am sure.", "5"),
    ("the ANSWER IS 5\nthe end", "5"),
    ("The answer is **Paris**.", "**Paris**"),
    ("The answer is\n\n$$\n5.\n6\n$$\nDone.", "$$\n5.\n6\n$$"),
    (r"The answer is \(5\) or \(6\).", r"\(5\) or \(6\)"),
    ("The answer is 5. The answer is 6.", "6"),
    ("Answer: 5", "5"),
    ("**Answer:** 5", "5"),
    ("**Answer**: 5", "5"),
    ("The answer is $5. I paid $6.", "$5"),
    ("The answers is 5", None),
    ("This answers: 5", None),
    ("The answer is", None),
    ("<answer>5</answer>", "5"),
    ("<ANSWER> 5 </ANSWER>", "5"),
    ("<answer>4</answer><answer>5</answer>", "5"),
    (r"<answer>It is \boxed{5}</answer> \boxed{6}", "5"),
    ("<answer>  </answer> #### 5", None),
    ("<answer>5", None),
    ("<think>#### 4</think>#### 5", "5"),
    ("<think>#### 4</think>", None),
    ("<think>#### 4", None),
    ("#### 5 <think>#### 4", "5"),
    ("thought</think> again</think> #### 5", "5"),
    ("5", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "answer"), STATED)
def test_final_answer_is_the_last_text_with_the_strongest_mark(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 + 6 = 12\n#### 12", "12"),
        (r"so \boxed{12}", "12"),
        (r"so \boxed{1} and \boxed{2}", "1, 2"),
        (r"#### \boxed{12}", "12"),
        (" 12 ", "12"),
        ("The answer is 12", "The answer is 12"),
        ("#### ", ""),
        ("6 + 6\n####", "6 + 6"),
    ],
)
def test_gold_answer_is_the_marked_part_or_the_whole_text(text: str, answer: str) -> None:
    assert gold_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 5 b 1,234.5 c", "1,234.5"),
        ("7-5", "5"),
        ("(7)-5", "5"),
        ("so -5", "-5"),
        (".5", ".5"),
        ("12,34", "34"),
        ("none", None),
    ],
)
def test_last_number_is_the_answer_if_allowed(text: str, number: str | None) -> None:
    assert final_answer(text, last_number=True) == number
    assert final_answer(text) is None


words = st.text(alphabet="ab {}\\$#.\n", max_size=30)


@pytest.mark.slow
@given(words, words)
def test_thinking_never_changes_the_answer(thought: str, said: str) -> None:
    assert final_answer(f"<think>{thought} #### 4</think>{said}") == final_answer(said)
    assert after_thinking(f"{thought}</think>{said}") == said


@pytest.mark.slow
@given(st.recursive(st.sampled_from(["", "x", "1", r"\{", r"\}", r"\\"]), lambda inner: st.one_of(
    inner.map(lambda text: "{" + text + "}"), st.tuples(inner, inner).map("".join)
)))  # fmt: skip
def test_last_boxed_returns_the_text_between_matching_braces(inside: str) -> None:
    text = r"first \boxed{0}, then \boxed{" + inside + "}, done"
    assert last_boxed(text) == (inside.strip() or None)
    assert count_boxes(text) == 2
