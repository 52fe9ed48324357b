"""Plans of micro-batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill_trainer.data.micro_batches import plan, split

LENGTHS = st.lists(st.integers(1, 50), max_size=60)
RANKS = st.integers(1, 5)


@given(lengths=LENGTHS, spare=st.integers(0, 100), batch_size=st.integers(1, 9), ranks=RANKS, bounded=st.booleans())
def test_packing_puts_each_sample_in_one_micro_batch_with_equal_counts_per_rank(
    lengths: list[int], spare: int, batch_size: int, ranks: int, bounded: bool
) -> None:
    budget = max(lengths, default=1) + spare if bounded else None
    found = plan(lengths, budget=budget, batch_size=batch_size, ranks=ranks)
    assert len(found) == ranks
    assert len({len(of_rank) for of_rank in found}) == 1
    micros = [micro for of_rank in found for micro in of_rank if micro is not None]
    assert sorted(index for micro in micros for index in micro) == list(range(len(lengths)))
    assert all(micros)
    if budget is not None:
        assert all(sum(lengths[index] for index in micro) <= budget for micro in micros)
    else:
        assert all(len(micro) <= batch_size for micro in micros)
    assert found == plan(lengths, budget=budget, batch_size=batch_size, ranks=ranks)


@given(lengths=LENGTHS.filter(bool), spare=st.integers(0, 200), ranks=RANKS)
def test_packing_needs_few_micro_batches(lengths: list[int], spare: int, ranks: int) -> None:
    """Best-fit decreasing needs at most 11/9 of the fewest micro-batches plus one. The rest makes the number equal on
    all ranks."""
    budget = max(lengths) + spare
    rounds = len(plan(lengths, budget=budget, batch_size=1, ranks=ranks)[0])
    # If two micro-batches fit the budget together, they would have been one.
    assert rounds <= -(-(2 * sum(lengths) // budget + 1) // ranks)


def test_packing_of_a_ragged_batch_is_tight_and_even() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 512).astype(int).clip(1, 2048).tolist()
    found = plan(lengths, budget=4096, batch_size=1, ranks=4)
    loads = [[sum(lengths[index] for index in micro or ()) for micro in of_rank] for of_rank in found]
    rounds = len(loads[0])
    assert rounds == -(-sum(lengths) // (4096 * 4))
    totals = [sum(of_rank) for of_rank in loads]
    assert max(totals) - min(totals) <= max(lengths) / 10
    for together in zip(*loads, strict=True):
        assert max(together) - min(together) <= max(lengths) / 10


def test_without_a_budget_micro_batches_are_consecutive() -> None:
    assert plan([5] * 7, budget=None, batch_size=3, ranks=1) == [[(0, 1, 2), (3, 4, 5), (6,)]]
    assert plan([5] * 7, budget=None, batch_size=3, ranks=2) == [[(0, 1, 2), (6,)], [(3, 4, 5), None]]


def test_packing_keeps_the_tight_plan_if_balancing_would_exceed_the_budget() -> None:
    assert plan([3, 3, 2, 2, 2], budget=6, batch_size=1, ranks=1) == [[(0, 1), (2, 3, 4)]]


def test_packing_gives_the_largest_sample_of_a_round_to_the_least_loaded_rank() -> None:
    assert plan([9, 1, 9, 1], budget=None, batch_size=1, ranks=2) == [[(0,), (3,)], [(1,), (2,)]]


def test_packing_gives_a_rank_without_samples_an_empty_entry() -> None:
    assert plan([7], budget=10, batch_size=1, ranks=3) == [[(0,)], [None], [None]]
    assert plan([], budget=10, batch_size=1, ranks=2) == [[], []]


@given(
    sizes=st.lists(st.integers(1, 6), max_size=20),
    parts=st.integers(1, 6),
    seed=st.integers(-5, 1 << 65),
    step=st.integers(0, 1000),
    epoch=st.integers(0, 3),
)
def test_updates_split_the_samples_by_whole_groups(
    sizes: list[int], parts: int, seed: int, step: int, epoch: int
) -> None:
    group_ids = [f"g{group}" for group, size in enumerate(sizes) for _ in range(size)]
    found = split(group_ids, parts, seed=seed, step=step, epoch=epoch)
    assert sorted(index for part in found for index in part) == list(range(len(group_ids)))
    assert len(found) == min(parts, len(sizes))
    assert all(found)
    owners = [{group_ids[index] for index in part} for part in found]
    assert sum(map(len, owners)) == len(sizes)
    if sizes:
        assert max(map(len, found)) - min(map(len, found)) <= max(sizes)
    assert found == split(group_ids, parts, seed=seed, step=step, epoch=epoch)


def test_updates_are_reshuffled_each_step_and_epoch() -> None:
    group_ids = [f"g{index // 4}" for index in range(64)]
    places = [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0)]
    found = {str(split(group_ids, 4, seed=seed, step=step, epoch=epoch)) for seed, step, epoch in places}
    assert len(found) == 4
    assert split(group_ids, 1, seed=0, step=1, epoch=1) == [tuple(range(64))]
