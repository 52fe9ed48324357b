"""Assembly of a step's metrics from the data statistics and the learner's result."""

from __future__ import annotations

import math
import resource
import sys
from collections import Counter
from dataclasses import asdict

import torch

from gristmill import PolicyVersion
from gristmill.metrics import StepMetrics
from gristmill_trainer.data.samples import Statistics
from gristmill_trainer.flops import peak_tflops
from gristmill_trainer.learner import StepResult
from gristmill_trainer.observed import measure


def peak_of(device: torch.device, set_by_user: float | None) -> float | None:
    """Returns the peak TFLOPS of one device, the denominator of MFU; None if unknown."""
    if set_by_user is not None:
        return set_by_user
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def memory_mb(device: torch.device) -> float:
    """Returns peak memory in MB: allocated memory on a CUDA device, else the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def step_metrics(
    version: PolicyVersion,
    known: Statistics,
    result: StepResult,
    seconds: dict[str, float],
    *,
    learning_rate: float,
    device: torch.device,
    devices: int = 1,
    peak: float | None = None,
) -> StepMetrics:
    """Builds the metrics. `learning_rate`: the step's. `seconds`: by phase. `peak`: TFLOPS per device."""
    seen = measure(result.seen)
    spent = seconds.get("train", 0.0)
    return StepMetrics(
        step=version.step,
        policy_version=str(version),
        reward_mean=known.reward_mean,
        reward_std=known.reward_std,
        loss=result.loss,
        grad_norm=result.grad_norm,
        staleness_mean=sum(known.staleness) / len(known.staleness) if known.staleness else math.nan,
        staleness={str(steps): groups for steps, groups in sorted(Counter(known.staleness).items())},
        completion_tokens_mean=known.completion_tokens_mean,
        tokens=result.tokens,
        trained_tokens=result.trained_tokens,
        seconds=seconds,
        learning_rate=learning_rate,
        skipped=result.skipped,
        updates_left_out=result.left_out,
        rejected={str(reason): count for reason, count in known.rejected.items()},
        reward_parts=known.reward_parts,
        seq_len_cuts=known.seq_len_cuts,
        overlong_filtered=known.overlong_filtered,
        overlong_punished=known.overlong_punished,
        advantages_zeroed=known.zeroed,
        unknown_overrides=known.unknown_overrides,
        zero_advantage_share=known.zero_advantage_share,
        cut_off_share=known.cut_off_share,
        tokens_per_second=result.tokens / spent if spent else 0.0,
        mfu=_mfu(result, spent, devices, peak),
        peak_tflops=peak,
        memory_mb=memory_mb(device),
        **{name: value for name, value in asdict(seen).items() if value is not None},
    )


def _mfu(result: StepResult, seconds: float, devices: int, peak: float | None) -> float | None:
    if result.flops is None or peak is None or not seconds:
        return None
    return result.flops / (seconds * devices * peak * 1e12)
