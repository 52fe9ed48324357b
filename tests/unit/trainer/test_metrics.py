"""A step's metrics in the file, in the API and in trackers."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.support.groups import make_group

from gristmill import PolicyVersion
from gristmill.internal.metrics import StepMetrics
from gristmill_trainer.data.checks import Limits
from gristmill_trainer.data.samples import Statistics, to_samples
from gristmill_trainer.data.types import Reason
from gristmill_trainer.metrics import StepResult, TokenStats, memory_mb, peak_of, step_metrics
from gristmill_trainer.settings import TrainerSettings

CPU = torch.device("cpu")
SECONDS = {"wait": 1.0, "pack": 0.1, "train": 0.5, "publish": 0.2}


def statistics(groups: int = 2) -> Statistics:
    made = [
        replace(make_group(f"g{number:08d}", seed=number, version=f"1.{number}"), meta={"source": "sums"})
        for number in range(groups)
    ]
    limits = Limits(vocabulary=64, seq_len=512, policy=PolicyVersion(1, 3))
    return to_samples(made, limits, TrainerSettings(device="cpu")).statistics


def result(count: int = 6, **fields: Any) -> StepResult:
    values = np.linspace(-2, -1, count).astype(np.float32)
    no, yes = np.zeros(count, np.float32), np.ones(count, np.float32)
    seen = TokenStats(
        values, values, values - np.float32(0.1), values + np.float32(1.5), values, no * np.float32(np.nan), yes,
        no, no, yes, no,
    )  # fmt: skip
    done = StepResult(0.25, 1.5, seen, tokens=100, trained_tokens=count, flops=4 * 10**12, learning_rate=1e-3)
    return replace(done, **fields)


def nothing() -> StepResult:
    return StepResult(skipped="nothing is left of its groups to train on")


def metrics(known: Statistics, done: StepResult, **changed: Any) -> StepMetrics:
    arguments: dict[str, Any] = {"device": CPU} | changed
    return step_metrics(PolicyVersion(1, 4), known, done, SECONDS, **arguments)


def test_step_metrics_contain_all_values() -> None:
    before = time.time()
    found = metrics(statistics(), result(), devices=2, peak=16.0)
    assert found.finished_at is not None
    assert before <= found.finished_at <= time.time()
    assert (found.step, found.policy_version) == (4, "1.4")
    assert (found.loss, found.grad_norm, found.learning_rate) == (0.25, 1.5, 1e-3)
    assert (found.tokens, found.trained_tokens, found.tokens_per_second) == (100, 6, 200.0)
    # 4 TFLOP in half a second, on two devices of 16 TFLOPS.
    assert found.mfu == pytest.approx(0.25)
    assert found.peak_tflops == 16.0
    # Groups of versions 1.0 and 1.1, trained by 1.3.
    assert found.staleness == {"2": 1, "3": 1}
    assert found.staleness_mean == 2.5
    assert found.rollout_logprob_diff_max == pytest.approx(0.1, abs=1e-6)
    assert set(found.ratio) == set(found.importance) == {"p01", "p50", "p99", "max"}
    assert found.memory_mb is not None
    assert found.memory_mb > 50


@pytest.mark.parametrize("done", [result(), result(count=0), result(flops=None), nothing()])
@pytest.mark.parametrize("groups", [2, 0])
def test_values_are_numbers_words_and_dicts_of_them(done: StepResult, groups: int) -> None:
    """A missing value is left out, and is not reported as null."""
    found = metrics(statistics(groups), done)
    values = found.values()
    assert "step" not in values
    assert None not in values.values()
    assert {} not in values.values()
    for name, value in values.items():
        flat = value.values() if isinstance(value, dict) else [value]
        assert all(isinstance(item, float | int | str) for item in flat), name
    assert ("kl_ref" in values, "mfu" in values) == (False, False)
    assert ("ratio" in values) == (len(done.token_stats.logprobs) > 0)


def test_step_metrics_are_nan_only_without_a_value() -> None:
    def not_numbers(found: StepMetrics) -> set[str]:
        return {name for name, value in found.values().items() if isinstance(value, float) and not math.isfinite(value)}

    assert not_numbers(metrics(statistics(), result())) == set()
    assert not_numbers(metrics(statistics(), nothing())) == {"loss", "grad_norm"}
    assert not_numbers(metrics(statistics(), result(loss=math.nan, skipped="the loss is nan"))) == {"loss"}
    of_groups = {"reward_mean", "reward_std", "staleness_mean", "completion_tokens_mean", "cut_off_share"}
    assert not_numbers(metrics(statistics(0), nothing())) == of_groups | {"loss", "grad_norm", "zero_advantage_share"}


def test_metrics_line_is_strict_json() -> None:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    row = json.loads(msgspec.json.encode(metrics(statistics(0), nothing())), parse_constant=refuse)
    assert row["loss"] is None
    assert row["skipped"] == "nothing is left of its groups to train on"
    assert (row["ratio"], row["importance"]) == ({}, {}), "dicts stay dicts if there is nothing to report"
    assert row["step"] == 4


def test_dropped_sequences_are_reported_by_reason() -> None:
    known = replace(statistics(), rejected={Reason.STALE: 2, Reason.REF_LOGPROBS: 1})
    assert metrics(known, result()).values()["rejected"] == {"stale": 2, "ref_logprobs": 1}
    assert "rejected" not in metrics(statistics(), result()).values()


def test_step_metrics_without_a_known_peak_have_no_mfu() -> None:
    assert metrics(statistics(), result()).mfu is None
    assert metrics(statistics(), nothing(), peak=16.0).mfu is None
    assert metrics(statistics(), result(flops=None), peak=16.0).mfu is None
    assert peak_of(CPU, None) is None
    assert peak_of(CPU, 3.5) == 3.5
    assert memory_mb(CPU) > 50
