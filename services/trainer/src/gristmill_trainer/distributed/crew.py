"""All ranks as one: what rank 0 is asked to do, every rank does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from gristmill_trainer.data.sample import Sample
from gristmill_trainer.distributed.world import World
from gristmill_trainer.errors import AbandonedError, FencedError
from gristmill_trainer.learner import Learner, StepResult
from gristmill_trainer.stop import StoppedError


class Parts(Protocol):
    """How the policy's and the optimizer's parts are held: whole, or shared out."""

    def served_tensors(self) -> dict[str, torch.Tensor]:
        """What a publication takes."""

    def save_model(self, folder: Path) -> None:
        """Write a Hugging Face model folder, or adapters."""

    def save_whole(self, folder: Path) -> None:
        """Write a Hugging Face model folder, adapters merged."""

    def state(self) -> dict[str, Any]:
        """Optimizer and schedule."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""


@dataclass(frozen=True)
class _Order:
    """What rank 0 has the others do with it."""

    what: Literal["step", "served_tensors", "save_model", "save_whole", "state", "load_state", "end"]
    samples: Sequence[Sample] = ()
    step: int = 0
    folder: Path = Path()


class Crew:
    """Rank 0 calls the methods, the others `follow`. With one rank there is nobody to tell."""

    def __init__(self, learner: Learner, parts: Parts, world: World) -> None:
        self.learner = learner
        self._parts = parts
        self._world = world

    def step(self, samples: Sequence[Sample], step: int, go_on: Callable[[], bool] = lambda: True) -> StepResult:
        """`Learner.step` on the whole batch. `go_on` is asked here alone, for all ranks."""
        self._tell(_Order("step", samples=samples, step=step))
        return self.learner.step(samples, step, go_on)

    def served_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors as the server holds them."""
        self._tell(_Order("served_tensors"))
        return self._parts.served_tensors()

    def save_model(self, folder: Path) -> None:
        """Write what a later policy takes as its weights."""
        self._tell(_Order("save_model", folder=folder))
        self._parts.save_model(folder)

    def save_whole(self, folder: Path) -> None:
        """Write the model as others load it: adapters merged."""
        self._tell(_Order("save_whole", folder=folder))
        self._parts.save_whole(folder)

    def state(self) -> dict[str, Any]:
        """Optimizer and schedule, whole."""
        self._tell(_Order("state"))
        return self._parts.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self._tell(_Order("load_state"))
        self._parts.load_state(state)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Send the others home. Not after an error, which may have come in the middle of an order: they then see this
        process go."""
        if kind is None or issubclass(kind, StoppedError | FencedError):
            self._tell(_Order("end"))

    def follow(self) -> None:
        """Do what rank 0 is asked to, until it sends home. Raises RankLostError when it is gone."""
        while True:
            order: _Order = self._world.share(None)
            match order.what:
                case "step":
                    # Rank 0 gave the step up, and says next what comes in its place.
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
