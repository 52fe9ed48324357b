"""Grids of parameters of which `make test` runs a part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def part_of_grid(*axes: Iterable[Any], every: int) -> list[Any]:
    """Returns every combination of the axes' values, for `pytest.mark.parametrize`. All but one of `every` are `long`.

    The part without the mark has each value of an axis if `every` is at most the length of another one, and each pair
    of values of two axes if `every` is at most the length of a third one.
    """
    values = [list(axis) for axis in axes]
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=[] if sum(places) % every == 0 else [pytest.mark.long],
        )
        for places in itertools.product(*(range(len(axis)) for axis in values))
    ]


def rest_is_long(*values: Any, first: int = 1) -> list[Any]:
    """Returns the values of a parameter for `pytest.mark.parametrize`. All but the `first` ones are `long`.

    A value may be a tuple for several parameters, or a `pytest.param`.
    """
    made = [
        one if isinstance(one, ParameterSet) else pytest.param(*(one if isinstance(one, tuple) else (one,)))
        for one in values
    ]
    return [
        one if number < first else one._replace(marks=(*one.marks, pytest.mark.long)) for number, one in enumerate(made)
    ]
