"""Both sides in one process, taking steps in turn, after a check that they compute the same results."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.training import batch as batches
from benchmarks.training.batch import Load
from benchmarks.training.shapes import Shape, save
from benchmarks.training.sides import Name, Setting, Side, Stepped, build

TOLERANCE = 1e-4


class DisagreementError(Exception):
    """The sides compute different things, so their times cannot be compared."""


@dataclass(frozen=True)
class Speed:
    shape: Shape
    load: Load
    real_share: float
    trained_tokens: int
    """Trained tokens per step."""
    first: dict[Name, Stepped]
    seconds: dict[Name, list[float]]
    """Seconds of each round's step, by side."""

    def tokens_per_second(self, name: Name) -> float:
        """Returns trained tokens per second, with the median time of all rounds."""
        return self.trained_tokens / statistics.median(self.seconds[name])

    @property
    def ratio(self) -> float:
        """Gristmill's tokens per second divided by TRL's."""
        return self.tokens_per_second("ours") / self.tokens_per_second("trl")

    @property
    def ratios(self) -> list[float]:
        """Ratios of each round's two steps, which run directly one after the other.

        If the ratios differ widely, the machine was busy with other work.
        """
        return [theirs / ours for theirs, ours in zip(self.seconds["trl"], self.seconds["ours"], strict=True)]


def compare(shape: Shape, load: Load, rounds: int, say: Callable[[str], None]) -> Speed:
    """Measures both sides.

    Raises DisagreementError if loss or gradient norm of the first step differ by more than 1e-4. The difference is
    relative to TRL's value, or to 0.1 if TRL's value is smaller.
    """
    batch = batches.make(load, shape.vocabulary)
    names: tuple[Name, Name] = ("ours", "trl")
    with tempfile.TemporaryDirectory() as folder:
        save(shape, Path(folder), "cpu")
        setting = Setting(shape, folder, load, "cpu")
        sides: dict[Name, Side] = {name: build(name, setting, batch) for name in names}
        first = {name: side.step() for name, side in sides.items()}
        check(first["ours"], first["trl"], TOLERANCE)
        seconds: dict[Name, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                began = time.monotonic()
                sides[name].step()
                seconds[name].append(time.monotonic() - began)
            say(f"round {number + 1}/{rounds}: ours {seconds['ours'][-1]:.2f} s, TRL {seconds['trl'][-1]:.2f} s")
    return Speed(shape, load, batches.real_share(batch), batches.trained_tokens(batch), first, seconds)


def check(ours: Stepped, theirs: Stepped, tolerance: float) -> None:
    """Compares the results of two steps. Raises DisagreementError."""
    for what in ("loss", "grad_norm"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        # The condition is written so that NaN counts as a difference.
        if not abs(mine - other) <= tolerance * max(0.1, abs(other)):
            raise DisagreementError(f"{what} of the first step: ours {mine!r}, TRL's {other!r}")
