"""Errors of observers (W&B, files that copy events): they are logged and counted, and never end a training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gristmill.errors import ConfigError

_LOG = logging.getLogger(__name__)


class ObserverErrors:
    """The errors of a process' observers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of errors since the process began, by observer."""

    @contextmanager
    def of(self, observer: str) -> Iterator[None]:
        """Logs and counts an error of `observer` inside the block. The error ends only the block.

        Lets a ConfigError through, because then a setting of the observer is wrong.
        """
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  a full disk, or any error of W&B
            self.counts[observer] += 1
            count = self.counts[observer]
            if count & (count - 1) == 0:  # a disk stays full for many groups
                _LOG.error(
                    "%s failed (%s: %s); %d errors of it so far; the training continues",
                    observer, type(error).__name__, error, count,
                )  # fmt: skip

    def report(self) -> None:
        """Logs the number of errors of each observer."""
        for observer, count in self.counts.items():
            _LOG.warning("%s failed %d times: its record of this run is not complete", observer, count)
