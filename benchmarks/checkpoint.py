"""How long a step waits for a checkpoint: `make bench ARGS=checkpoint`.

A model with random weights takes one step of AdamW on the CPU, in float32. Then the trainer's own code copies the state
and a thread writes the checkpoint, several times in turn. The next step waits only for the copy. Beside the write, the
main thread measures how long it cannot run, because a writer that holds Python's lock would stop the step.

Needs 28 bytes of memory per parameter: 17 GB for qwen3-0.6b. `--layers` makes the model smaller.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks import machine, script
from benchmarks.trainer.shapes import REAL, SHAPES, Shape, save

from gristmill import Hyperparameters, PolicyVersion
from gristmill_trainer.checkpoint.background import BackgroundSave
from gristmill_trainer.checkpoint.contents import Progress
from gristmill_trainer.checkpoint.store import CheckpointStore
from gristmill_trainer.model_state import LearnerState
from gristmill_trainer.optimizer import build_optimizer
from gristmill_trainer.policy import ModelSource, Policy


@dataclass
class Write:
    waits: float
    """Seconds that the step waits for the copy."""
    works: float
    """Seconds of processor time of all threads in this wait, which other processes do not make longer."""
    writes: float
    """Seconds from the copy until the checkpoint is durable."""
    stopped: float
    """Most seconds that the main thread could not run during the write."""


def main() -> None:
    parser = script.parser("checkpoint", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default=REAL[0].name, help=f"default: {REAL[0].name}")
    parser.add_argument("--layers", type=int, help="default: the shape's layers")
    parser.add_argument("--rounds", type=int, default=4, help="checkpoints; default: 4")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: the first copy also waits for new memory")
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        page = _page(replace(shape, layers=options.layers or shape.layers), Path(folder), options.rounds)
    script.publish(page, options.results, "checkpoint")


def _page(shape: Shape, folder: Path, rounds: int) -> str:
    facts = machine.hardware() | machine.training("cpu")
    state, parameters = _after_one_step(shape, folder / "model")
    facts |= {"model": f"{shape.name}, {shape.layers} layers, {parameters / 1e6:.0f}M parameters in float32"}
    store, saving = CheckpointStore(folder / "checkpoints", kept=1), BackgroundSave()
    first, *later = [_write(state, store, saving, step) for step in range(1, rounds + 1)]
    newest = store.newest()
    assert newest is not None
    size = sum(file.stat().st_size for file in newest.iterdir())
    works = statistics.median(one.works for one in later)
    waits, writes = statistics.median(one.waits for one in later), statistics.median(one.writes for one in later)
    lines = [
        *script.heading("Checkpoints beside the next steps", facts),
        f"| | first checkpoint | median of the next {len(later)} |",
        "|---|---|---|",
        f"| the step waits for the copy | {first.waits:.2f} s | {waits:.2f} s |",
        f"| processor time of the copy | {first.works:.2f} s | {works:.2f} s |",
        f"| write, hash and fsync of {size / 1e9:.1f} GB | {first.writes:.1f} s | {writes:.1f} s |",
        f"| wait / write | {first.waits / first.writes:.3f} | {waits / writes:.3f} (wanted: at most 0.10) |",
        f"| longest stop of the main thread beside the write | {1000 * first.stopped:.0f} ms | "
        f"{1000 * max(one.stopped for one in later):.0f} ms |",
        "",
        "The first copy also waits until the kernel provides the memory, which later copies use again.",
        "",
    ]
    return "\n".join(lines)


def _after_one_step(shape: Shape, folder: Path) -> tuple[LearnerState, int]:
    save(shape, folder, "cpu")
    policy = Policy(ModelSource(str(folder), str(folder), None, 512), "cpu")
    optimizer = build_optimizer(Hyperparameters(), policy.trained_parameters())
    for parameter in policy.trained_parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return LearnerState(policy, optimizer), sum(parameter.numel() for parameter in policy.trained_parameters())


def _write(state: LearnerState, store: CheckpointStore, saving: BackgroundSave, step: int) -> Write:
    began, worked = time.monotonic(), time.process_time()
    staged = state.staged()
    assert staged is not None
    saving.begin(store, staged, Progress(step, PolicyVersion(1, step), creation=""), None)
    waited = looked = time.monotonic()
    works = time.process_time() - worked
    stopped = 0.0
    while saving.poll() is None:
        time.sleep(0.001)
        now = time.monotonic()
        stopped, looked = max(stopped, now - looked), now
    return Write(waited - began, works, time.monotonic() - waited, stopped)


if __name__ == "__main__":
    main()
