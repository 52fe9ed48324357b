"""The tree of shared prefixes contains each sequence, and micro-batches keep groups together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_trainer.data.micro_batches import divide
from gristmill_trainer.data.prefixes import Tree
from gristmill_trainer.data.types import Sample


def sample(tokens: Sequence[int], group_id: str = "g") -> Sample:
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(group_id, np.array(tokens, np.int32), np.arange(len(tokens)) > 0, nothing, nothing, 1.0)


def group(prompt: int, answers: Sequence[int], group_id: str = "g") -> list[Sample]:
    """Prompt and answers are of these lengths; no answers begin with the same token."""
    return [sample([*range(prompt), *[1000 + number] * length], group_id) for number, length in enumerate(answers)]


# Few tokens, so that many sequences share a beginning, and some are equal.
GROUPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), min_size=1, max_size=9)), min_size=1, max_size=8
)


@settings(max_examples=50, deadline=None)
@given(GROUPS)
def test_tree_contains_each_sequence_and_shares_only_within_groups(sequences: list[tuple[str, list[int]]]) -> None:
    samples = [sample(tokens, group_id) for group_id, tokens in sequences]
    tree = Tree.of(samples)
    pieces = [(samples[one.sequence], one) for one in tree.segments]
    row = np.concatenate([owner.tokens[one.start : one.end] for owner, one in pieces])
    positions = np.concatenate([np.arange(one.start, one.end) for _, one in pieces])
    owners = np.concatenate([np.full(one.end - one.start, ord(owner.group_id)) for owner, one in pieces])
    assert tree.tokens == len(row) <= sum(map(len, samples))
    assert all(one.parent < number for number, one in enumerate(tree.segments))
    assert all(one.start < one.end for one in tree.segments)
    for own, places in zip(samples, tree.places(), strict=True):
        np.testing.assert_array_equal(row[places], own.tokens)
        np.testing.assert_array_equal(positions[places], np.arange(len(own)))
        assert set(owners[places].tolist()) == {ord(own.group_id)}
    if tree.tokens == sum(map(len, samples)):
        assert tree == Tree.whole([len(one) for one in samples])


def test_prompt_of_a_group_is_computed_once() -> None:
    tree = Tree.of([*group(100, [5, 8], "a"), *group(40, [9], "b"), *group(50, [7, 7, 7], "c")])
    assert tree.tokens == 100 + 5 + 8 + 40 + 9 + 50 + 3 * 7
    assert tree.copied == 105 + 108 + 3 * 57
    assert tree.squares == 105**2 + 108**2 - 100**2 + 49**2 + 3 * 57**2 - 2 * 50**2


def test_branch_continues_a_part_of_another_sequence() -> None:
    first, second = list(range(30)), list(range(30, 50))
    tree = Tree.of([sample([*first, *second, 1]), sample(first), sample([*first, 2, 2]), sample([*first, *second, 3])])
    assert tree.tokens == 30 + 20 + 1 + 2 + 1


@pytest.mark.parametrize(("prompt", "shared"), [(15, False), (16, True)])
def test_short_beginning_of_long_sequences_is_not_shared(prompt: int, shared: bool) -> None:
    samples = group(prompt, [48, 48])
    assert (Tree.of(samples) != Tree.whole([len(one) for one in samples])) is shared


def divided(
    samples: Sequence[Sample], *, budget: int | None, ranks: int = 1, batch_size: int = 4, **changes: Any
) -> Any:
    units = changes.get("units", [(number,) for number in range(len(samples))])
    return divide(
        samples, units, lambda unit: Tree.of([samples[number] for number in unit]).tokens,
        budget=budget, batch_size=batch_size, ranks=ranks, sharing=changes.get("sharing", True),
    )  # fmt: skip


def test_micro_batch_takes_groups_whose_prompts_count_once() -> None:
    # In an order in which no two samples of a group are neighbours.
    samples = list(itertools.chain(*zip(*(group(100, [10] * 4, name) for name in "abc"), strict=True)))
    plans = divided(samples, budget=280)[0]
    assert sorted(map(len, plans)) == [4, 8]
    for micro in plans:
        names = [samples[number].group_id for number in micro]
        assert all(names.count(name) == 4 for name in names)
    assert len(divided(samples, budget=280, sharing=False)[0]) == 6


def test_group_over_the_budget_is_divided() -> None:
    samples = group(100, [10] * 8)
    assert [len(micro) for micro in divided(samples, budget=140)[0]] == [4, 4]
    assert [len(micro) for micro in divided(samples, budget=110)[0]] == [1] * 8


def test_rollouts_of_a_group_over_the_budget_stay_whole() -> None:
    samples = group(100, [10] * 8)
    units = [(0, 1, 2), (3,), (4, 5, 6, 7)]
    micros = divided(samples, budget=140, units=units)[0]
    assert sorted(number for micro in micros for number in micro) == list(range(8))
    assert all(any(set(unit) <= set(micro) for micro in micros) for unit in units)


def test_group_is_divided_among_ranks_only_if_that_is_faster() -> None:
    two = [*group(1000, [10] * 8, "a"), *group(1000, [10] * 8, "b")]
    assert [len(micro) for of_rank in divided(two, budget=5000, ranks=2) for micro in of_rank] == [8, 8]
    one = group(10, [1000] * 8)
    assert [len(micro) for of_rank in divided(one, budget=9000, ranks=4) for micro in of_rank] == [2] * 4


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    answers=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    spare=st.integers(0, 100), ranks=st.integers(1, 4), bounded=st.booleans(),
)  # fmt: skip
def test_each_sample_is_in_one_micro_batch_within_the_budget(
    prompts: list[int], answers: list[int], spare: int, ranks: int, bounded: bool
) -> None:
    samples = [one for number, prompt in enumerate(prompts) for one in group(prompt, answers, str(number))]
    budget = max(map(len, samples)) + spare if bounded else None
    plans = divided(samples, budget=budget, ranks=ranks)
    assert len({len(of_rank) for of_rank in plans}) == 1
    micros = [micro for of_rank in plans for micro in of_rank if micro is not None]
    assert sorted(number for micro in micros for number in micro) == list(range(len(samples)))
    for micro in micros:
        if budget is None:
            assert len(micro) <= 4
        else:
            assert Tree.of([samples[number] for number in micro]).tokens <= budget
    assert plans == divided(samples, budget=budget, ranks=ranks)
