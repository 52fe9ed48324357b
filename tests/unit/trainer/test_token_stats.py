"""The token statistics of a step, compared with plain arithmetic in float64."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_trainer.metrics import TokenMeasures, TokenStats, measure


def make_token_stats(count: int, seed: int = 0, *, reference: bool = True) -> TokenStats:
    rng = np.random.default_rng(seed)

    def logprobs() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return (-rng.exponential(size=count)).astype(np.float32)

    advantages = rng.choice([-1.0, 0.0, 1.0], size=count).astype(np.float32)
    entropy = rng.exponential(size=count).astype(np.float32)
    new, old, rollout = logprobs(), logprobs(), logprobs()
    ref = logprobs() if reference else np.full(count, np.nan, np.float32)
    low, high, capped = (rng.choice([0.0, 1.0], size=count).astype(np.float32) for _ in range(3))
    ratio, importance = np.exp(new - old), np.exp(old - rollout)
    return TokenStats(new, old, rollout, advantages, entropy, ref, ratio, low, high, importance, capped)


def quantile(values: list[float], share: float) -> float:
    """Interpolates linearly between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def k3(differences: list[float]) -> float:
    return fmean(math.exp(d) - 1 - d for d in differences)


@given(st.integers(1, 60), st.integers(0, 1000))
def test_token_statistics_match_plain_arithmetic(count: int, seed: int) -> None:
    token_stats = make_token_stats(count, seed)
    found = measure(token_stats)
    new, old, rollout, advantages, entropy = (
        [float(value) for value in array]
        for array in (
            token_stats.logprobs,
            token_stats.old_logprobs,
            token_stats.rollout_logprobs,
            token_stats.advantages,
            token_stats.entropy,
        )
    )
    reference = [float(value) for value in token_stats.ref_logprobs]
    gaps = [o - r for o, r in zip(old, rollout, strict=True)]
    ratios, importance = ([float(value) for value in array] for array in (token_stats.ratio, token_stats.importance))
    positive = [n for n, a in zip(new, advantages, strict=True) if a > 0]
    negative = [n for n, a in zip(new, advantages, strict=True) if a < 0]

    def near(value: float) -> object:
        return pytest.approx(value, rel=1e-9, abs=1e-9)

    assert found.rollout_logprob_diff_mean == near(fmean(map(abs, gaps)))
    assert found.rollout_logprob_diff_max == near(max(map(abs, gaps)))
    assert found.entropy_mean == near(fmean(entropy))
    assert found.logprob_mean == near(fmean(new))
    assert found.pos_logp == (near(fmean(positive)) if positive else None)
    assert found.neg_logp == (near(fmean(negative)) if negative else None)
    assert found.kl_rollout == near(k3(gaps))
    assert found.kl_ref == near(k3([r - n for r, n in zip(reference, new, strict=True)]))
    names = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}
    assert found.ratio == {name: near(quantile(ratios, share)) for name, share in names.items()}
    assert found.importance == {name: near(quantile(importance, share)) for name, share in names.items()}
    assert found.clip_low_share == near(fmean(token_stats.clipped_low.tolist()))
    assert found.clip_high_share == near(fmean(token_stats.clipped_high.tolist()))
    assert found.importance_capped_share == near(fmean(token_stats.capped.tolist()))


def test_token_statistics_count_zero_advantage_as_neither_sign() -> None:
    """By hand: 1 token of advantage 2, 2 of advantage 0, and 1 of advantage -0.5."""
    token_stats = replace(
        make_token_stats(4),
        logprobs=np.array([-1.0, -10.0, -20.0, -3.0], np.float32),
        advantages=np.array([2.0, 0.0, -0.0, -0.5], np.float32),
    )
    found = measure(token_stats)
    assert (found.pos_logp, found.neg_logp, found.logprob_mean) == (-1.0, -3.0, -8.5)
    found = measure(replace(token_stats, advantages=np.zeros(4, np.float32)))
    assert (found.pos_logp, found.neg_logp) == (None, None)


def test_token_statistics_do_not_depend_on_token_order() -> None:
    """With another number of processes, micro-batches come in another order."""
    pieces = [make_token_stats(count, seed) for seed, count in enumerate((3, 11, 1, 7))]
    wanted = measure(TokenStats.join(pieces))
    random.Random(0).shuffle(pieces)
    found = measure(TokenStats.join(pieces))
    for field in fields(TokenMeasures):
        assert getattr(found, field.name) == pytest.approx(getattr(wanted, field.name), rel=1e-12), field.name


def test_joined_token_statistics_keep_every_token() -> None:
    pieces = [make_token_stats(3, 1), make_token_stats(0, 2), make_token_stats(5, 3)]
    joined = TokenStats.join(pieces)
    assert joined.logprobs.tolist() == [*pieces[0].logprobs.tolist(), *pieces[2].logprobs.tolist()]
    assert len(joined.ref_logprobs) == len(joined.capped) == 8


def test_token_statistics_omit_a_reference_that_some_tokens_lack() -> None:
    joined = TokenStats.join([make_token_stats(3, 1), make_token_stats(2, 2, reference=False)])
    assert len(joined.logprobs) == 5
    assert measure(joined).kl_ref is None


def test_token_statistics_without_tokens_report_no_values() -> None:
    empty = TokenStats.join([])
    assert len(empty.logprobs) == len(TokenStats.of([]).capped) == 0
    assert measure(empty) == TokenMeasures()
    assert measure(make_token_stats(0)) == TokenMeasures()


def test_token_statistics_keep_the_digits_of_small_differences() -> None:
    old = np.full(4, -1.0, np.float32)
    token_stats = replace(make_token_stats(4), old_logprobs=old, rollout_logprobs=old - np.float32(1e-4))
    assert measure(token_stats).kl_rollout == pytest.approx(5e-9, rel=0.01)
