"""The measures of a step's tokens, against plain arithmetic in float64."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_trainer.observed import Bounds, Observed, TokenMeasures, measure

BOUNDS = Bounds(low=0.2, high=0.3, importance_cap=1.5)


def observed(count: int, seed: int = 0, *, reference: bool = True) -> Observed:
    rng = np.random.default_rng(seed)

    def logprobs() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return (-rng.exponential(size=count)).astype(np.float32)

    advantages = rng.choice([-1.0, 0.0, 1.0], size=count).astype(np.float32)
    entropy = rng.exponential(size=count).astype(np.float32)
    return Observed(logprobs(), logprobs(), logprobs(), advantages, entropy, logprobs() if reference else None)


def quantile(values: list[float], share: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def k3(differences: list[float]) -> float:
    return fmean(math.exp(d) - 1 - d for d in differences)


@given(st.integers(1, 60), st.integers(0, 1000))
def test_each_measure_is_what_its_name_says(count: int, seed: int) -> None:
    seen = observed(count, seed)
    found = measure(seen, BOUNDS)
    new, old, rollout, advantages, entropy = (
        [float(value) for value in array]
        for array in (seen.logprobs, seen.old_logprobs, seen.rollout_logprobs, seen.advantages, seen.entropy)
    )
    assert seen.ref_logprobs is not None
    reference = [float(value) for value in seen.ref_logprobs]
    gaps = [o - r for o, r in zip(old, rollout, strict=True)]
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    importance = [math.exp(gap) for gap in gaps]
    positive = [n for n, a in zip(new, advantages, strict=True) if a > 0]
    others = [n for n, a in zip(new, advantages, strict=True) if a <= 0]

    def near(value: float) -> object:
        return pytest.approx(value, rel=1e-9, abs=1e-9)

    assert found.rollout_logprob_diff_mean == near(fmean(map(abs, gaps)))
    assert found.rollout_logprob_diff_max == near(max(map(abs, gaps)))
    assert found.entropy_mean == near(fmean(entropy))
    assert found.logprob_mean == near(fmean(new))
    assert found.pos_logp == (near(fmean(positive)) if positive else None)
    assert found.neg_logp == (near(fmean(others)) if others else None)
    assert found.kl_rollout == near(k3(gaps))
    assert found.kl_ref == near(k3([r - n for r, n in zip(reference, new, strict=True)]))
    names = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}
    assert found.ratio == {name: near(quantile(ratios, share)) for name, share in names.items()}
    assert found.importance == {name: near(quantile(importance, share)) for name, share in names.items()}
    low = [ratio < 0.8 and a < 0 for ratio, a in zip(ratios, advantages, strict=True)]
    high = [ratio > 1.3 and a > 0 for ratio, a in zip(ratios, advantages, strict=True)]
    assert found.clip_low_share == near(fmean(low))
    assert found.clip_high_share == near(fmean(high))
    assert found.importance_capped_share == near(fmean(weight > 1.5 for weight in importance))


def test_the_order_of_tokens_is_no_matter() -> None:
    """Micro-batches come in another order with another number of processes."""
    pieces = [observed(count, seed) for seed, count in enumerate((3, 11, 1, 7))]
    wanted = measure(Observed.join(pieces), BOUNDS)
    random.Random(0).shuffle(pieces)
    found = measure(Observed.join(pieces), BOUNDS)
    for field in fields(TokenMeasures):
        assert getattr(found, field.name) == pytest.approx(getattr(wanted, field.name), rel=1e-12), field.name


def test_joining_keeps_every_token() -> None:
    pieces = [observed(3, 1), observed(0, 2), observed(5, 3)]
    joined = Observed.join(pieces)
    assert joined.logprobs.tolist() == [*pieces[0].logprobs.tolist(), *pieces[2].logprobs.tolist()]
    assert joined.ref_logprobs is not None
    assert len(joined.ref_logprobs) == 8


def test_a_reference_that_some_tokens_lack_is_none() -> None:
    joined = Observed.join([observed(3, 1), observed(2, 2, reference=False)])
    assert len(joined.logprobs) == 5
    assert joined.ref_logprobs is None
    assert measure(joined, BOUNDS).kl_ref is None


def test_without_tokens_there_is_nothing_to_tell() -> None:
    empty = Observed.join([])
    assert (len(empty.logprobs), empty.ref_logprobs) == (0, None)
    assert measure(empty, BOUNDS) == TokenMeasures()
    assert measure(observed(0), BOUNDS) == TokenMeasures()


def test_small_differences_keep_their_digits() -> None:
    old = np.full(4, -1.0, np.float32)
    seen = Observed(old, old, old - np.float32(1e-4), old, old)
    assert measure(seen, BOUNDS).kl_rollout == pytest.approx(5e-9, rel=0.01)
