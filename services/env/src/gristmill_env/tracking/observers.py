"""The observers of a training run: W&B, and the file of its groups. Their errors never end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from gristmill import TrajectoryGroup
from gristmill.observers import ObserverErrors
from gristmill_env.rollout import Rollout
from gristmill_env.saved import GroupSaver
from gristmill_env.tally import Tally
from gristmill_env.tracking.tracker import ScoredPrompt, Tracker

T = TypeVar("T")

_WANDB = "W&B"
_SAVED = "saved groups"


class Observers:
    """Passes each event of a training to its observers.

    An error of an observer is logged and counted, and the training continues. Without observers, every method does
    nothing.
    """

    def __init__(
        self, tracker: Callable[[], Tracker] | None = None, saver: Callable[[], GroupSaver] | None = None
    ) -> None:
        """`tracker` and `saver` each open an observer. An observer that does not open is omitted.

        Raises ConfigError when a setting of an observer is wrong.
        """
        self.errors = ObserverErrors()
        self._tracker = self._open(_WANDB, tracker)
        self._saver = self._open(_SAVED, saver)

    def scored(self, prompt: ScoredPrompt) -> None:
        """Reports a scored prompt, whether its group is submitted or dropped."""
        if self._tracker is not None:
            with self.errors.of(_WANDB):
                self._tracker.scored(prompt)

    async def submitted(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally, rollout: Rollout) -> None:
        """Reports a submitted group. `texts`: prompt and completion as text, for each sequence of the group."""
        if self._tracker is not None:
            with self.errors.of(_WANDB):
                self._tracker.group(group, texts, tally)
        if self._saver is not None:
            with self.errors.of(_SAVED):
                await self._saver.save(rollout)

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Reports the evaluation of the weights of training step `step`. `results`: by name, without a prefix."""
        if self._tracker is not None:
            with self.errors.of(_WANDB):
                self._tracker.evaluation(results, step)

    def close(self) -> None:
        """Flushes and closes every observer, and logs how many errors each observer had."""
        for name, observer in ((_WANDB, self._tracker), (_SAVED, self._saver)):
            if observer is not None:
                with self.errors.of(name):
                    observer.close()
        self.errors.report()

    def _open(self, name: str, factory: Callable[[], T] | None) -> T | None:
        if factory is not None:
            with self.errors.of(name):
                return factory()
        return None
