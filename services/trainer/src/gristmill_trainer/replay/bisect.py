"""`gristmill bisect RUN --metric grad_norm --step 37`: the group and the sequence that cause the value of a metric.

The step is computed from the policy before it, again and again, each time without a part of its sequences. The search
halves the groups, and then the sequences of the group that is left: it keeps the half without which the metric is
closest to its usual value. A step of G groups of N sequences takes about 2 log2(G) + 2 log2(N) computations.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from gristmill_trainer.data.types import Sample
from gristmill_trainer.metrics import QUANTILES, StepResult, TokenMeasures, measure
from gristmill_trainer.replay.recorded import RecordedRun, ReplayError, check_step
from gristmill_trainer.replay.retrainer import Retrainer, recorded_training

_NEIGHBOURS = 10
"""Steps before and after the step whose median is the usual value."""


@dataclass(frozen=True)
class Cause:
    """A part of the step, and the metric of the step without it."""

    group_id: str
    sequence: int | None
    """Index in the group; None: the whole group."""
    without: float | None
    """The metric without the part; None if nothing is left without it."""

    @property
    def effect(self) -> str:
        return "nothing is left" if self.without is None else f"{self.without:.4g}"


@dataclass(frozen=True)
class Finding:
    metric: str
    step: int
    value: float
    """Of the whole step, computed here."""
    usual: float
    """Median of the metric over the neighbouring steps."""
    group: Cause
    sequence: Cause

    def report(self) -> list[str]:
        """Returns lines for a person."""
        return [
            f"{self.metric} of step {self.step} is {self.value:.4g}; its usual value is {self.usual:.4g}",
            f"without group {self.group.group_id}: {self.group.effect}",
            f"without sequence {self.sequence.sequence} of this group: {self.sequence.effect}",
        ]


def bisect(run: RecordedRun, metric: str, step: int, say: Callable[[str], None]) -> Finding:
    """Finds the group and the sequence of `step` without which the metric is closest to its usual value.

    `metric`: a metric of the loss, the gradient or the tokens, with a dot before a quantile: "ratio.max". Raises
    ReplayError for another metric, or if the step cannot be computed.
    """
    check_step("--step", step, 1, run.last_step)
    usual = _usual(run, metric, step)
    with recorded_training(run) as trainer:
        begun = trainer.begin(step - 1)
        say(f"computes step {step} from {f'the checkpoint of step {begun}' if begun else 'the first weights'}")
        for trained_step in trainer.steps(step - 1):
            say(f"step {trained_step.step}")
        trial = _Trial(trainer, step, metric)
        samples = trainer.prepare(step)[1].samples
        value = trial.value(samples)
        groups: dict[str, list[int]] = {}
        for number, sample in enumerate(samples):
            groups.setdefault(sample.group_id, []).append(number)
        if not groups:
            raise ReplayError("nothing_trained", f"step {step} trained on nothing", run=run.run_id, step=step)
        search = _Search(samples, usual, trial, say)
        worst = search.narrow(list(groups.values()))
        one = search.narrow([[number] for number in worst])
        first, found = samples[worst[0]], samples[one[0]]
        return Finding(
            metric,
            step,
            value,
            usual,
            Cause(first.group_id, None, search.without(worst)),
            Cause(found.group_id, found.sequence, search.without(one)),
        )


class _Trial:
    """Computes a step on some of its samples. Every computation begins with the same state of the training."""

    def __init__(self, trainer: Retrainer, step: int, metric: str) -> None:
        self._trainer, self._step, self._metric = trainer, step, metric
        self._weights = copy.deepcopy(trainer.learner.policy.model.state_dict())
        self._state = copy.deepcopy(trainer.state.state())

    def value(self, samples: Sequence[Sample]) -> float:
        result = self._trainer.learner.step(samples, self._step)
        # A loaded optimizer state is used and changed without a copy.
        self._trainer.learner.policy.model.load_state_dict(self._weights)
        self._trainer.state.load_state(copy.deepcopy(self._state))
        return _values(result)[self._metric]


@dataclass(frozen=True)
class _Search:
    samples: Sequence[Sample]
    usual: float
    trial: _Trial
    say: Callable[[str], None]

    def without(self, numbers: Sequence[int]) -> float | None:
        """Returns the metric of the step without these samples; None if no sample is left."""
        left_out = set(numbers)
        rest = [sample for number, sample in enumerate(self.samples) if number not in left_out]
        return self.trial.value(rest) if rest else None

    def narrow(self, parts: list[list[int]]) -> list[int]:
        """Returns the part without which the metric is closest to its usual value, by halving."""
        while len(parts) > 1:
            halves = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            values = [self.without([number for part in half for number in part]) for half in halves]
            distances = [self._distance(value) for value in values]
            parts = halves[distances.index(min(distances))]
            self.say(f"{len(halves[0])} + {len(halves[1])} parts: without the first {values[0]}, the last {values[1]}")
        return parts[0]

    def _distance(self, value: float | None) -> float:
        return math.inf if value is None or math.isnan(value) else abs(value - self.usual)


def _usual(run: RecordedRun, metric: str, step: int) -> float:
    """Returns the median of the metric over the neighbouring steps. Raises ReplayError for an unknown metric."""
    values = [
        value
        for row in run.folder.metrics()
        if row["step"] != step and abs(row["step"] - step) <= _NEIGHBOURS
        if (value := _of_row(row, metric)) is not None
    ]
    if metric not in _METRICS or not values:
        raise ReplayError(
            "metric_unknown",
            f"{metric!r} is not a metric that depends on single sequences, or no neighbour of step {step} has it; "
            f"choose one of {', '.join(sorted(_METRICS))}",
            metric=metric,
        )
    return statistics.median(values)


def _of_row(row: Mapping[str, object], metric: str) -> float | None:
    name, _, key = metric.partition(".")
    value = row.get(name)
    if isinstance(value, Mapping):
        value = value.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _values(result: StepResult) -> dict[str, float]:
    """Returns the metrics of a step that depend on single sequences, by name. A missing metric is NaN."""
    values = dict.fromkeys(_METRICS, math.nan) | {"loss": result.loss, "grad_norm": result.grad_norm}
    for name, value in asdict(measure(result.token_stats)).items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": float(part) for key, part in value.items()}
        elif value is not None:
            values[name] = float(value)
    return values


_WITH_QUANTILES = ("ratio", "importance")
_METRICS = frozenset(
    {
        "loss",
        "grad_norm",
        *(one.name for one in fields(TokenMeasures) if one.name not in _WITH_QUANTILES),
        *(f"{name}.{quantile}" for name in _WITH_QUANTILES for quantile in QUANTILES),
    }
)
"""Metrics that depend on single sequences."""
