"""Shapes of real models on one GPU: tokens per second, memory and MFU, compared with TRL if TRL's step fits."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.trainer.backends import Name, Setting
from benchmarks.trainer.batch import Load
from benchmarks.trainer.shapes import Shape, save
from benchmarks.trainer.subprocess_run import Job, Result, Skipped, in_own_process
from safetensors import SafetensorError

BACKENDS: tuple[Name, ...] = ("ours", "eager", "trl")


@dataclass(frozen=True)
class Case:
    """One backend with one shape and load."""

    backend: Name
    setting: Setting
    found: Result

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and completions per second, without padding."""
        assert not isinstance(self.found, Skipped)
        return self.found.tokens / statistics.median(self.found.seconds)

    def mfu(self, peak_tflops: float | None) -> float | None:
        if peak_tflops is None or isinstance(self.found, Skipped):
            return None
        return self.found.flops / statistics.median(self.found.seconds) / (peak_tflops * 1e12)


def loads(tokens: int) -> tuple[Load, Load]:
    """Returns two loads with equal tokens: eight ragged sequences in a row, and one long context as long as the row."""
    return Load(8, 8, tokens), Load(1, 1, tokens, prompt_share=0.1)


def measure(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    device: Literal["cpu", "cuda"],
    steps: int,
    say: Callable[[str], None],
) -> Iterator[Case]:
    """Yields all cases. Repeats a case that does not fit with gradient checkpointing."""
    for shape in shapes:
        # In memory if the machine has such a file system, because a disk may be slow.
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            say(f"{shape.name}: weights")
            lacking = _save(shape, Path(folder), device)
            settings = [Setting(shape, folder, load, device) for count in tokens for load in loads(count)]
            for backend in BACKENDS:
                job = Job(backend, settings, steps)
                results = in_own_process(job) if lacking is None else [lacking] * len(settings)
                for setting, found in zip(settings, results, strict=True):
                    case = Case(backend, setting, found)
                    say(f"{shape.name}, {setting.load.sequences} x {setting.load.tokens}, {backend}: {_told(case)}")
                    yield case


def _save(shape: Shape, folder: Path, device: Literal["cpu", "cuda"]) -> Skipped | None:
    """Saves the shape's weights. Returns the reason if this fails, else None."""
    try:
        save(shape, folder, device)
    except (OSError, SafetensorError) as error:
        return Skipped(f"its weights cannot be written: {error}")
    return None


def _told(case: Case) -> str:
    if isinstance(case.found, Skipped):
        return f"SKIPPED: {case.found.why}"
    return f"{case.tokens_per_second:.0f} tokens/s, {case.found.peak / 1e9:.1f} GB"
