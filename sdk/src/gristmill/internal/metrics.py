"""The trainer's metrics: one JSON object per step in metrics.jsonl in the run folder.

FIELDS is the table of the fields. W&B, TensorBoard and the page use their names; Prometheus and docs/metrics.md also
their kinds, units and meanings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

METRICS_FILE = "metrics.jsonl"
MAX_TEXT: Final = 256
"""Characters of a text in a row of metrics that the API takes. The file has whole texts."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one optimizer step. Field names are the metric names in the file, the display and the trackers.

    FIELDS has their meanings. Metrics of rewards and lengths count a rollout with branches once.
    """

    step: int
    policy_version: str
    reward_mean: float
    reward_std: float
    loss: float
    grad_norm: float
    staleness_mean: float
    completion_tokens_mean: float
    rollout_logprob_diff_mean: float
    rollout_logprob_diff_max: float
    tokens: int
    trained_tokens: int = 0
    seconds: dict[str, float]
    finished_at: float | None = None
    learning_rate: float = 0.0
    skipped: str | None = None
    updates_left_out: int = 0
    token_budget_halved: int = 0
    reward_parts: dict[str, float] = msgspec.field(default_factory=dict)
    source_rewards: dict[str, float] = msgspec.field(default_factory=dict)
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    staleness: dict[str, int] = msgspec.field(default_factory=dict)
    zero_advantage_share: float = 0.0
    cut_off_share: float = 0.0
    seq_len_cuts: int = 0
    overlong_filtered: int = 0
    overlong_punished: int = 0
    advantages_zeroed: int = 0
    unknown_overrides: dict[str, int] = msgspec.field(default_factory=dict)
    entropy_mean: float | None = None
    logprob_mean: float | None = None
    pos_logp: float | None = None
    neg_logp: float | None = None
    kl_rollout: float | None = None
    kl_ref: float | None = None
    ratio: dict[str, float] = msgspec.field(default_factory=dict)
    clip_low_share: float | None = None
    clip_high_share: float | None = None
    importance: dict[str, float] = msgspec.field(default_factory=dict)
    importance_capped_share: float | None = None
    receipts: dict[str, int] = msgspec.field(default_factory=dict)
    receipt_difference: float | None = None
    receipt_change: float | None = None
    receipt_seconds: float | None = None
    tokens_per_second: float = 0.0
    mfu: float | None = None
    peak_tflops: float | None = None
    memory_mb: float | None = None

    def values(self) -> dict[str, Any]:
        """Returns the metrics by name, without the step and without empty values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        del values["step"]
        return {name: value for name, value in values.items() if value is not None and value != {}}


class Kind(StrEnum):
    """Type of a metric in Prometheus."""

    GAUGE = "gauge"
    """Of the last step. Without a value in a step, it has no sample."""
    COUNTER = "counter"
    """Sum over all steps, because Prometheus asks every few seconds and does not see every step."""
    HISTOGRAM = "histogram"
    """Of a mapping from a number of steps to the count of groups."""


class Field(NamedTuple):
    """One field of StepMetrics, as Prometheus and docs/metrics.md show it."""

    field: str
    meaning: str
    kind: Kind = Kind.GAUGE
    name: str = ""
    """In Prometheus, if it differs: without prefix, and without the `_total` of a counter."""
    label: str | None = None
    """Name of the label that holds the keys of a mapping. Without it, a counter adds the values up."""
    scale: float = 1.0
    """Factor from the field's unit to the unit in Prometheus."""

    @property
    def exported(self) -> str:
        """The name in Prometheus, with prefix and `_total`."""
        return f"{PREFIX}{self.name or self.field}" + ("_total" if self.kind is Kind.COUNTER else "")


PREFIX: Final = "gristmill_trainer_"
COUNTER, HISTOGRAM = Kind.COUNTER, Kind.HISTOGRAM
FIELDS: Final = (
    Field("step", "optimizer steps done"),
    Field("policy_version", "label of the weights that the step produced, INCARNATION.STEP. The incarnation rises when "
        "a trainer takes the run", name="incarnation"),
    Field("reward_mean", "mean reward over all rollouts of the step, before length penalties"),
    Field("reward_std", "standard deviation of the reward over all rollouts of the step"),
    Field("loss", "loss of the step. Its height is not a quality: advantages have mean 0, so the loss is near 0"),
    Field("grad_norm", "global L2 norm of the gradient before clipping"),
    Field("staleness_mean", "steps between the weights that sampled a group's oldest token and the trained weights; "
        "mean over groups", name="staleness_steps_mean"),
    Field("completion_tokens_mean", "mean tokens per completion"),
    Field("rollout_logprob_diff_mean", "mean absolute difference of the trainer's and the model server's "
        "log-probability over sampled tokens. On policy it is rounding"),
    Field("rollout_logprob_diff_max", "the maximum of these differences"),
    Field("tokens", "tokens that the model processed in training, prompts included, once per epoch of `num_epochs`",
        COUNTER),
    Field("trained_tokens", "tokens that the loss counted", COUNTER),
    Field("seconds", "wall time by phase since the previous row: `wait` for groups, `pack`, `train`; `checkpoint` and "
        "`publish` of the previous step. In one process, `checkpoint` is the copy of the state and the wait for a "
        "checkpoint that is still being written", COUNTER, name="phase_seconds", label="phase"),
    Field("finished_at", "Unix time of the step's end; in Prometheus before the first step, of the trainer's start",
        name="last_step_timestamp_seconds"),
    Field("learning_rate", "learning rate of the step"),
    Field("skipped", "reason why the step changed no weights: loss or gradient was not finite, or no group was left to "
        "train on; in Prometheus the number of such steps", COUNTER, name="skipped_steps"),
    Field("updates_left_out", "updates of the step whose loss or gradient was not finite, or of which a sequence did "
        "not fit in memory", COUNTER),
    Field("token_budget_halved", "how often an update ran out of memory and was repeated with half the tokens per "
        "micro-batch. Its result is the same", COUNTER),
    Field("reward_parts", "mean of each reward before its weight, over the rollouts that it did not skip",
        name="reward_part_mean", label="reward"),
    Field("source_rewards", "mean reward of each source of a run with `sources`", name="source_reward_mean",
        label="source"),
    Field("rejected", "rejected sequences and groups by reason (docs/trainer.md, 'Dropped data'). A rejected group "
        "counts once", COUNTER, label="reason"),
    Field("staleness", "groups by staleness in steps; in Prometheus a histogram", HISTOGRAM, name="staleness_steps"),
    Field("zero_advantage_share", "share of groups whose advantages are all 0: every completion scored the same"),
    Field("cut_off_share", "share of completions that ended at `max_tokens`"),
    Field("seq_len_cuts", "sequences that lost their tail to `seq_len`", COUNTER),
    Field("overlong_filtered", "truncated sequences that were not trained on (`overlong: filter`)", COUNTER),
    Field("overlong_punished", "sequences whose reward the soft length penalty lowered", COUNTER),
    Field("advantages_zeroed", "sequences whose advantage an override of their group set to 0", COUNTER),
    Field("unknown_overrides", "overrides without an effect, by key; in Prometheus their sum", COUNTER),
    Field("entropy_mean", "entropy of the policy, in nats per trained token", name="entropy_nats_mean"),
    Field("logprob_mean", "mean log-probability of trained tokens"),
    Field("pos_logp", "mean log-probability of trained tokens with a positive advantage"),
    Field("neg_logp", "mean log-probability of trained tokens with a negative advantage"),
    Field("kl_rollout", "KL(rollout policy ‖ trainer's policy before the step), in nats per token: mean of e^d - d - 1 "
        "over the difference d of their log-probabilities (k3 of Schulman 2020)"),
    Field("kl_ref", "KL(policy ‖ reference), as `kl_rollout`, in nats per token, with `kl_beta` above 0"),
    Field("ratio", "p01, p50, p99 and max of the policy ratio, per token or per sequence", label="statistic"),
    Field("clip_low_share", "share of trained tokens that the lower clip stopped"),
    Field("clip_high_share", "share of trained tokens that the upper clip stopped"),
    Field("importance", "p01, p50, p99 and max of the importance weight against the rollout policy before its cap, per "
        "token or per sequence", label="statistic"),
    Field("importance_capped_share", "share of trained tokens whose importance weight is above the cap or below the "
        "floor"),
    Field("receipts", "receipts of model servers since the row before, by state: `ok`, `failed`, `unproven` "
        "(docs/reproduce.md)", COUNTER, label="state"),
    Field("receipt_difference", "largest root mean square, over these receipts, of the server's log-probabilities of "
        "the probes minus the trainer's, in nats"),
    Field("receipt_change", "smallest root mean square of the change of these answers by one step, in nats"),
    Field("receipt_seconds", "longest time that a server took to answer the probes, while the environment samples; "
        "part of `seconds.publish`"),
    Field("tokens_per_second", "`tokens` per second of the train phase"),
    Field("mfu", "model FLOPs utilisation of the train phase, 0 to 1 (docs/trainer.md, 'Memory and speed'). No value "
        "if the peak is unknown"),
    Field("peak_tflops", "the peak per device that `mfu` assumes, in TFLOPS; in Prometheus FLOPs per second",
        name="peak_flops", scale=1e12),
    Field("memory_mb", "peak memory in MB (in Prometheus bytes): on CUDA of the device in this step, else of the "
        "process so far", name="memory_bytes", scale=1e6),
)  # fmt: skip


def number(value: Any) -> float | None:
    """Returns a finite number as a float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a third party's row without the values that are not of the type of their field in StepMetrics.

    Fields that StepMetrics does not have stay as they are.
    """
    return {name: value for name, value in row.items() if name not in _TYPES or _fits(value, _TYPES[name])}


def _fits(value: Any, kind: str) -> bool:
    if kind == "numbers":
        return isinstance(value, Mapping) and all(one is not None and _fits(one, "number") for one in value.values())
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
    seconds = sum(number(value) or 0.0 for row in timed for value in row["seconds"].values())
    if seconds <= 0:
        return None
    return Pace(seconds / len(timed), sum(number(row.get("tokens")) or 0.0 for row in timed) / seconds)
