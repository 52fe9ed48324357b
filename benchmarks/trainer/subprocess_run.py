"""Runs one backend in a separate process and measures its memory.

python -m benchmarks.trainer.subprocess_run JOB_FILE RESULT_FILE
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from benchmarks.machine import peak_rss, rss
from benchmarks.trainer import batch as batches
from benchmarks.trainer.backends import Name, Setting, Stepped, build, missing

from gristmill_trainer.metrics import ModelFlops

_NO_MEMORY = "out of memory"
_LONGEST = 1800.0


@dataclass(frozen=True)
class Job:
    backend: Name
    setting: Setting
    steps: int
    """Number of timed steps. One step before them warms up and makes the optimizer's state."""


@dataclass(frozen=True)
class Found:
    first: Stepped
    seconds: list[float]
    """Seconds of each timed step."""
    before: int
    """Bytes in use before the first step, with model and optimizer: resident bytes on a CPU, allocated ones on CUDA."""
    peak: int
    """Most bytes in use over all steps."""
    tokens: int
    trained_tokens: int
    real_share: float
    flops: int
    """FLOPs of a step's mathematics; see gristmill_trainer.metrics. The number is the same for both backends."""


@dataclass(frozen=True)
class Skipped:
    """The reason why a job has no measurements."""

    why: str

    @property
    def out_of_memory(self) -> bool:
        return self.why == _NO_MEMORY


def in_own_process(job: Job) -> Found | Skipped:
    """Runs the job in a separate process. This process' stderr receives the output of the job.

    Returns `Skipped` with the reason if the job has no results.
    """
    lacking = missing(job.backend, job.setting.shape)
    if lacking is not None:
        return Skipped(f"{lacking} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "found.json"
        job_file.write_bytes(msgspec.json.encode(job))
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "benchmarks.trainer.subprocess_run", str(job_file), str(result_file)],
                stdout=sys.stderr,
                timeout=_LONGEST,
                check=False,
                cwd=Path(__file__).parents[2],
            )
        except subprocess.TimeoutExpired:
            return Skipped(f"it took longer than {_LONGEST:.0f} s")
        if ended.returncode == 0:
            answer = result_file.read_bytes()
            if b'"why"' in answer:
                return msgspec.json.decode(answer, type=Skipped)
            return msgspec.json.decode(answer, type=Found)
    # The kernel kills a process that takes more memory than the machine has.
    return Skipped(_NO_MEMORY if ended.returncode == -9 else f"its process ended with {ended.returncode}")


def run(job: Job) -> Found | Skipped:
    """Runs the job in this process."""
    setting = job.setting
    batch = batches.make(setting.load, setting.shape.vocabulary)
    on_card = setting.device == "cuda"
    try:
        backend = build(job.backend, setting, batch)
        before = torch.cuda.memory_allocated() if on_card else rss(os.getpid())
        _forget_peak(on_card)
        first = backend.step()
        if not (math.isfinite(first.loss) and math.isfinite(first.grad_norm)):
            return Skipped(f"its first step has loss {first.loss} and gradient norm {first.grad_norm}")
        seconds = []
        for _ in range(job.steps):
            began = time.monotonic()
            backend.step()
            if on_card:
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - began)
    except torch.OutOfMemoryError:
        return Skipped(_NO_MEMORY)
    flops = ModelFlops.of(backend.model)
    assert flops is not None, "the shapes are dense"
    return Found(
        first=first,
        seconds=seconds,
        before=before,
        peak=torch.cuda.max_memory_allocated() if on_card else peak_rss(os.getpid()),
        tokens=setting.load.tokens,
        trained_tokens=batches.trained_tokens(batch),
        real_share=batches.real_share(batch),
        flops=flops.step(batches.lengths(batch), batches.trained_tokens(batch)),
    )


def _forget_peak(on_card: bool) -> None:
    """Resets the peak, because loading weights briefly takes more memory than the weights and is not part of a step."""
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    Path(result_file).write_bytes(msgspec.json.encode(run(job)))


if __name__ == "__main__":
    main()
