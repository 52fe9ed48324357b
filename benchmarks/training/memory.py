"""Memory with a vocabulary of 150,000. Each side runs in a separate process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.training.alone import Found, Job, Skipped, in_own_process
from benchmarks.training.batch import Load
from benchmarks.training.shapes import Shape, save
from benchmarks.training.sides import Name, Setting
from benchmarks.training.speed import TOLERANCE, check


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


def compare(shape: Shape, load: Load, say: Callable[[str], None]) -> Memory:
    """Measures both sides. Raises DisagreementError as `speed.compare` does, and RuntimeError if a side is skipped."""
    found: dict[Name, Found] = {}
    names: tuple[Name, Name] = ("ours", "trl")
    with tempfile.TemporaryDirectory() as folder:
        save(shape, Path(folder), "cpu")
        for name in names:
            one = in_own_process(Job(name, Setting(shape, folder, load, "cpu"), steps=1))
            if isinstance(one, Skipped):
                raise RuntimeError(f"memory of {name}: {one.why}")
            say(f"{name}: {one.before / 1e6:.0f} MB before, at most {one.peak / 1e6:.0f} MB in a step")
            found[name] = one
    check(found["ours"].first, found["trl"].first, TOLERANCE)
    return Memory(shape, load, found)
