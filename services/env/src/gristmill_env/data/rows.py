"""Which row comes when: a permit counts rows for ever, a data set has only so many."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Rows(Protocol):
    """What every source of rows offers; `datasets.Dataset` and lists of rows do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class RowOrder:
    """The order of the rows, epoch by epoch, computed from the seed alone.

    A permit's row number fixes the row, so replicas never take the same one twice and a restart goes
    on where it was; there is no position to save.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool) -> None:
        """`length`: rows of the data set, at least 1."""
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._permutation = lru_cache(maxsize=2)(self._permute)  # two: epochs overlap at their seam

    def index(self, row: int) -> int:
        """Index into the data set of the `row`-th row ever asked for."""
        epoch, position = divmod(row, self._length)
        return int(self._permutation(epoch)[position]) if self._shuffle else position

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._length)
