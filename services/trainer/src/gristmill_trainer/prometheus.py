"""The trainer's metrics for Prometheus, made of StepMetrics by the table gristmill.internal.metrics.FIELDS."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gristmill import PolicyVersion
from gristmill.internal.metrics import COUNTER, FIELDS, HISTOGRAM, PREFIX, Field, Kind, StepMetrics
from gristmill.internal.prometheus import Exported
from gristmill.internal.tracking import ObserverErrors

_MOST_LABELS: Final = 64
"""Values of a label. A run chooses the names of its rewards."""


OF_STEPS: Final = [
    Exported(row.exported.removesuffix("_total"), row.meaning, row.kind, ("run", row.label) if row.label else ("run",))
    for row in FIELDS
]
OTHERS: Final = (
    Exported(f"{PREFIX}training_steps", "optimizer steps of the whole run", labels=("run",)),
    Exported(
        f"{PREFIX}observer_errors",
        "errors of W&B, TensorBoard or this page. Training continues without them; the log has the error",
        COUNTER,
        ("run", "observer"),
    ),
)
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
            row.field: defaultdict(float, {} if row.label else {"": 0.0}) for row in FIELDS if row.kind is COUNTER
        }
        self._buckets: dict[str, list[float]] = {
            row.field: [0.0] * (len(_BUCKETS) + 1) for row in FIELDS if row.kind is HISTOGRAM
        }
        self._bucket_sums: defaultdict[str, float] = defaultdict(float)

    def register(self, registry: CollectorRegistry) -> Self:
        registry.register(self)
        return self

    def step(self, metrics: StepMetrics) -> None:
        values = {row.field: _by_label(row, getattr(metrics, row.field)) for row in FIELDS if row.kind is not HISTOGRAM}
        with self._lock:
            self._values = values
            for field, sums in self._sums.items():
                for label, value in values[field].items():
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
        for field, row in zip(FIELDS, OF_STEPS, strict=True):
            if field.kind is HISTOGRAM:
                counts, whole = histograms[field.field]
                buckets = list(zip([*map(str, _BUCKETS), "+Inf"], accumulate(counts), strict=True))
                yield row.family([([self._run], (buckets, whole))])
                continue
            found = (sums if field.kind is COUNTER else values).get(field.field, {})
            yield row.family(([self._run, label][: len(row.labels)], value) for label, value in found.items())
        steps, errors = OTHERS
        yield steps.family([([self._run], self._steps)])
        yield errors.family(([self._run, observer], count) for observer, count in dict(self._errors.counts).items())


def _by_label(row: Field, value: Any) -> dict[str, float]:
    """Returns the field's numbers by label; {} for a gauge without a value."""
    if row.label is not None:
        return {str(key): float(number) for key, number in list(value.items())[:_MOST_LABELS]}
    if row.kind is Kind.GAUGE:
        if isinstance(value, str):
            value = PolicyVersion.parse(value).incarnation
        return {} if value is None else {"": value * row.scale}
    if isinstance(value, Mapping):
        return {"": float(sum(value.values()))}
    return {"": float(value) if isinstance(value, int | float) else float(value is not None)}
