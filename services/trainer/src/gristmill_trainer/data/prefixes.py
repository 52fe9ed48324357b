"""Prefixes that sequences of a group share: a prompt, or the earlier turns of an agent's branches.

The sequences form a tree of segments. A forward pass computes each segment once: its queries attend to the keys of the
segments before it and, causally, to its own keys. The scores and gradients equal the results for whole sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gristmill_trainer.data.types import Sample

_LEAST_SAVED = 8
"""A prefix is shared if this saves an eighth of the tokens of its sequences. With less, the copies of the keys may take
the memory that the tokens leave."""


@dataclass(frozen=True)
class Segment:
    """Tokens of one sequence, or of several sequences that share them."""

    parent: int
    """The segment before this one, which has a lower index; -1 at the beginning of a sequence."""
    sequence: int
    """A sequence that contains the segment."""
    start: int
    end: int
    """Tokens `start` to `end` of the sequence."""


@dataclass(frozen=True)
class Tree:
    """The segments of sequences, each after its parent."""

    segments: tuple[Segment, ...]
    last: tuple[int, ...]
    """The last segment of each sequence."""

    @classmethod
    def whole(cls, lengths: Sequence[int]) -> Tree:
        """Returns a tree in which each sequence is a segment, and nothing is shared."""
        return cls(tuple(Segment(-1, place, 0, end) for place, end in enumerate(lengths)), tuple(range(len(lengths))))

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Tree:
        """Returns the tree of the prefixes that samples of the same group share, if sharing saves enough."""
        order = sorted(range(len(samples)), key=lambda place: _key(samples[place]))
        lengths = np.array([len(samples[place]) for place in order], np.int64)
        common = np.array([0, *(_common(samples[a], samples[b]) for a, b in itertools.pairwise(order))], np.int64)
        """Tokens that a sequence shares with the sequence before it in `order`."""
        segments: list[Segment] = []
        last = [-1] * len(samples)
        parts = [(0, len(order), 0, -1)]
        while parts:
            low, high, start, parent = parts.pop()
            end = int(common[low + 1 : high].min(initial=lengths[low]))
            saved, tokens = (high - low - 1) * (end - start), int((lengths[low:high] - start).sum())
            if end > start and (high == low + 1 or saved * _LEAST_SAVED >= tokens):
                segments.append(Segment(parent, order[low], start, end))
                start, parent = end, len(segments) - 1
            if high == low + 1:
                last[order[low]] = parent
                continue
            cuts = [low, *(low + 1 + np.flatnonzero(common[low + 1 : high] == end)).tolist(), high]
            parts += [(a, b, start, parent) for a, b in reversed(list(itertools.pairwise(cuts)))]
        if sum(one.end - one.start for one in segments) == lengths.sum():
            return cls.whole([len(sample) for sample in samples])
        return cls(tuple(segments), tuple(last))

    @property
    def tokens(self) -> int:
        """Tokens that a forward pass computes."""
        return sum(one.end - one.start for one in self.segments)

    @property
    def copied(self) -> int:
        """Keys that attention copies: a segment with a parent needs its keys after the earlier segments' keys."""
        return sum(one.end for one in self.segments if one.parent >= 0)

    @property
    def squares(self) -> int:
        """Twice the pairs of a query and a key that attention computes; for whole sequences, their squared lengths."""
        return sum(one.end**2 - one.start**2 for one in self.segments)

    def places(self) -> list[npt.NDArray[np.int64]]:
        """Returns i64[L] per sequence: the place of each of its tokens in the row of all segments."""
        before = np.cumsum([0, *(one.end - one.start for one in self.segments)])
        of_segments: list[npt.NDArray[np.int64]] = []
        for one, first in zip(self.segments, before.tolist(), strict=False):
            own = np.arange(first, first + one.end - one.start)
            of_segments.append(own if one.parent < 0 else np.concatenate([of_segments[one.parent], own]))
        return [of_segments[place] for place in self.last]


def join(
    samples: Sequence[Sample],
    units: Sequence[Sequence[int]],
    tokens_of: Callable[[tuple[int, ...]], int],
    most: float,
) -> list[tuple[int, ...]]:
    """Returns larger units, which share prefixes: the units of each group together, as indices of samples.

    A group with `tokens_of` more than `most` is halved until its parts have at most as many, or are single units.
    """
    groups: dict[str, list[Sequence[int]]] = {}
    for unit in units:
        groups.setdefault(samples[unit[0]].group_id, []).append(unit)
    joined = []
    parts = list(reversed(groups.values()))
    while parts:
        part = parts.pop()
        numbers = tuple(number for unit in part for number in unit)
        if len(part) == 1 or tokens_of(numbers) <= most:
            joined.append(numbers)
        else:
            half = len(part) // 2
            parts += [part[half:], part[:half]]
    return joined


def _key(sample: Sample) -> tuple[str, bytes]:
    """Sorts sequences of a group by their tokens, and a prefix before a longer sequence."""
    return sample.group_id, sample.tokens.astype(">i4").tobytes()


def _common(one: Sample, other: Sample) -> int:
    """Returns how many tokens two samples of one group share from their beginning."""
    if one.group_id != other.group_id:
        return 0
    shortest = min(len(one), len(other))
    differ = np.flatnonzero(one.tokens[:shortest] != other.tokens[:shortest])
    return int(differ[0]) if len(differ) else shortest
