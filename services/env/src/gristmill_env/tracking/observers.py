"""The observers of a training: W&B, and the file of its groups. Their errors never end it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from gristmill import ConfigError, TrajectoryGroup
from gristmill_env.rollout import Rollout
from gristmill_env.saved import GroupSaver
from gristmill_env.tally import Tally
from gristmill_env.tracking.tracker import ScoredPrompt, Tracker

logger = logging.getLogger(__name__)

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
        """`tracker` and `saver` open an observer each. An observer that does not open is left out.

        Raises ConfigError: a setting of an observer is wrong.
        """
        self.errors: Counter[str] = Counter()
        """Errors since the process began, by observer."""
        self._tracker = self._open(_WANDB, tracker)
        self._saver = self._open(_SAVED, saver)

    def scored(self, prompt: ScoredPrompt) -> None:
        """Report a scored prompt, whether its group is submitted or dropped."""
        if self._tracker is not None:
            with self._continues(_WANDB):
                self._tracker.scored(prompt)

    async def submitted(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally, rollout: Rollout) -> None:
        """Report a submitted group. `texts`: prompt and completion as text, for each sequence of the group."""
        if self._tracker is not None:
            with self._continues(_WANDB):
                self._tracker.group(group, texts, tally)
        if self._saver is not None:
            with self._continues(_SAVED):
                await self._saver.save(rollout)

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Report the evaluation of the weights of training step `step`. `results`: by name, without a prefix."""
        if self._tracker is not None:
            with self._continues(_WANDB):
                self._tracker.evaluation(results, step)

    def close(self) -> None:
        """Flush and close every observer, and log how many errors each of them had."""
        for name, observer in ((_WANDB, self._tracker), (_SAVED, self._saver)):
            if observer is not None:
                with self._continues(name):
                    observer.close()
        for name, count in self.errors.items():
            logger.warning("%s failed %d times: its record of this run is not complete", name, count)

    def _open(self, name: str, factory: Callable[[], T] | None) -> T | None:
        if factory is not None:
            with self._continues(name):
                return factory()
        return None

    @contextmanager
    def _continues(self, name: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  a full disk, or any error of W&B
            self.errors[name] += 1
            count = self.errors[name]
            if count & (count - 1) == 0:  # a disk stays full for many groups
                logger.error(
                    "%s failed (%s: %s); %d errors of it so far; the training continues",
                    name, type(error).__name__, error, count,
                )  # fmt: skip
