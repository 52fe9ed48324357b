"""Grids of parameters of which `make test` runs a part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def part_of_grid(*axes: Iterable[Any], every: int) -> list[Any]:
    """Returns every combination of the axes' values, for `pytest.mark.parametrize`. All but one of `every` are `long`.

    The part without the mark has each value of each axis, and each pair of values of two axes if `every` is at most the
    length of a third one.
    """
    values = [list(axis) for axis in axes]
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=[] if sum(places) % every == 0 else [pytest.mark.long],
        )
        for places in itertools.product(*(range(len(axis)) for axis in values))
    ]
