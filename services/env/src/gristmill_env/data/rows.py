"""The order of the rows: maps a permit's row number, which grows without limit, to an index into the data set."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Rows(Protocol):
    """The interface of every source of rows; `datasets.Dataset` and lists of rows implement it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class RowOrder:
    """The order of the rows, epoch by epoch, computed from the seed alone.

    A permit's row number fixes the row, so replicas never take the same row twice. A restart continues at the same
    place, and no position is saved.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool) -> None:
        """`length`: rows of the data set, at least 1."""
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._permutation = lru_cache(maxsize=2)(self._permute)  # two: epochs overlap at their seam

    def index(self, row: int) -> int:
        """Returns the index into the data set for the `row`-th requested row."""
        epoch, position = divmod(row, self._length)
        return int(self._permutation(epoch)[position]) if self._shuffle else position

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._length)
