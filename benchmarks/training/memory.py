"""Memory with a vocabulary of 150,000: each side in a process of its own."""

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
        """Of the processes' peaks: libraries, weights, gradients, optimizer state and all."""
        return self.found["ours"].peak / self.found["trl"].peak

    @property
    def added_ratio(self) -> float:
        """Of what the steps added to a process that had model and optimizer already."""
        ours, theirs = self.found["ours"], self.found["trl"]
        return (ours.peak - ours.before) / (theirs.peak - theirs.before)


def compare(shape: Shape, load: Load, say: Callable[[str], None]) -> Memory:
    """Raises DisagreementError as `speed.compare` does, and RuntimeError when a process ends otherwise."""
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
