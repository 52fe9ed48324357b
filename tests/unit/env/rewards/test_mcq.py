"""Multiple choice: letters, indices and texts. Guessing twice does not increase the score."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards.mcq import mcq

CITIES = {"choices": ["Rome", "Oslo", "Paris", "Bern"]}

NUMBERED = {"choices": {"label": ["1", "2", "3", "4"], "text": ["rain", "snow", "hail", "sleet"]}}
OF_NUMBERED = [
    "Answer: 3", "Answer: 3. hail", "Answer: 3) hail", "The answer is (3) hail.", "The answer is 3: hail",
    "<answer>3. hail</answer>", r"\boxed{3. hail}", "It is cold.\n(3)", "#### 3", "#### hail", "#### 3) hail",
]  # fmt: skip


@pytest.mark.parametrize("completion", OF_NUMBERED)
def test_labels_may_be_digits(completion: str) -> None:
    assert mcq(completion, "3", NUMBERED) == 1.0
    assert mcq(completion, "2", NUMBERED) == 0.0


@pytest.mark.parametrize("completion", ["It is 3.5 cm: (5)", "#### 3 steps follow", "Answer: 3.5"])
def test_numbers_that_name_no_choice_are_no_choice(completion: str) -> None:
    assert mcq(completion, "3", NUMBERED) == 0.0


def test_hashes_may_mark_the_text_of_a_choice() -> None:
    assert mcq("#### Paris", "C", CITIES) == 1.0
    assert mcq("#### Oslo", "C", CITIES) == 0.0


RIGHT = [
    "#### C) Paris",
    "#### option C",
    "#### Step 1: look\nIt is in France.\n#### C",
    "Answer: C",
    "Answer: (C)",
    "Answer: C. Paris",
    "Answer: C) Paris",
    "**Answer: C**",
    "**Answer:** C",
    "Answer:\nC",
    "ANSWER: c",
    "The answer is C.",
    "The answer is (C).",
    "The answer is (c)",
    "The answer is **C**.",
    "The answer is [C]",
    "The answer is option C",
    "The answer is C because Paris is in France.",
    "The answer is C, as A and B are not in France.",
    r"\boxed{C}",
    r"$\boxed{\text{C}}$",
    r"\boxed{\text{(C) } Paris}",
    r"\boxed{\textbf{(C)}}",
    r"\boxed{C. Paris}",
    "<answer>C</answer>",
    "<answer>(C)</answer>",
    "<answer>The answer is C</answer>",
    "<answer>\nC\n</answer>",
    "#### C",
    "Rome is in Italy.\n(C)",
    "Rome is in Italy.\n\n**(C)**\n",
    "C",
    r"The answer is C. \boxed{C} <answer>C</answer>",
    "The answer is not obvious. The answer is C.",
    "<think>Answer: A</think>Answer: C",
    "A is in Italy. B is in Norway. Answer: C",
]
WRONG = [
    "Answer: A",
    "Answer: A or C",
    "Answer: A, C",
    "Answer: C and D",
    "Answer: C/D",
    "The answer is A. No, the answer is C.",
    r"The answer is A. \boxed{C}",
    r"\boxed{A} \boxed{C}",
    "<answer>A</answer><answer>C</answer>",
    "Answer: C\n(B)",
    "The answer is not C.",
    "The answer is Carbon.",
    "It must be C",
    "(C) is what I think.",
    "<think>Answer: C</think>",
    "<think>Answer: C",
    "I do not know.",
    "",
]


@pytest.mark.parametrize("completion", RIGHT)
@pytest.mark.parametrize("row", [{}, CITIES])
def test_mcq_right_letter_scores_one(completion: str, row: dict[str, Any]) -> None:
    assert mcq(completion, "C", row) == 1.0
    assert mcq(completion, "B", row) == 0.0


@pytest.mark.parametrize("completion", WRONG)
@pytest.mark.parametrize("row", [{}, CITIES])
def test_mcq_wrong_missing_or_several_letters_score_zero(completion: str, row: dict[str, Any]) -> None:
    assert mcq(completion, "C", row) == 0.0


@pytest.mark.parametrize(
    "completion", ["The answer is A good question.", "The answer is I think.", "The answer is a dog."]
)
def test_mcq_does_not_count_words_of_one_letter_as_choices(completion: str) -> None:
    assert mcq(completion, "A", {}) == 0.0
    assert mcq(completion, "I", {}) == 0.0


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("Answer: A because", "A"),
        ("Answer: A, since", "A"),
        ("The answer is A.", "A"),
        ("Answer: I", "I"),
        ("(A)", "A"),
    ],
)
def test_mcq_counts_the_letters_a_and_i_as_choices(completion: str, gold: str) -> None:
    assert mcq(completion, gold, {}) == 1.0


@pytest.mark.parametrize("gold", ["C", "c", "(C)", "C.", "2", "Paris", "paris", "#### C", r"\boxed{C}"])
def test_mcq_gold_may_be_a_letter_an_index_or_a_text(gold: str) -> None:
    assert mcq("Answer: C", gold, CITIES) == 1.0
    assert mcq("Answer: B", gold, CITIES) == 0.0


def test_mcq_first_index_may_be_one() -> None:
    assert mcq("Answer: C", "3", CITIES, first_index=1) == 1.0
    assert mcq("Answer: C", "2", CITIES, first_index=1) == 0.0
    assert mcq("Answer: C", "0", CITIES, first_index=1) is None


def test_mcq_accepts_the_text_of_a_choice() -> None:
    assert mcq("The answer is Paris.", "C", CITIES) == 1.0
    assert mcq(r"\boxed{\text{Paris}}", "C", CITIES) == 1.0
    assert mcq("The answer is Oslo.", "C", CITIES) == 0.0
    assert mcq(r"Answer: B \boxed{Paris}", "C", CITIES) == 0.0
    assert mcq("The answer is 4.", "B", {"choices": ["3", "4", "5"]}) == 1.0


def test_mcq_prefers_the_labels_of_the_data_set() -> None:
    numbered = {"choices": {"label": ["1", "2", "3"], "text": ["Rome", "Oslo", "Paris"]}}
    assert mcq("Answer: B", "2", numbered) == 1.0  # ARC: the label "2", not the index 2
    assert mcq("Answer: 2", "2", numbered) == 1.0
    assert mcq("Answer: Oslo", "2", numbered) == 1.0
    assert mcq("Answer: C", "2", numbered) == 0.0


@pytest.mark.parametrize("gold", ["", "K", "E", "4", "Berlin", "AB", "-1"])
def test_mcq_gold_that_names_no_choice_gives_no_score(gold: str) -> None:
    assert mcq("Answer: C", gold, CITIES) is None


def test_mcq_gold_text_of_two_choices_gives_no_score() -> None:
    assert mcq("Answer: A", "Rome", {"choices": ["Rome", "rome", "Oslo"]}) is None


def test_mcq_letters_are_configurable() -> None:
    assert mcq("Answer: R", "R", {}, letters="PQRS") == 1.0
    assert mcq("Answer: R", "2", {}, letters="PQRS") == 1.0
    assert mcq("Answer: C", "R", {}, letters="PQRS") == 0.0


def test_mcq_letter_beyond_the_choices_scores_zero() -> None:
    assert mcq("Answer: E", "C", CITIES) == 0.0


@pytest.mark.parametrize(
    ("choices", "code", "values"),
    [
        ("Rome", "choices_invalid", {}),
        ({"label": ["A"]}, "choices_invalid", {}),
        (["x"] * 11, "too_many_choices", {"choices": 11, "letters": 10}),
    ],
)
def test_mcq_invalid_choices_are_an_error(choices: object, code: str, values: dict[str, int]) -> None:
    with raises(RewardError, code, **values):
        mcq("Answer: C", "C", {"choices": choices})


@pytest.mark.parametrize(
    "bomb", ["answer is " * 40_000, r"\boxed{" * 50_000 + "}" * 50_000, "Answer: A," + " A," * 90_000, "####" * 50_000]
)
def test_mcq_scores_hostile_text_zero(bomb: str) -> None:
    assert mcq(bomb, "C", CITIES) == 0.0
