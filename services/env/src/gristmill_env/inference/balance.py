"""Which of several servers gets the next request: the one with the fewest tokens still to give."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from gristmill_env.inference.server import ModelServer


class LaneState(StrEnum):
    """Whether a server may be given work."""

    UP = "up"
    AWAY = "away"
    """On the bench: it failed, and is asked from time to time whether it is back."""
    UNPUBLISHED = "unpublished"
    """It answers, but by weights that no trainer published to it."""


@dataclass
class Pauses:
    """Growing pauses with jitter, in seconds: half to one and a half of `first`, twice that, and so on to `longest`."""

    first: float
    longest: float
    made: int = 0

    def next(self) -> float:
        """The next pause."""
        pause: float = min(self.first * 2**self.made, self.longest)
        self.made = min(self.made + 1, 32)
        return pause * random.uniform(0.5, 1.5)

    def start_again(self) -> None:
        """From the shortest."""
        self.made = 0


@dataclass(eq=False)
class Lane:
    """One server and the work that it has."""

    server: ModelServer
    weight: float = 1.0
    max_requests: int = 512
    max_evaluations: int = 64
    state: LaneState = LaneState.AWAY
    problem: str = "not asked yet"
    """Why it is not up."""
    pauses: Pauses = field(default_factory=lambda: Pauses(0.25, 30.0))
    """Of the bench. They start again with an answer, not with being back: a server that takes requests only to fail
    them rests longer each time."""
    turn: int = 0
    """How often it was benched."""
    told: bool = False
    """Whether it was said that it is away. Not said again before it has answered a request."""
    tokens: int = 0
    """Outstanding: prompt and max_tokens of all requests in flight."""
    requests: int = 0
    evaluations: int = 0

    def has_room(self, *, evaluation: bool) -> bool:
        """Whether one more request may be sent."""
        return self.requests < self.max_requests and not (evaluation and self.evaluations >= self.max_evaluations)

    @contextmanager
    def carrying(self, cost: int, *, evaluation: bool) -> Iterator[None]:
        """Count a request of `cost` tokens while it is in flight."""
        self.tokens += cost
        self.requests += 1
        self.evaluations += evaluation
        try:
            yield
        finally:
            self.tokens -= cost
            self.requests -= 1
            self.evaluations -= evaluation


def least_loaded(lanes: Iterable[Lane], cost: int, *, evaluation: bool) -> Lane | None:
    """The lane that would have the fewest outstanding tokens for its weight; None when none is up with room."""
    able = [lane for lane in lanes if lane.state is LaneState.UP and lane.has_room(evaluation=evaluation)]
    return min(able, key=lambda lane: (lane.tokens + cost) / lane.weight, default=None)
