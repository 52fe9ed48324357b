"""The formulas, against numbers computed by hand and against brute force."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_env.evaluation.estimators import Z95, majority, mean, pass_at_k, pass_ks, share, wilson


@pytest.mark.parametrize(
    ("samples", "right", "k", "value"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),  # of the 6 pairs, one has no right completion
        (10, 3, 5, 11 / 12),  # C(7,5) / C(10,5) = 21 / 252
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (4, 3, 2, 1.0),  # one wrong completion cannot fill two places
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
    ],
)
def test_pass_at_k_matches_hand_computed_values(samples: int, right: int, k: int, value: float) -> None:
    assert pass_at_k(samples, right, k) == pytest.approx(value, abs=1e-15)


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_completion(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_is_exact() -> None:
    exact = 1 - Fraction(math.comb(19_990, 5_000), math.comb(20_000, 5_000))
    assert pass_at_k(20_000, 10, 5_000) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_more_than_the_number_of_samples(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_pass_at_k_reports_the_expected_values_of_k(samples: int, ks: list[int]) -> None:
    assert pass_ks(samples) == ks


R = ("72", True)
MAJORITY = [
    ([R, R, ("7", False)], 1.0),
    ([R, ("7", False), ("7", False)], 0.0),
    ([R, ("7", False)], 0.5),
    ([R, ("7", False), ("8", False)], 1 / 3),
    ([R, R, ("7", False), ("7", False), ("8", False)], 0.5),
    ([("72", True), ("72.0", True), ("7", False)], 1.0),  # one right answer, however it is written
    ([R, (None, False), (None, False)], 1.0),  # a completion without an answer does not vote
    ([(None, False)], 0.0),
    ([("7", False), ("8", False)], 0.0),
    ([(None, True)], 1.0),
]


@pytest.mark.parametrize(("votes", "value"), MAJORITY)
def test_majority_matches_hand_computed_values(votes: list[tuple[str | None, bool]], value: float) -> None:
    assert majority(votes) == pytest.approx(value)


@pytest.mark.slow
@given(st.lists(st.sampled_from([R, ("7", False), ("8", False), (None, False)]), min_size=1, max_size=8))
def test_majority_is_the_chance_of_the_right_answer_among_the_most_frequent(
    votes: list[tuple[str | None, bool]],
) -> None:
    counts = Counter(answer for answer, _ in votes if answer is not None)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    assert majority(votes) == pytest.approx(winners.count("72") / len(winners) if winners else 0.0)
    assert majority(votes[::-1]) == majority(votes)


def test_mean_and_interval_match_hand_computed_values() -> None:
    estimate = mean([0.0, 0.5, 1.0, 1.0])
    assert estimate is not None
    # Mean 5/8; squares of the deviations 25 + 1 + 9 + 9 in 64ths, over 3, over 4.
    stderr = math.sqrt(44 / 64 / 3 / 4)
    assert (estimate.value, estimate.prompts) == (0.625, 4)
    assert estimate.stderr == pytest.approx(stderr)
    assert (estimate.low, estimate.high) == pytest.approx((0.625 - 1.959964 * stderr, 0.625 + 1.959964 * stderr))
    cut = share([0.0, 0.5, 1.0, 1.0])
    assert cut is not None
    assert cut.high == 1.0  # 1.09 uncut
    assert cut.low == pytest.approx(estimate.low)


def test_mean_of_one_prompt_has_no_error_and_mean_of_none_is_none() -> None:
    one = mean([0.5])
    assert one is not None
    assert (one.stderr, one.low, one.high) == (None, None, None)
    assert mean([]) is None
    assert share([]) is None


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(st.floats(-10, 10), min_size=n, max_size=n), min_size=2, max_size=12)
    )
)
@pytest.mark.slow
def test_standard_error_is_clustered_over_all_completions(groups: list[list[float]]) -> None:
    """Cluster-robust, from every single completion, with the usual factor m / (m − 1) for m clusters."""
    values = [value for group in groups for value in group]
    centre, m = statistics.fmean(values), len(groups)
    between = sum(sum(value - centre for value in group) ** 2 for group in groups)
    direct = math.sqrt(between * m / (m - 1)) / len(values)
    estimate = mean(statistics.fmean(group) for group in groups)
    assert estimate is not None
    assert estimate.stderr == pytest.approx(direct, abs=1e-9)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (5, 10, 0.23659, 0.76341), (1, 1, 0.20655, 1.0)],
)
def test_wilson_interval_matches_known_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_share_of_zero_or_one_has_the_wilson_interval(value: float) -> None:
    estimate = share([value] * 20)
    assert estimate is not None
    assert estimate.stderr == 0.0
    assert (estimate.low, estimate.high) == wilson(round(20 * value), 20)
    ends = Z95**2 / (20 + Z95**2)
    assert estimate.high - estimate.low == pytest.approx(ends)  # type: ignore[operator]
