"""Assignment of samples to micro-batches and ranks.

With a token budget, best-fit decreasing finds the number of micro-batches (at most 11/9 of the minimum, plus one). Then
each sample, longest first, goes to the micro-batch with the fewest tokens, so that micro-batches and ranks have
near-equal tokens. Without a token budget, each micro-batch has `batch_size` consecutive samples.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from gristmill_trainer.errors import TrainerError

MicroPlan = tuple[int, ...]
"""Indices of samples, ascending."""


def plan(lengths: Sequence[int], *, budget: int | None, batch_size: int, ranks: int) -> list[list[MicroPlan | None]]:
    """Returns the micro-batches of each rank in order, equally many per rank.

    `lengths`: tokens per sample. None represents a micro-batch without samples: the rank runs a dummy micro-batch of
    weight 0 to take part in the collectives. Each sample is in one micro-batch. The plan depends only on the arguments.
    Raises TrainerError for a sample that is longer than the budget.
    """
    if budget is None:
        indices = range(len(lengths))
        micros = [tuple(indices[start : start + batch_size]) for start in range(0, len(lengths), batch_size)]
        return _dealt(micros, lengths, ranks)
    if lengths and max(lengths) > budget:
        raise TrainerError(
            "over_token_budget",
            f"a sample of {max(lengths)} tokens fits no micro-batch of token_budget={budget}",
            tokens=max(lengths),
            token_budget=budget,
        )
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    tight = _best_fit(longest_first, lengths, budget)
    rounds = -(-len(tight) // ranks)
    even = _spread(longest_first, lengths, budget, rounds * ranks)
    micros = [tuple(sorted(micro)) for micro in even or tight if micro]
    # The fullest first, so that a lack of memory fails at the beginning.
    micros.sort(key=lambda micro: (-_tokens(micro, lengths), micro))
    return _dealt(micros, lengths, ranks)


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    micros: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(tokens left, micro-batch), ascending."""
    for index in order:
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place == len(room):
            micros.append([])
            left, micro = budget, len(micros) - 1
        else:
            left, micro = room.pop(place)
        micros[micro].append(index)
        bisect.insort(room, (left - lengths[index], micro))
    return micros


def _spread(order: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Returns `count` micro-batches of near-equal tokens; None if one would exceed the budget."""
    micros: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, micro) for micro in range(count)]
    for index in order:
        tokens, micro = heap[0]
        if tokens + lengths[index] > budget:
            return None
        micros[micro].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], micro))
    return micros


def _dealt(micros: Sequence[MicroPlan], lengths: Sequence[int], ranks: int) -> list[list[MicroPlan | None]]:
    """Assigns micro-batches round by round: the largest of each round goes to the rank with the fewest tokens."""
    plans: list[list[MicroPlan | None]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(micros), ranks):
        largest_first = sorted(micros[start : start + ranks], key=lambda micro: -_tokens(micro, lengths))
        emptiest_first = sorted(range(ranks), key=lambda rank: totals[rank])
        for place, rank in enumerate(emptiest_first):
            micro = largest_first[place] if place < len(largest_first) else None
            plans[rank].append(micro)
            totals[rank] += _tokens(micro or (), lengths)
    return plans


def _tokens(micro: MicroPlan, lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in micro)
