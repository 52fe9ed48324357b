"""The trainer's metrics for Prometheus, read from the registry after steps."""

from __future__ import annotations

import math
import threading

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.trainer.test_metrics import metrics, nothing, result, statistics

from gristmill.internal.metrics import FIELDS, Kind, StepMetrics
from gristmill.internal.receipts import Receipt, ReceiptState
from gristmill.internal.tracking import ObserverErrors
from gristmill_trainer.prometheus import StepCollector
from gristmill_trainer.receipts.receipts import receipt_metrics

STEP: StepMetrics = metrics(statistics(), result(), devices=2, peak=16.0)
"""Step 4, with a value in every field except kl_ref, skipped and the fields of receipts."""


class Made:
    def __init__(self, first_step: int = 3) -> None:
        self.now = 1000.0
        self.registry = CollectorRegistry()
        self.errors = ObserverErrors()
        self.collector = StepCollector("sums", 20, first_step, self.errors, clock=lambda: self.now)
        self.collector.register(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        """Returns the value of `gristmill_trainer_NAME`."""
        return self.registry.get_sample_value(f"gristmill_trainer_{name}", {"run": "sums", **labels})


@pytest.fixture
def made() -> Made:
    return Made()


def test_before_the_first_step_the_page_has_the_step_and_counters_at_zero(made: Made) -> None:
    assert (made.value("step"), made.value("training_steps")) == (3, 20)
    assert made.value("last_step_timestamp_seconds") == 1000
    assert made.value("tokens_total") == 0
    assert made.value("skipped_steps_total") == 0
    assert made.value("reward_mean") is None, "a value that does not exist is not 0"


def test_gauges_have_the_values_of_the_last_step(made: Made) -> None:
    made.collector.step(replace_fields(STEP, reward_mean=0.25))
    made.collector.step(replace_fields(STEP, finished_at=1010.0))
    assert made.value("step") == 4
    assert made.value("incarnation") == 1
    assert made.value("reward_mean") == STEP.reward_mean
    assert made.value("ratio", statistic="p99") == STEP.ratio["p99"]
    assert made.value("last_step_timestamp_seconds") == 1010


def test_metrics_use_base_units(made: Made) -> None:
    made.collector.step(STEP)
    assert STEP.memory_mb is not None
    assert made.value("memory_bytes") == STEP.memory_mb * 1e6
    assert made.value("peak_flops") == 16e12
    assert made.value("phase_seconds_total", phase="train") == 0.5


def test_counters_sum_over_steps_between_two_scrapes(made: Made) -> None:
    for _ in range(3):
        made.collector.step(replace_fields(STEP, rejected={"stale": 2}, unknown_overrides={"a": 1, "b": 2}))
    assert made.value("tokens_total") == 300
    assert made.value("phase_seconds_total", phase="wait") == 3.0
    assert made.value("rejected_total", reason="stale") == 6
    assert made.value("unknown_overrides_total") == 9
    assert made.value("skipped_steps_total") == 0


def test_skipped_step_is_counted_without_its_reason_as_a_label(made: Made) -> None:
    made.collector.step(metrics(statistics(0), nothing()))
    assert made.value("skipped_steps_total") == 1
    loss = made.value("loss")
    assert loss is not None
    assert math.isnan(loss)
    assert b"nothing is left" not in generate_latest(made.registry)


def test_value_that_a_step_lacks_disappears(made: Made) -> None:
    made.collector.step(STEP)
    assert made.value("entropy_nats_mean") is not None
    made.collector.step(replace_fields(STEP, entropy_mean=None, ratio={}))
    assert made.value("entropy_nats_mean") is None
    assert made.value("ratio", statistic="p99") is None


def test_staleness_is_a_histogram_of_groups(made: Made) -> None:
    made.collector.step(replace_fields(STEP, staleness={"0": 3, "2": 1}))
    made.collector.step(replace_fields(STEP, staleness={"40": 1, "2": 1}))
    buckets = [made.value("staleness_steps_bucket", le=le) for le in ("0.0", "1.0", "2.0", "32.0", "+Inf")]
    assert buckets == [3, 3, 5, 5, 6]
    assert (made.value("staleness_steps_count"), made.value("staleness_steps_sum")) == (6, 44)


def test_labels_that_a_run_chooses_are_bounded(made: Made) -> None:
    for number in range(100):
        many = {f"part{number}-{part}": 1.0 for part in range(100)}
        made.collector.step(replace_fields(STEP, reward_parts=many, rejected={f"reason{number}": 1}))
    for family in made.registry.collect():
        assert len(family.samples) <= 64, family.name


def test_every_field_with_a_value_has_a_sample(made: Made) -> None:
    receipt = Receipt(
        step=1, version="1.1", server="s", state=ReceiptState.OK, difference=1e-6, bound=1e-5, change=0.01, seconds=0.02
    )  # fmt: skip
    receipts = receipt_metrics([receipt, receipt])
    made.collector.step(replace_fields(STEP, kl_ref=0.1, rejected={"stale": 1}, **receipts))
    empty = {family.name for family in made.registry.collect() if not family.samples}
    assert empty == {"gristmill_trainer_observer_errors"}


def test_observer_errors_are_counted_by_observer(made: Made) -> None:
    with made.errors.of("W&B"):
        raise RuntimeError("away")
    assert made.value("observer_errors_total", observer="W&B") == 1


def test_scrape_never_sees_half_of_a_step(made: Made) -> None:
    """Each step adds as many seconds as tokens. A scrape between both would see a difference."""
    same = replace_fields(STEP, tokens=7, seconds={"train": 7.0})
    done = threading.Event()

    def train() -> None:
        while not done.is_set():
            made.collector.step(same)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(200):
            found = {sample.name: sample.value for family in made.registry.collect() for sample in family.samples}
            tokens = found["gristmill_trainer_tokens_total"]
            assert tokens == found.get("gristmill_trainer_phase_seconds_total", 0.0)
    finally:
        done.set()
        thread.join()


def test_names_of_counters_get_their_suffix_from_prometheus() -> None:
    assert not [row.field for row in FIELDS if (row.name or row.field).endswith("_total")]
    assert {row.field for row in FIELDS if row.kind is Kind.HISTOGRAM} == {"staleness"}


def replace_fields(step: StepMetrics, **fields: object) -> StepMetrics:
    return msgspec.structs.replace(step, **fields)
