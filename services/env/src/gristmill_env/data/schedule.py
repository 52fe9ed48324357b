"""Which source a permit belongs to, computed from the permit's number and the weights of the sources alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from gristmill_env.errors import DatasetError

MOST_NUMBERS = 100_000
"""Longest period."""


class Schedule:
    """Gives each number from 0 a source, and the row of that source: how many earlier numbers the source has.

    After n numbers, a source of weight w has more than n * w / W - 1 and less than n * w / W + 1 of them, where W is
    the sum of the weights. No state is kept: replicas and restarts agree, and the order of the sources does not matter.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: above 0, at least one, by the source's name.

        Raises DatasetError if the weights have too many digits: their order would repeat only after MOST_NUMBERS.
        """
        exact = {name: Fraction(repr(float(weight))) for name, weight in sorted(weights.items())}
        factor = math.lcm(*(weight.denominator for weight in exact.values()))
        whole = {name: int(weight * factor) for name, weight in exact.items()}
        divisor = math.gcd(*whole.values())
        self._weights = {name: weight // divisor for name, weight in whole.items()}
        period = sum(self._weights.values())
        if period > MOST_NUMBERS:
            raise DatasetError(
                "weights_too_fine",
                f"the weights of the sources ({', '.join(f'{weight:g}' for weight in weights.values())}) repeat only "
                f"after {period:,} prompts; round them, such as 0.33 and 0.67, so that it is at most {MOST_NUMBERS:,}",
                period=period,
            )
        self._order = _order(self._weights, period)
        self._places = {name: [at for at, (other, _) in enumerate(self._order) if other == name] for name in whole}
        """The numbers of each source in the first period."""

    def at(self, number: int) -> tuple[str, int]:
        """Returns the source of a number, and the row of that source."""
        periods, place = divmod(number, len(self._order))
        name, row = self._order[place]
        return name, periods * self._weights[name] + row

    def number(self, name: str, row: int) -> int:
        """Returns the number of a row of a source: the inverse of `at`."""
        periods, place = divmod(row, self._weights[name])
        return periods * len(self._order) + self._places[name][place]


def _order(weights: Mapping[str, int], period: int) -> list[tuple[str, int]]:
    """Returns source and row of each number until all repeats. `period`: the sum of the weights.

    The next row of a source with c rows is early while n * w / period <= c, and due at the first n with
    n * w / period >= c + 1. Each number goes to the source whose next row is due first, of those whose next row is not
    early. This order meets every due time, because some order does: the weights fill all numbers exactly.
    """
    counts = dict.fromkeys(weights, 0)
    order = []
    for number in range(1, period + 1):
        _, name = min(
            (-(-(counts[name] + 1) * period // weight), name)
            for name, weight in weights.items()
            if number * weight > counts[name] * period
        )
        order.append((name, counts[name]))
        counts[name] += 1
    return order
