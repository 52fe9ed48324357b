"""Runs one backend in a separate process and measures its memory.

python -m benchmarks.trainer.subprocess_run JOB_FILE RESULT_FILE
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from benchmarks.machine import peak_rss, rss
from benchmarks.trainer import batch as batches
from benchmarks.trainer.backends import Name, Ours, Setting, Stepped, build, missing
from safetensors.torch import save_file

from gristmill_trainer.memory import Memory
from gristmill_trainer.metrics import ModelFlops
from gristmill_trainer.policy import Policy
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers

_NO_MEMORY = "out of memory"
_LONGEST = 1800.0


@dataclass(frozen=True)
class Job:
    backend: Name
    settings: list[Setting]
    """Measured one after the other. A setting that does not fit is measured with gradient checkpointing."""
    steps: int
    """Number of timed steps. One step before them warms up and makes the optimizer's state."""


@dataclass(frozen=True)
class Found:
    first: Stepped
    checkpointing: bool
    seconds: list[float]
    """Seconds of each timed step."""
    before: int
    """Bytes in use before the first step, with model and optimizer: resident bytes on a CPU, allocated ones on CUDA."""
    peak: int
    """Most bytes in use over all steps."""
    computed: int | None
    """The bytes that the trainer computes before the run (gristmill_trainer.memory); None for TRL."""
    publish: tuple[float, float] | None
    """On CUDA: seconds to copy the weights in the server's dtype to the host, and to write them to memory as a file of
    safetensors. The second publication, because the first one allocates pinned memory. None for TRL."""
    publish_ipc: float | None
    """On CUDA: seconds to copy the weights in the server's dtype into the buffer of publisher: ipc, the second time."""
    tokens: int
    trained_tokens: int
    real_share: float
    flops: int
    """FLOPs of a step's mathematics; see gristmill_trainer.metrics. The number is the same for both backends."""


@dataclass(frozen=True)
class Skipped:
    """The reason why a job has no measurements."""

    why: str
    checkpointing: bool = False

    @property
    def out_of_memory(self) -> bool:
        return self.why == _NO_MEMORY


Result = Found | Skipped


def in_own_process(job: Job) -> list[Result]:
    """Runs the job in a separate process. This process' stderr receives the output of the job.

    Returns a result for each setting: `Skipped` with the reason if nothing was measured.
    """
    lacking = missing(job.backend, job.settings[0].shape)
    if lacking is not None:
        return [Skipped(f"{lacking} is not installed")] * len(job.settings)
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
            return [Skipped(f"it took longer than {_LONGEST:.0f} s")] * len(job.settings)
        if ended.returncode == 0:
            answers = msgspec.json.decode(result_file.read_bytes(), type=list[msgspec.Raw])
            return [_decoded(bytes(one)) for one in answers]
    # The kernel kills a process that takes more memory than the machine has.
    return [Skipped(_NO_MEMORY if ended.returncode == -9 else f"its process ended with {ended.returncode}")] * len(
        job.settings
    )


def _decoded(answer: bytes) -> Result:
    if b'"why"' in answer:
        return msgspec.json.decode(answer, type=Skipped)
    return msgspec.json.decode(answer, type=Found)


def run(job: Job) -> list[Result]:
    """Runs the job in this process."""
    results = []
    for setting in job.settings:
        found = _run(job.backend, setting, job.steps)
        if isinstance(found, Skipped) and found.out_of_memory and not setting.checkpointing:
            _free(setting)
            found = _run(job.backend, replace(setting, checkpointing=True), job.steps)
        results.append(found)
        _free(setting)
    return results


def _run(name: Name, setting: Setting, steps: int) -> Result:
    batch = batches.make(setting.load, setting.shape.vocabulary)
    on_card = setting.device == "cuda"
    try:
        backend = build(name, setting, batch)
        before = torch.cuda.memory_allocated() if on_card else rss(os.getpid())
        _forget_peak(on_card)
        first = backend.step()
        if not (math.isfinite(first.loss) and math.isfinite(first.grad_norm)):
            return Skipped(f"its first step has loss {first.loss} and gradient norm {first.grad_norm}")
        seconds = []
        for _ in range(steps):
            began = time.monotonic()
            backend.step()
            if on_card:
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - began)
    except torch.OutOfMemoryError:
        return Skipped(_NO_MEMORY, setting.checkpointing)
    learner, memory = None, None
    if isinstance(backend, Ours):
        learner = backend.learner
        model = learner.policy.model
        memory = Memory.of(model.config, model.num_parameters(), backend.settings, cuda=on_card)
    flops = ModelFlops.of(backend.model)
    assert flops is not None, "the shapes are dense"
    lengths = batches.lengths(batch)
    return Found(
        first=first,
        checkpointing=setting.checkpointing,
        seconds=seconds,
        before=before,
        peak=torch.cuda.max_memory_allocated() if on_card else peak_rss(os.getpid()),
        computed=None if memory is None else memory.fixed + memory.per_token * setting.load.tokens,
        publish=_published(learner.policy, Path(setting.folder)) if learner is not None and on_card else None,
        publish_ipc=_published_ipc(learner.policy, Path(setting.folder)) if learner is not None and on_card else None,
        tokens=setting.load.tokens,
        trained_tokens=batches.trained_tokens(batch),
        real_share=batches.real_share(batch),
        flops=flops.step(sum(lengths), sum(length**2 for length in lengths), batches.trained_tokens(batch)),
    )


def _published(policy: Policy, folder: Path) -> tuple[float, float]:
    """Returns the seconds of `Found.publish`."""
    policy.served_tensors()
    began = time.monotonic()
    tensors = policy.served_tensors()
    copied = time.monotonic()
    save_file(tensors, folder / "published")
    return copied - began, time.monotonic() - copied


def _published_ipc(policy: Policy, folder: Path) -> float:
    """Returns the seconds of `Found.publish_ipc`."""
    transport = DeviceMemoryTransport(ModelServers([]), folder, None, device=policy.device)
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.monotonic()
        transport.copied(policy.served_tensors(on_device=True))
    return time.monotonic() - began


def _free(setting: Setting) -> None:
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()


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
