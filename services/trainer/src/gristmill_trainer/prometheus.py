"""The trainer's metrics for Prometheus, derived from StepMetrics. docs/metrics.md explains each metric.

`EXPORTED` has one row per field of StepMetrics. A value that describes a step is a gauge with the value of the last
step. A number of things that a step did (tokens, seconds, rejected sequences) is a counter, because Prometheus asks
every few seconds and does not see every step.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gristmill import PolicyVersion
from gristmill.metrics import StepMetrics
from gristmill.tracking import ObserverErrors

_PREFIX: Final = "gristmill_trainer_"
_MOST_LABELS: Final = 64
"""Values of a label. A run chooses the names of its rewards."""


class Kind(StrEnum):
    """Type of a metric in Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    """Of a mapping from a number of steps to the count of groups."""


@dataclass(frozen=True)
class Exported:
    """A metric made of one field of StepMetrics. Without a value in a step, a gauge has no sample."""

    field: str
    name: str
    """Without prefix, and without the `_total` that Prometheus adds to a counter."""
    help: str
    kind: Kind = Kind.GAUGE
    label: str | None = None
    """Name of the label that holds the keys of a mapping."""
    convert: Callable[[Any], float] = float


def _count(value: object) -> float:
    return float(value is not None)


def _sum(counts: Mapping[str, int]) -> float:
    return float(sum(counts.values()))


def _incarnation(version: str) -> float:
    return float(PolicyVersion.parse(version).incarnation)


def _mega(value: float) -> float:
    return value * 1e6


def _tera(value: float) -> float:
    return value * 1e12


COUNTER, HISTOGRAM = Kind.COUNTER, Kind.HISTOGRAM
EXPORTED: Final = (
    Exported("step", "step", "Optimizer steps done"),
    Exported("policy_version", "incarnation", "Incarnation in the policy version", convert=_incarnation),
    Exported("reward_mean", "reward_mean", "Mean reward of the rollouts of the last step"),
    Exported("reward_std", "reward_std", "Standard deviation of the reward over the rollouts of the last step"),
    Exported("reward_parts", "reward_part_mean", "Mean of each reward in the last step", label="reward"),
    Exported("loss", "loss", "Loss of the last step"),
    Exported("grad_norm", "grad_norm", "Global L2 norm of the gradient before clipping"),
    Exported("learning_rate", "learning_rate", "Learning rate of the last step"),
    Exported("skipped", "skipped_steps", "Steps that changed no weights", COUNTER, convert=_count),
    Exported("updates_left_out", "updates_left_out", "Updates whose loss or gradient was not finite", COUNTER),
    Exported("token_budget_halved", "token_budget_halved", "Times that an update ran out of memory", COUNTER),
    Exported("staleness_mean", "staleness_steps_mean", "Mean staleness of the groups of the last step, in steps"),
    Exported("staleness", "staleness_steps", "Trained groups by staleness in steps", HISTOGRAM),
    Exported("completion_tokens_mean", "completion_tokens_mean", "Mean tokens per completion in the last step"),
    Exported("cut_off_share", "cut_off_share", "Share of completions that ended at max_tokens"),
    Exported("zero_advantage_share", "zero_advantage_share", "Share of groups whose advantages are all 0"),
    Exported("rejected", "rejected", "Rejected sequences and groups by reason", COUNTER, label="reason"),
    Exported("seq_len_cuts", "seq_len_cuts", "Sequences that lost their tail to seq_len", COUNTER),
    Exported("overlong_filtered", "overlong_filtered", "Truncated sequences that were not trained on", COUNTER),
    Exported("overlong_punished", "overlong_punished", "Sequences with a lowered reward for their length", COUNTER),
    Exported("advantages_zeroed", "advantages_zeroed", "Sequences whose advantage an override set to 0", COUNTER),
    Exported("unknown_overrides", "unknown_overrides", "Unknown overrides of groups", COUNTER, convert=_sum),
    Exported("rollout_logprob_diff_mean", "rollout_logprob_diff_mean", "Mean |trainer's - server's log-probability|"),
    Exported("rollout_logprob_diff_max", "rollout_logprob_diff_max", "Maximum of that difference in the last step"),
    Exported("receipts", "receipts", "Receipts of model servers by state", COUNTER, label="state"),
    Exported("receipt_difference", "receipt_difference", "Largest difference of the last receipts, in nats"),
    Exported("receipt_change", "receipt_change", "Smallest change of a server's answers to the probes, in nats"),
    Exported("receipt_seconds", "receipt_seconds", "Longest time that a server took to answer the probes"),
    Exported("kl_rollout", "kl_rollout", "KL(rollout policy || trainer's policy before the step), in nats per token"),
    Exported("kl_ref", "kl_ref", "KL(policy || reference model), in nats per token"),
    Exported("entropy_mean", "entropy_nats_mean", "Entropy of the policy, in nats per trained token"),
    Exported("logprob_mean", "logprob_mean", "Mean log-probability of trained tokens"),
    Exported("pos_logp", "pos_logp", "The same for tokens with a positive advantage"),
    Exported("neg_logp", "neg_logp", "The same for tokens with a negative advantage"),
    Exported("ratio", "ratio", "Quantiles of the policy ratio", label="statistic"),
    Exported("clip_low_share", "clip_low_share", "Share of trained tokens that the lower clip stopped"),
    Exported("clip_high_share", "clip_high_share", "Share of trained tokens that the upper clip stopped"),
    Exported("importance", "importance", "Quantiles of the importance weight before its cap", label="statistic"),
    Exported("importance_capped_share", "importance_capped_share", "Share of trained tokens out of the bounds"),
    Exported("tokens", "tokens", "Tokens that the model processed in training, prompts included", COUNTER),
    Exported("trained_tokens", "trained_tokens", "Tokens that the loss counted", COUNTER),
    Exported("seconds", "phase_seconds", "Wall time by phase of the loop", COUNTER, label="phase"),
    Exported("finished_at", "last_step_timestamp_seconds", "Unix time of the last step's end, or the trainer's start"),
    Exported("tokens_per_second", "tokens_per_second", "Tokens per second of the train phase of the last step"),
    Exported("mfu", "mfu", "Model FLOPs utilisation of the train phase, 0 to 1"),
    Exported("peak_tflops", "peak_flops", "Peak FLOPs per second and device that mfu assumes", convert=_tera),
    Exported("memory_mb", "memory_bytes", "Peak memory: of the device on CUDA, else resident", convert=_mega),
)  # fmt: skip
_BUCKETS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Upper bounds of the histogram, in steps; a last bucket has no bound."""


class StepCollector(Collector):
    """Holds the last step's values and the sums over all steps of this process."""

    def __init__(
        self,
        run_id: str,
        training_steps: int,
        first_step: int,
        errors: ObserverErrors,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`first_step`: steps done before this process. `errors`: the errors of all observers. `clock`: Unix time."""
        self._run = run_id
        self._steps = training_steps
        self._errors = errors
        self._lock = threading.Lock()
        """A scrape runs in a thread and must not see half of a step."""
        self._values: dict[str, dict[str, float]] = {"step": {"": float(first_step)}, "finished_at": {"": clock()}}
        """Value by label, by field. The label is "" in a metric without one."""
        self._sums: dict[str, defaultdict[str, float]] = {
            row.field: defaultdict(float, {} if row.label else {"": 0.0}) for row in EXPORTED if row.kind is COUNTER
        }
        """Sums over all steps, in the same form."""
        self._buckets: dict[str, list[float]] = {
            row.field: [0.0] * (len(_BUCKETS) + 1) for row in EXPORTED if row.kind is HISTOGRAM
        }
        self._bucket_sums: defaultdict[str, float] = defaultdict(float)

    def register(self, registry: CollectorRegistry) -> Self:
        """Adds the metrics to `registry`."""
        registry.register(self)
        return self

    def step(self, metrics: StepMetrics) -> None:
        """Takes the values of a finished step."""
        found = {
            row.field: _by_label(row, getattr(metrics, row.field)) for row in EXPORTED if row.kind is not HISTOGRAM
        }
        with self._lock:
            self._values = found
            for field, sums in self._sums.items():
                for label, value in found[field].items():
                    if label in sums or len(sums) < _MOST_LABELS:
                        sums[label] += value
            for field, buckets in self._buckets.items():
                for value, count in getattr(metrics, field).items():
                    buckets[bisect_left(_BUCKETS, float(value))] += count
                    self._bucket_sums[field] += float(value) * count

    def close(self) -> None:
        """Keeps the values: the page of the process is still served."""

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            values = self._values
            sums = {field: dict(of_field) for field, of_field in self._sums.items()}
            histograms = {field: (list(counts), self._bucket_sums[field]) for field, counts in self._buckets.items()}
        for row in EXPORTED:
            if row.kind is HISTOGRAM:
                counts, whole = histograms[row.field]
                buckets = list(zip([*map(str, _BUCKETS), "+Inf"], accumulate(counts), strict=True))
                histogram = HistogramMetricFamily(_PREFIX + row.name, row.help, labels=["run"])
                histogram.add_metric([self._run], buckets, whole)
                yield histogram
                continue
            counter = row.kind is COUNTER
            kind = CounterMetricFamily if counter else GaugeMetricFamily
            labels = ["run"] if row.label is None else ["run", row.label]
            metric = kind(_PREFIX + row.name, row.help, labels=labels)
            for label, value in (sums[row.field] if counter else values.get(row.field, {})).items():
                metric.add_metric([self._run] if row.label is None else [self._run, label], value)
            yield metric
        gauge = GaugeMetricFamily(f"{_PREFIX}training_steps", "Optimizer steps of the whole run", labels=["run"])
        gauge.add_metric([self._run], self._steps)
        yield gauge
        failed = CounterMetricFamily(
            f"{_PREFIX}observer_errors",
            "Errors of observers (W&B, TensorBoard, Prometheus); training continues without them",
            labels=["run", "observer"],
        )
        for observer, count in dict(self._errors.counts).items():
            failed.add_metric([self._run, observer], count)
        yield failed


def _by_label(row: Exported, value: Any) -> dict[str, float]:
    """Returns the field's numbers by label; {} for a gauge without a value."""
    if row.label is not None:
        return {str(key): float(number) for key, number in list(value.items())[:_MOST_LABELS]}
    if value is None and row.kind is Kind.GAUGE:
        return {}
    return {"": row.convert(value)}
