"""`python -m gristmill_trainer.per_gpu ARGUMENTS`: the trainer with one process per GPU. The CUDA image starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gristmill import Deployment, GristmillError
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.settings import read_flags

SHUTDOWN_SECONDS = "55"
"""Seconds between torchrun's SIGTERM and its kill: less than `stop_grace_period` in compose.yaml."""


def command(gpus: int, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of Python for one GPU, of torchrun for several. Raises TrainerError for 0 GPUs."""
    if gpus == 0:
        raise TrainerError(
            "no_gpu",
            "torch finds no GPU: compare TRAINER_GPU with `nvidia-smi -L`, check the driver and the NVIDIA container "
            "toolkit; DEVICE=cpu trains without a GPU",
        )
    trainer = ["-m", "gristmill_trainer", "--device", "cuda", *arguments]
    if gpus == 1:
        return trainer
    # With --standalone, torchrun would also listen on a port whose clients can have it read pickles.
    return ["--nnodes", "1", "--master-addr", "127.0.0.1", "--nproc-per-node", str(gpus), *trainer]


def torchrun(arguments: Sequence[str], runs_dir: Path) -> None:
    """Runs torchrun in this process, again as often as a rank ran out of memory. Raises ChildFailedError.

    `runs_dir`: where that rank left its MemoryLimits. Its exit code would not do, because another rank may notice the
    loss and end first.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    from gristmill_trainer.out_of_memory import written_limits

    while True:
        before = written_limits(runs_dir)
        try:
            run(arguments)
        except ChildFailedError:
            if written_limits(runs_dir) == before:
                raise
        else:
            return


def main() -> None:
    """Replaces this process with the trainer, or becomes torchrun. Either gets the signals and sets the exit code."""
    try:
        read_flags(sys.argv[1:])  # before torch, whose import takes seconds
        import torch

        gpus = torch.cuda.device_count()
        arguments = command(gpus, sys.argv[1:])
        runs_dir = Deployment.read(os.environ).runs_dir
    except GristmillError as error:
        sys.exit(f"gristmill-trainer: {error.report()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    if gpus == 1:
        os.execv(sys.executable, [sys.executable, *arguments])
    torchrun(arguments, runs_dir)


if __name__ == "__main__":
    main()
