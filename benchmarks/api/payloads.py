"""The same group in the format of each interface: binary for /v1, JSON (plain or gzipped) for Atropos' protocol.

All payloads are made before any clock runs. A binary group carries its id, so each group gets a separate head. Groups
with the same content share the arrays after the head.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass

import msgspec
import numpy as np

from gristmill import SamplingParams, TrajectoryGroup, VersionSpan

VOCABULARY = 151_936
UNTRAINED = -100
"""Atropos' mask for untrained tokens. For trained tokens the mask is the token id."""
SENTINEL = 1.0
"""Atropos' log-probability for untrained tokens."""


@dataclass(frozen=True)
class Shape:
    sequences: int
    tokens: int
    """Tokens per sequence, prompt included. A quarter of the tokens are the prompt."""

    @property
    def name(self) -> str:
        return f"{self.sequences} x {self.tokens}"


@dataclass(frozen=True)
class Payload:
    """A group's content, ready to send."""

    shape: Shape
    plain: bytes
    """Atropos' JSON, as Atropos' client writes it."""
    gzipped: bytes
    """The same JSON at gzip's level 9, which Atropos' client uses."""
    _group: TrajectoryGroup
    _header: bytes
    _tail: bytes

    def native(self, run_id: str, row: int, holder: str) -> tuple[bytes]:
        """Returns the binary group of permit `row` in one piece, like clients of the other interfaces."""
        return (self._header + _head(run_id, row, holder) + self._tail,)

    @property
    def native_size(self) -> int:
        return sum(map(len, self.native("bench", 0, "bench")))

    def holds(self, group: TrajectoryGroup) -> bool:
        """Returns whether `group` has this content."""
        return bool(
            np.array_equal(group.tokens, self._group.tokens)
            and np.array_equal(group.logprobs, self._group.logprobs)
            and np.array_equal(group.mask, self._group.mask)
        )


def group_id(row: int) -> str:
    """Returns the id of a permit's group."""
    return f"g{row:08d}"


def make(shape: Shape, seed: int) -> Payload:
    """Returns a group of random tokens and log-probabilities."""
    rng = np.random.default_rng(seed)
    rows, columns = shape.sequences, shape.tokens
    tokens = rng.integers(0, VOCABULARY, (rows, columns), dtype=np.int32)
    trained = np.broadcast_to(np.arange(columns) >= columns // 4, (rows, columns))
    logprobs = -rng.exponential(size=(rows, columns)).astype(np.float32)
    rewards = rng.normal(size=rows).astype(np.float32)
    group = TrajectoryGroup(
        group_id=group_id(0),
        run_id="bench",
        env_id="bench",
        row=0,
        lengths=np.full(rows, columns, np.int32),
        tokens=tokens.ravel(),
        logprobs=np.where(trained, logprobs, 0).astype(np.float32).ravel(),
        mask=trained.ravel(),
        rewards=rewards,
        reward_parts={"accuracy": [float(reward) for reward in rewards]},
        finish_reasons=["stop"] * rows,
        sampling=SamplingParams(temperature=1.0, max_tokens=columns),
        versions=[[VersionSpan("1.0", 0, columns - columns // 4)] for _ in range(rows)],
    )
    plain = json.dumps(
        {
            "tokens": tokens.tolist(),
            "masks": np.where(trained, tokens, UNTRAINED).tolist(),
            "scores": rewards.tolist(),
            "inference_logprobs": np.where(trained, logprobs, SENTINEL).tolist(),
            "env_id": 0,
        }
    ).encode()
    whole = group.encode()
    start = whole.index(b"\xa6format")  # where the map's header ends
    head = _head("bench", 0, "bench")
    assert whole[start:].startswith(head), "a binary group does not begin as _head says"
    return Payload(shape, plain, gzip.compress(plain), group, whole[:start], whole[start + len(head) :])


def _head(run_id: str, row: int, holder: str) -> bytes:
    """Returns the keys before `lengths`, as `TrajectoryGroup.encode` writes them."""
    fields = {"format": 1, "group_id": group_id(row), "run_id": run_id, "env_id": holder, "row": row}
    return msgspec.msgpack.encode(fields)[1:]  # without the header of a map of only these keys
