"""Chooses the server for the next request: the server with the fewest outstanding tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from gristmill_env.inference.server import ModelServer


class LaneState(StrEnum):
    """Whether a server can receive requests."""

    UP = "up"
    AWAY = "away"
    """The server failed, and is checked repeatedly until it answers again."""
    UNPUBLISHED = "unpublished"
    """The server answers, but with weights that no trainer published to it."""


@dataclass
class Pauses:
    """Exponential backoff in seconds, from `first` to `longest`, doubled each time. Jitter: 0.5 to 1.5 times."""

    first: float
    longest: float
    made: int = 0

    def next(self) -> float:
        """Returns the next pause in seconds."""
        pause: float = min(self.first * 2**self.made, self.longest)
        self.made = min(self.made + 1, 32)
        return pause * random.uniform(0.5, 1.5)

    def start_again(self) -> None:
        """Resets the pauses to the shortest pause."""
        self.made = 0


@dataclass(eq=False)
class Lane:
    """One server, its limits and its requests in flight."""

    server: ModelServer
    weight: float = 1.0
    max_requests: int = 512
    max_evaluations: int = 64
    state: LaneState = LaneState.AWAY
    problem: str = "not asked yet"
    """The reason why the server is not up."""
    pauses: Pauses = field(default_factory=lambda: Pauses(0.25, 30.0))
    """Pauses between checks of a failed server. They restart when the server answers a request, not when it is up
    again. So a server that accepts requests and then fails them pauses longer each time."""
    turn: int = 0
    """How often the server was taken out of use."""
    told: bool = False
    """Whether the failure was logged. It is not logged again until the server has answered a request."""
    tokens: int = 0
    """Outstanding tokens: prompt tokens and max_tokens of all requests in flight."""
    requests: int = 0
    evaluations: int = 0

    def has_room(self, *, evaluation: bool) -> bool:
        """Whether the server may receive one more request."""
        return self.requests < self.max_requests and not (evaluation and self.evaluations >= self.max_evaluations)

    @contextmanager
    def carrying(self, cost: int, *, evaluation: bool) -> Iterator[None]:
        """Counts a request of `cost` tokens while it is in flight."""
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
    """Returns the server that would have the fewest outstanding tokens relative to its weight. Returns None if no
    server is up and has room."""
    able = [lane for lane in lanes if lane.state is LaneState.UP and lane.has_room(evaluation=evaluation)]
    return min(able, key=lambda lane: (lane.tokens + cost) / lane.weight, default=None)
