"""`python -m gristmill_trainer.per_gpu ARGUMENTS`: the trainer with one process per GPU. The CUDA image starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gristmill import GristmillError
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.settings import read_flags

SHUTDOWN_SECONDS = "55"
"""Seconds between torchrun's SIGTERM and its kill: less than `stop_grace_period` in compose.yaml."""


def command(gpus: int, arguments: Sequence[str]) -> list[str]:
    """Returns the command for `gpus` GPUs. One GPU does not need torchrun. Raises TrainerError for 0 GPUs."""
    if gpus == 0:
        raise TrainerError(
            "no_gpu",
            "torch finds no GPU: compare TRAINER_GPU with `nvidia-smi -L`, check the driver and the NVIDIA container "
            "toolkit; DEVICE=cpu trains without a GPU",
        )
    trainer = ["-m", "gristmill_trainer", "--device", "cuda", *arguments]
    if gpus == 1:
        return [sys.executable, *trainer]
    # With --standalone, torchrun would also listen on a port whose clients can have it read pickles.
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "1", "--master-addr", "127.0.0.1"]
    return [sys.executable, *torchrun, "--nproc-per-node", str(gpus), *trainer]


def main() -> NoReturn:
    """Replaces this process with the trainer or torchrun, which then gets the signals and sets the exit code."""
    try:
        read_flags(sys.argv[1:])  # before torch, whose import takes seconds
        import torch

        started = command(torch.cuda.device_count(), sys.argv[1:])
    except GristmillError as error:
        sys.exit(f"gristmill-trainer: {error.report()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(started[0], started, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SHUTDOWN_SECONDS, **os.environ})


if __name__ == "__main__":
    main()
