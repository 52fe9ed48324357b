"""repetition_penalty: which texts it penalizes, how much, and that it does not penalize short right answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scoring import scored

SHORT_AND_RIGHT = [
    "",
    "72",
    "#### 72",
    r"\boxed{72}",
    "The answer is 72.",
    "<think>Half of 144 is 72.</think><answer>72</answer>",
    "Natalia sold 48 / 2 = 24 clips in May. Natalia sold 48 + 24 = 72 clips in both months.\n#### 72",
    "Step 1: 48 / 2 = 24.\nStep 2: 48 + 24 = 72.\nThe answer is 72.",
]


@pytest.mark.parametrize("text", SHORT_AND_RIGHT)
def test_a_short_right_answer_is_not_punished(text: str) -> None:
    assert scored("repetition_penalty", {}, text) == 0.0


@pytest.mark.parametrize(
    ("text", "params", "score"),
    [
        ("a b c a b c", {}, -0.25),  # abc bca cab abc: 3 of 4
        ("A b c a B c", {}, -0.25),
        ("a b c a b c", {"max_penalty": -2.0}, -0.5),
        ("a b c a b c", {"max_penalty": 0.0}, 0.0),
        ("a b c a b c", {"ngram_size": 1}, -0.5),
        ("a b c a b c", {"ngram_size": 4}, 0.0),
        ("a b c a b c", {"threshold": 0.25}, 0.0),
        ("a b c a b c", {"threshold": 0.24}, -0.25),
        ("no " * 102, {}, -0.99),
    ],
)
def test_repetition_penalty_is_the_share_of_repeated_ngrams(text: str, params: dict[str, float], score: float) -> None:
    assert scored("repetition_penalty", params, text) == pytest.approx(score)


_TEXT = st.lists(st.sampled_from("abcd"), max_size=40).map(" ".join)


@given(text=_TEXT, size=st.integers(1, 5), most=st.floats(-5, 0), threshold=st.floats(0, 1))
def test_repetition_penalty_stays_within_its_bounds(text: str, size: int, most: float, threshold: float) -> None:
    params = {"ngram_size": size, "max_penalty": most, "threshold": threshold}
    value = scored("repetition_penalty", params, text)
    assert value is not None
    assert most <= value <= 0.0


@given(text=_TEXT, times=st.integers(1, 4))
def test_repetition_penalty_never_shrinks_with_one_more_repetition(text: str, times: int) -> None:
    params = {"threshold": 0.0}
    said, again = (scored("repetition_penalty", params, " ".join([text] * count)) for count in (times, times + 1))
    assert said is not None
    assert again is not None
    assert again <= said + 1e-12
