"""The CUDA image's entrypoint."""

from __future__ import annotations

import os
import subprocess
import sys

from gristmill_trainer.per_gpu import command

TRAINER = ["-m", "gristmill_trainer", "--device", "cuda", "--training_steps", "3"]


def test_one_gpu_needs_one_process() -> None:
    assert command(1, ["--training_steps", "3"]) == [sys.executable, *TRAINER]


def test_several_gpus_get_a_process_each() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert command(4, ["--training_steps", "3"]) == [*torchrun, *TRAINER]


def test_entrypoint_without_a_gpu_ends_at_once_with_the_remedy() -> None:
    started = [sys.executable, "-m", "gristmill_trainer.per_gpu"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(started, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "[no_gpu]" in done.stderr
    assert "TRAINER_GPU" in done.stderr
