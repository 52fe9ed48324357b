"""The group of all ranks: every rank executes the calls of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from gristmill_trainer.data.types import Sample
from gristmill_trainer.distributed.world import World
from gristmill_trainer.errors import AbandonedError, FencedError
from gristmill_trainer.learner import Learner
from gristmill_trainer.metrics import StepResult
from gristmill_trainer.stop import StoppedError


class Parts(Protocol):
    """Storage of the policy and the optimizer: whole, or sharded."""

    def served_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors to publish."""

    def save_model(self, folder: Path) -> None:
        """Writes a Hugging Face model folder, or adapters."""

    def save_whole(self, folder: Path) -> None:
        """Writes a Hugging Face model folder with merged adapters."""

    def state(self) -> dict[str, Any]:
        """Returns the states of optimizer and schedule."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `state`."""


@dataclass(frozen=True)
class _Order:
    """A call that rank 0 sends to the other ranks."""

    what: Literal["step", "served_tensors", "save_model", "save_whole", "state", "load_state", "end"]
    samples: Sequence[Sample] = ()
    step: int = 0
    folder: Path = Path()


class Crew:
    """Calls on all ranks: rank 0 calls the methods, the other ranks run `follow`. With one rank, nothing is sent."""

    def __init__(self, learner: Learner, parts: Parts, world: World) -> None:
        self.learner = learner
        self._parts = parts
        self._world = world

    def step(self, samples: Sequence[Sample], step: int, go_on: Callable[[], bool] = lambda: True) -> StepResult:
        """Runs `Learner.step` on the whole batch. Only rank 0 calls `go_on`, for all ranks."""
        self._tell(_Order("step", samples=samples, step=step))
        return self.learner.step(samples, step, go_on)

    def served_tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors in the server's format."""
        self._tell(_Order("served_tensors"))
        return self._parts.served_tensors()

    def save_model(self, folder: Path) -> None:
        """Writes a folder that a later policy loads as its weights."""
        self._tell(_Order("save_model", folder=folder))
        self._parts.save_model(folder)

    def save_whole(self, folder: Path) -> None:
        """Writes a whole Hugging Face model folder, with merged adapters."""
        self._tell(_Order("save_whole", folder=folder))
        self._parts.save_whole(folder)

    def state(self) -> dict[str, Any]:
        """Returns the whole states of optimizer and schedule."""
        self._tell(_Order("state"))
        return self._parts.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `state`."""
        self._tell(_Order("load_state"))
        self._parts.load_state(state)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the other ranks, except after an error, which may have interrupted an order.

        After an error, the other ranks notice that this process ended.
        """
        if kind is None or issubclass(kind, StoppedError | FencedError):
            self._tell(_Order("end"))

    def follow(self) -> None:
        """Executes the orders of rank 0 until the order to end. Raises RankLostError if rank 0 is lost."""
        while True:
            order: _Order = self._world.share(None)
            match order.what:
                case "step":
                    # If rank 0 abandoned the step, wait for its next order.
                    with suppress(AbandonedError):
                        self.learner.step(order.samples, order.step)
                case "served_tensors":
                    self._parts.served_tensors()
                case "save_model":
                    self._parts.save_model(order.folder)
                case "save_whole":
                    self._parts.save_whole(order.folder)
                case "state":
                    self._parts.state()
                case "load_state":
                    self._parts.load_state({})
                case "end":
                    return

    def _tell(self, order: _Order) -> None:
        if self._world.size > 1:
            self._world.share(order)
