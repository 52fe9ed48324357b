"""Samples -> micro-batches: the split of a step into updates, the assignment to micro-batches and ranks, the tensors.

With a token budget, best-fit decreasing finds the number of micro-batches (at most 11/9 of the minimum, plus one). Then
each sample, longest first, goes to the micro-batch with the fewest tokens, so that micro-batches and ranks have
near-equal tokens. Without a token budget, each micro-batch has `batch_size` consecutive samples. `collate` builds the
tensors in numpy, and each tensor moves to the device once.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from gristmill_trainer.data.prefixes import Tree, join
from gristmill_trainer.data.types import F32, I32, Layout, MicroBatch, Sample, rollouts_of

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
_ToDevice = Callable[[npt.NDArray[np.generic]], torch.Tensor]
MicroPlan = tuple[int, ...]
"""Indices of samples, ascending."""


def split(group_ids: Sequence[str], parts: int, *, seed: int, step: int, epoch: int) -> list[tuple[int, ...]]:
    """Returns the rollouts of each update, as indices. `group_ids`: each rollout's group.

    A group stays whole. The order of groups is random per epoch and step, and the same after a resume. Each group goes
    to the part with the fewest rollouts, so parts differ by at most the largest group. With fewer groups than `parts`,
    there are as many parts as groups.
    """
    groups: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(index)
    ids = list(groups)
    order = np.random.default_rng([seed % (1 << 64), step, epoch]).permutation(len(ids))
    shares: list[list[int]] = [[] for _ in range(min(parts, len(ids)))]
    for place in order.tolist():
        min(shares, key=len).extend(groups[ids[place]])
    return [tuple(sorted(part)) for part in shares]


def plan(lengths: Sequence[int], *, budget: int | None, batch_size: int, ranks: int) -> list[list[MicroPlan | None]]:
    """Returns the micro-batches of each rank in order, equally many per rank.

    `lengths`: tokens per sample. None represents a micro-batch without samples: the rank runs a dummy micro-batch of
    weight 0 to take part in the collectives. Each sample is in one micro-batch. The plan depends only on the arguments.
    No sample is longer than the budget.
    """
    if budget is None:
        indices = range(len(lengths))
        micros = [tuple(indices[start : start + batch_size]) for start in range(0, len(lengths), batch_size)]
        return _dealt(micros, lengths, ranks)
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    tight = _best_fit(longest_first, lengths, budget)
    rounds = -(-len(tight) // ranks)
    even = _spread(longest_first, lengths, budget, rounds * ranks)
    micros = [tuple(sorted(micro)) for micro in even or tight if micro]
    # The fullest first, so that a lack of memory fails at the beginning.
    micros.sort(key=lambda micro: (-_tokens(micro, lengths), micro))
    return _dealt(micros, lengths, ranks)


def divide(
    samples: Sequence[Sample],
    units: Sequence[MicroPlan],
    tokens_of: Callable[[MicroPlan], int],
    *,
    budget: int | None,
    batch_size: int,
    ranks: int,
    sharing: bool,
) -> list[list[MicroPlan | None]]:
    """Returns the plan of micro-batches (`plan`) for samples in units, each of which stays in one micro-batch.

    `tokens_of`: the tokens that a unit computes. With `sharing` and a budget, units of a group that fit the budget stay
    together, because they compute a shared prefix once. Several ranks may need smaller parts to have equal tokens. Of a
    few sizes of the parts, the plan has the one whose rounds of micro-batches compute the fewest tokens, one by one.
    """
    divisions = [list(units)]
    if sharing and budget is not None:
        each = sum(map(tokens_of, units)) / ranks
        limits = [budget] if ranks == 1 else [budget, *(min(budget, each / parts) for parts in (2, 4, 8)), 0]
        divisions = [join(samples, units, tokens_of, most) for most in limits]
    plans = []
    for division in divisions:
        lengths = [tokens_of(unit) for unit in division]
        found = plan(lengths, budget=budget, batch_size=batch_size, ranks=ranks)
        rounds = zip(*found, strict=True)
        slowest = sum(max(_tokens(micro or (), lengths) for micro in together) for together in rounds)
        plans.append((slowest, division, found))
    _, division, found = min(plans, key=itemgetter(0))
    return [
        [micro and tuple(number for unit in micro for number in division[unit]) for micro in of_rank]
        for of_rank in found
    ]


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    micros: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(tokens left, micro-batch), ascending."""
    for index in order:
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place == len(room):
            micros.append([])
            space, micro = budget, len(micros) - 1
        else:
            space, micro = room.pop(place)
        micros[micro].append(index)
        bisect.insort(room, (space - lengths[index], micro))
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


def collate(
    samples: Sequence[Sample],
    index: Sequence[int],
    weights: F32 | F64,
    *,
    packing: bool,
    sharing: bool = False,
    device: torch.device,
) -> MicroBatch:
    """Returns the micro-batch of the samples at `index`, in that order; at least one.

    `weights`: [len(samples)], the weight of each trained token of a sample in the update's loss. `packing`: all
    sequences share one row; else one row per sequence. `sharing`: a packed row has a prefix that samples of a group
    share only once. `old_logprobs` and `ref_logprobs` are None unless every sequence has them. If only some sequences
    have a teacher, the others get ids of -1.
    """
    chosen = [samples[place] for place in index]
    lengths = np.array([len(sample) for sample in chosen], np.int64)
    trained = np.concatenate([sample.trained for sample in chosen])
    counts = np.array([sample.trained_tokens for sample in chosen], np.int64)
    places = np.flatnonzero(trained)
    tokens = np.concatenate([sample.tokens for sample in chosen]).astype(np.int64)

    def to_device(array: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        # A copy from pinned memory does not wait for the kernels of the previous micro-batch.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    def per_token(values: npt.ArrayLike) -> torch.Tensor:
        return to_device(np.repeat(np.asarray(values, np.float32), counts))

    def floats(arrays: Sequence[F32 | None]) -> torch.Tensor | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        return to_device(np.concatenate(present)[places].astype(np.float32, copy=False))

    if packing:
        tree = Tree.of(chosen) if sharing else Tree.whole(lengths.tolist())
        layout = _packed(chosen, tree, to_device)
        slots = np.concatenate(tree.places())
    else:
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = np.repeat(np.arange(len(chosen)) * lengths.max(), lengths) + positions
        layout = _padded(tokens, lengths, slots, to_device)
    rollout = floats([sample.rollout_logprobs for sample in chosen])
    advantages = floats([sample.advantages for sample in chosen])
    assert rollout is not None
    assert advantages is not None
    teacher_ids, teacher_logprobs = _teacher(chosen, places)
    rollouts = rollouts_of(chosen)
    return MicroBatch(
        layout=layout,
        sources=to_device(slots[places - 1]),
        targets=to_device(tokens[places]),
        sequence=to_device(np.repeat(rollouts, counts)),
        sequences=int(rollouts.max()) + 1,
        rollout_logprobs=rollout,
        advantages=advantages,
        temperatures=per_token([sample.temperature for sample in chosen]),
        weights=per_token(np.asarray(weights)[list(index)]),
        old_logprobs=floats([sample.old_logprobs for sample in chosen]),
        ref_logprobs=floats([sample.ref_logprobs for sample in chosen]),
        teacher_ids=None if teacher_ids is None else to_device(teacher_ids),
        teacher_logprobs=None if teacher_logprobs is None else to_device(teacher_logprobs),
        index=tuple(index),
    )


def dummy(device: torch.device, *, packing: bool = True) -> MicroBatch:
    """Returns a micro-batch of two tokens and weight 0, for a rank without samples. Its `index` is empty."""
    sample = Sample.scored(np.zeros(2, np.int32), np.array([False, True]))
    return replace(collate([sample], (0,), np.zeros(1), packing=packing, device=device), index=())


def _packed(chosen: Sequence[Sample], tree: Tree, to_device: _ToDevice) -> Layout:
    segments = tree.segments
    tokens = np.concatenate([chosen[one.sequence].tokens[one.start : one.end] for one in segments]).astype(np.int64)
    shared = any(one.parent >= 0 for one in segments)
    return Layout(
        tokens=to_device(tokens[None]),
        positions=to_device(np.concatenate([np.arange(one.start, one.end) for one in segments])[None]),
        starts=to_device(np.cumsum([0, *(one.end - one.start for one in segments)], dtype=np.int32)),
        parents=to_device(np.array([one.parent for one in segments], np.int32)) if shared else None,
        attention=None,
        longest=max(map(len, chosen)),
        squares=tree.squares,
    )


def _padded(tokens: I64, lengths: I64, slots: I64, to_device: _ToDevice) -> Layout:
    """Builds padded rows. `slots`: i64[N], place of each token in the flattened rows. Padding is token 0.

    Positions count from 0 to the end of each row, padding included.
    """

    shape = len(lengths), int(lengths.max())

    def rows(values: I64) -> torch.Tensor:
        flat = np.zeros(shape[0] * shape[1], np.int64)
        flat[slots] = values
        return to_device(flat.reshape(shape))

    return Layout(
        tokens=rows(tokens),
        positions=to_device(np.tile(np.arange(shape[1]), (shape[0], 1))),
        starts=None,
        parents=None,
        attention=rows(np.ones_like(tokens)),
        longest=shape[1],
        squares=int((lengths**2).sum()),
    )


def _teacher(chosen: Sequence[Sample], places: I64) -> tuple[I64 | None, F32 | None]:
    """Returns i64[M, K] and f32[M, K] with the largest K; None without a teacher. Absent entries are -1 and -inf."""
    width = max((sample.teacher.ids.shape[1] for sample in chosen if sample.teacher is not None), default=0)
    if not width:
        return None, None
    ids = [np.full((len(sample), width), -1, np.int32) for sample in chosen]
    logprobs = [np.full((len(sample), width), -np.inf, np.float32) for sample in chosen]
    for sample, own_ids, own_logprobs in zip(chosen, ids, logprobs, strict=True):
        if sample.teacher is not None:
            own_ids[:, : sample.teacher.ids.shape[1]] = sample.teacher.ids
            own_logprobs[:, : sample.teacher.ids.shape[1]] = sample.teacher.logprobs
    flat: I32 = np.concatenate(ids)[places]
    # The log-probability of an id of -1 has no meaning.
    return flat.astype(np.int64), np.where(flat < 0, np.float32(-np.inf), np.concatenate(logprobs)[places])
