"""The trainer's metrics: one JSON object per step in metrics.jsonl in the run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

METRICS_FILE = "metrics.jsonl"


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one optimizer step. Field names are the metric names in the file, the display and the trackers."""

    step: int
    """Number of this optimizer step, 1 for the first."""
    policy_version: str
    """Label of the weights that this step produced ("1.20")."""
    reward_mean: float
    reward_std: float
    """Mean and standard deviation of the reward are over all sequences of the step. Here and in `reward_parts`,
    `completion_tokens_mean`, `cut_off_share` and `overlong_*`, a rollout with branches counts as one sequence."""
    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    staleness_mean: float
    """Steps between the weights that sampled a group's oldest token and the trained weights; mean over groups."""
    completion_tokens_mean: float
    rollout_logprob_diff_mean: float
    rollout_logprob_diff_max: float
    """|log-probability by the trainer - by the model server| on sampled tokens. On policy the difference is rounding
    error. A larger difference means wrong tokens, masks, temperature or weights."""
    tokens: int
    """Tokens that the step's updates put through the model, prompts included. Each of num_epochs counts them again."""
    trained_tokens: int = 0
    """Tokens that the loss counts."""
    seconds: dict[str, float]
    """Wall time by phase since the previous row: checkpoint and publish (of the previous step), wait, pack, train."""
    finished_at: float | None = None
    """Unix time at which the step ended. None in the rows of older trainers."""
    learning_rate: float = 0.0
    skipped: str | None = None
    """Reason why the step changed no weights: loss or gradient was not finite, or no group was left to train on."""
    updates_left_out: int = 0
    """Number of the step's updates with a non-finite loss or gradient, or a sequence that memory cannot hold."""
    token_budget_halved: int = 0
    """How often the trainer halved the tokens per micro-batch in the step, because the memory ran out."""
    reward_parts: dict[str, float] = msgspec.field(default_factory=dict)
    """Mean of each reward, over the sequences that it did not skip."""
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    """Rejected sequences and whole groups by reason. A rejected group counts once."""
    staleness: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of groups by staleness in steps."""
    zero_advantage_share: float = 0.0
    """Share of groups whose advantages are all 0, so that they teach nothing."""
    cut_off_share: float = 0.0
    """Share of completions that ended at max_tokens."""
    seq_len_cuts: int = 0
    """Sequences that lost their tail to seq_len."""
    overlong_filtered: int = 0
    """Cut-off sequences that were not trained on. `overlong_punished`: sequences whose reward was lowered."""
    overlong_punished: int = 0
    advantages_zeroed: int = 0
    """Sequences whose advantage an override of their group set to 0."""
    unknown_overrides: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of unknown overrides of groups, by key."""
    entropy_mean: float | None = None
    """Entropy of the policy, in nats per trained token."""
    logprob_mean: float | None = None
    """Mean log-probability of trained tokens under the policy. `pos_logp` and `neg_logp`: the same for tokens with a
    positive and with a negative advantage. Tokens with advantage 0 are in neither."""
    pos_logp: float | None = None
    neg_logp: float | None = None
    kl_rollout: float | None = None
    """KL(rollout policy || trainer's policy before the step). The estimate is the mean of e^d - d - 1 over trained
    tokens. d is the difference of their log-probabilities (k3 of Schulman 2020)."""
    kl_ref: float | None = None
    """KL(policy || reference model), with the same estimate."""
    ratio: dict[str, float] = msgspec.field(default_factory=dict)
    """Quantiles (p01, p50, p99, max) of the policy ratio over trained tokens. The objective decides whether it is the
    token's ratio or its sequence's ratio."""
    clip_low_share: float | None = None
    """Share of trained tokens whose ratio the objective's lower clip stopped. `clip_high_share`: the upper clip."""
    clip_high_share: float | None = None
    importance: dict[str, float] = msgspec.field(default_factory=dict)
    """Quantiles of the importance weight against the rollout policy before its cap, per token or per sequence."""
    importance_capped_share: float | None = None
    """Share of trained tokens whose importance weight is above the cap."""
    receipts: dict[str, int] = msgspec.field(default_factory=dict)
    """Receipts of model servers since the previous row, by state: ok, failed, unproven (docs/reproduce.md). They are of
    the publication before the step."""
    receipt_difference: float | None = None
    """Largest difference of these receipts: root mean square of the server's log-probabilities of the probes minus the
    trainer's, in nats."""
    receipt_change: float | None = None
    """Smallest change of a server's answers since its receipt before, in nats."""
    receipt_seconds: float | None = None
    """Longest time that a server took to answer the probes. It is part of `seconds.publish`."""
    tokens_per_second: float = 0.0
    """Trained and prompt tokens per second of the train phase."""
    mfu: float | None = None
    """Model FLOPs utilisation of the train phase: model FLOPs / (seconds x peak x devices). None if the peak is
    unknown."""
    peak_tflops: float | None = None
    """The peak TFLOPS per device that `mfu` assumes."""
    memory_mb: float | None = None
    """Peak memory in MB: on CUDA the device memory of this step, else the resident memory of the process so far."""

    def values(self) -> dict[str, Any]:
        """Returns the metrics by name, without the step and without empty values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        del values["step"]
        return {name: value for name, value in values.items() if value is not None and value != {}}


def number(value: Any) -> float | None:
    """Returns a finite number as a float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row that somebody else wrote without the values that are not of the type of their field in StepMetrics.

    Fields that StepMetrics does not have stay as they are.
    """
    return {name: value for name, value in row.items() if name not in _TYPES or _fits(value, _TYPES[name])}


def _fits(value: Any, kind: str) -> bool:
    if kind == "numbers":
        return isinstance(value, Mapping) and all(_fits(one, "number") for one in value.values())
    if kind == "text":
        return value is None or isinstance(value, str)
    return value is None or isinstance(value, float) or number(value) is not None  # NaN is a sign of trouble: it stays


_TYPES: Final = {
    name: "numbers" if "dict" in str(kind) else "text" if "str" in str(kind) else "number"
    for name, kind in get_type_hints(StepMetrics).items()
}


class Pace(NamedTuple):
    """Speed of a run over its last steps."""

    seconds_per_step: float
    tokens_per_second: float
    """Tokens that the updates put through the model, per second of wall time. Waiting for groups counts."""


_PACE_STEPS = 10
"""Steps over which the speed is measured."""


def pace(rows: Sequence[Mapping[str, Any]]) -> Pace | None:
    """Returns the speed over the last ten steps, or None without a row that has times. `rows`: in order of steps."""
    timed = [row for row in rows[-_PACE_STEPS:] if isinstance(row.get("seconds"), Mapping)]
    seconds = sum(float(value) for row in timed for value in row["seconds"].values())
    if seconds <= 0:
        return None
    return Pace(seconds / len(timed), sum(float(row.get("tokens", 0)) for row in timed) / seconds)
