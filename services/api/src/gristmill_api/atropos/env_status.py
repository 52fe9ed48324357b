"""The answer of /status-env: an environment's share of generation, and the groups that wait in the queue."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MIN_WEIGHT: Final = 0.01
"""Smallest weight in the answer, so every environment generates something."""
NO_ROOM: Final = 1 << 31
"""Groups: more than any environment waits for."""


@dataclass(frozen=True)
class EnvFacts:
    """The settings with which an environment registered."""

    max_context_len: int
    weight: float


@dataclass(frozen=True)
class EnvView:
    """One environment among those that are connected, and the queue."""

    number: int
    step: int
    batch_size: int
    """Sequences."""
    group_size: int
    """Its own: as registered, or the largest of its groups that is ready."""
    own: EnvFacts
    connected: Sequence[EnvFacts]
    shares: Mapping[str, float]
    """min_batch_allocation of the connected environments that have one, by number."""
    ready: Sequence[tuple[str, int, int]]
    """(environment, sequences a group, how many groups) of all that is ready."""
    finished: bool = False
    """The run takes no more groups."""


def status(env: EnvView) -> dict[str, int | float]:
    """Returns the answer of /status-env, each key as Atropos computes it."""
    total = math.fsum(facts.max_context_len * max(0.0, facts.weight) for facts in env.connected)
    weight = env.own.max_context_len * env.own.weight / total if total else 0.0
    largest = max([1, *(size for _, size, _ in env.ready)])
    sequences: defaultdict[str, int] = defaultdict(int)
    for name, size, count in env.ready:
        sequences[name] += size * count
    own_sequences = sequences.pop(str(env.number), 0)
    group_size = env.group_size or 1
    # Of the others' groups counts what their shares leave; while all groups have one sequence, nothing does.
    others = 0
    if largest > 1:
        for name, waiting in sequences.items():
            share = int(env.batch_size * env.shares[name]) if name in env.shares else 0
            others += max(0, math.ceil(waiting / largest) * largest - share)
    return {
        "current_step": env.step,
        # BaseEnv has no message for the end of a run. It stops generating while more batches wait than its limit.
        "queue_size": NO_ROOM if env.finished else (own_sequences + others) // group_size,
        "unallocated_fraction": 1.0 - min(math.fsum(env.shares.values()), 1.0),
        "self_queue_size": own_sequences // group_size,
        "max_group_size": largest,
        "env_weight": max(MIN_WEIGHT, weight),
    }
