"""The cases on a CPU: speed and memory of a step, after a check that both backends compute the same results.

For the speed, both backends take steps in turn in one process. For the memory, each backend runs in a separate process.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trainer import batch as batches
from benchmarks.trainer.backends import Backend, Name, Setting, Stepped, build
from benchmarks.trainer.batch import Load
from benchmarks.trainer.shapes import Shape, save
from benchmarks.trainer.subprocess_run import Found, Job, Skipped, in_own_process

TOLERANCE = 1e-4


class DisagreementError(Exception):
    """The backends compute different things, so their times cannot be compared."""


@dataclass(frozen=True)
class Speed:
    other: Name
    """The backend that is compared with ours."""
    shape: Shape
    load: Load
    real_share: float
    trained_tokens: int
    """Trained tokens per step."""
    first: dict[Name, Stepped]
    seconds: dict[Name, list[float]]
    """Seconds of each round's step, by backend."""

    def tokens_per_second(self, name: Name) -> float:
        """Returns trained tokens per second, with the median time of all rounds."""
        return self.trained_tokens / statistics.median(self.seconds[name])

    @property
    def ratio(self) -> float:
        """Gristmill's tokens per second divided by the other backend's."""
        return self.tokens_per_second("ours") / self.tokens_per_second(self.other)

    @property
    def ratios(self) -> list[float]:
        """Ratios of each round's two steps, which run directly one after the other.

        If the ratios differ widely, the machine was busy with other work.
        """
        return [theirs / ours for theirs, ours in zip(self.seconds[self.other], self.seconds["ours"], strict=True)]


@dataclass(frozen=True)
class Memory:
    shape: Shape
    load: Load
    found: dict[Name, Found]

    @property
    def peak_ratio(self) -> float:
        """Ratio of the processes' peaks, which include libraries, weights, gradients and optimizer state."""
        return self.found["ours"].peak / self.found["trl"].peak

    @property
    def added_ratio(self) -> float:
        """Ratio of the bytes that the steps added to a process with model and optimizer."""
        ours, theirs = self.found["ours"], self.found["trl"]
        return (ours.peak - ours.before) / (theirs.peak - theirs.before)


def compare_speed(other: Name, shape: Shape, load: Load, rounds: int, say: Callable[[str], None]) -> Speed:
    """Measures our backend and the other one.

    Raises DisagreementError if loss or gradient norm of the first step differ by more than 1e-4. The difference is
    relative to the other backend's value, or to 0.1 if that value is smaller.
    """
    batch = batches.make(load, shape.vocabulary)
    names: tuple[Name, Name] = ("ours", other)
    with tempfile.TemporaryDirectory() as folder:
        save(shape, Path(folder), "cpu")
        setting = Setting(shape, folder, load, "cpu")
        backends: dict[Name, Backend] = {name: build(name, setting, batch) for name in names}
        first = {name: backend.step() for name, backend in backends.items()}
        check(first["ours"], first[other], TOLERANCE)
        seconds: dict[Name, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                began = time.monotonic()
                backends[name].step()
                seconds[name].append(time.monotonic() - began)
            say(f"round {number + 1}/{rounds}: ours {seconds['ours'][-1]:.2f} s, {other} {seconds[other][-1]:.2f} s")
    return Speed(other, shape, load, batches.real_share(batch), batches.trained_tokens(batch), first, seconds)


def compare_memory(shape: Shape, load: Load, say: Callable[[str], None]) -> Memory:
    """Measures both backends.

    Raises DisagreementError as `compare_speed` does, and RuntimeError if a backend is skipped.
    """
    found: dict[Name, Found] = {}
    names: tuple[Name, Name] = ("ours", "trl")
    with tempfile.TemporaryDirectory() as folder:
        save(shape, Path(folder), "cpu")
        for name in names:
            (one,) = in_own_process(Job(name, [Setting(shape, folder, load, "cpu")], steps=1))
            if isinstance(one, Skipped):
                raise RuntimeError(f"memory of {name}: {one.why}")
            say(f"{name}: {one.before / 1e6:.0f} MB before, at most {one.peak / 1e6:.0f} MB in a step")
            found[name] = one
    check(found["ours"].first, found["trl"].first, TOLERANCE)
    return Memory(shape, load, found)


def check(ours: Stepped, theirs: Stepped, tolerance: float) -> None:
    """Compares the results of two steps. Raises DisagreementError."""
    for what in ("loss", "grad_norm"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        # The condition is written so that NaN counts as a difference.
        if not abs(mine - other) <= tolerance * max(0.1, abs(other)):
            raise DisagreementError(f"{what} of the first step: ours {mine!r}, the other's {other!r}")
