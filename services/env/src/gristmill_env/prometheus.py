"""The metrics of one environment process for Prometheus. docs/metrics.md explains each metric.

Events of the serve loop increase counters. Loads and states are read from the objects that have them at each scrape.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gristmill import PermitSession
from gristmill.tracking import ObserverErrors
from gristmill_env.errors import DropReason
from gristmill_env.inference import ModelServers
from gristmill_env.inference.failover import Endpoint, EndpointState
from gristmill_env.tracking import ScoredPrompt

SUBMITTED: Final = "submitted"
_RECENT: Final = 64
"""Scored prompts over which the means of the rewards are taken."""
_MOST_LABELS: Final = 64
"""Values of a label whose values a run chooses: its rewards, and the results of its evaluations."""
_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_FINISH_REASONS: Final = frozenset({"stop", "length"})


class EnvMetrics:
    """Counts the events of a run in `registry`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        run_id: str,
        permits: PermitSession,
        servers: ModelServers,
        errors: ObserverErrors,
    ) -> None:
        """`errors`: the errors of all observers of this process."""
        self._run = run_id
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._groups = Counter(
            "gristmill_env_groups",
            "Finished rows by outcome: submitted, or the reason why the row was dropped",
            ["run", "outcome"],
            registry=registry,
        )
        for outcome in (SUBMITTED, *DropReason):  # a counter that starts at 1 has no rate for its first event
            self._groups.labels(run_id, str(outcome))
        self._completions = Counter(
            "gristmill_env_completions",
            "Scored completions by finish reason: stop, length (truncated at max_tokens) or other",
            ["run", "finish_reason"],
            registry=registry,
        )
        self._tokens = Counter(
            "gristmill_env_completion_tokens", "Sampled tokens of scored completions", ["run"], registry=registry
        ).labels(run_id)
        self._unscored = Counter(
            "gristmill_env_unscored_completions",
            "Completions without a score, because a reward failed or no reward returned a value",
            ["run"],
            registry=registry,
        ).labels(run_id)
        self._failed_rollouts = Counter(
            "gristmill_env_failed_rollouts",
            "Rollouts that failed after their retries and were left out of their groups",
            ["run"],
            registry=registry,
        ).labels(run_id)
        self._failures = Counter(
            "gristmill_env_reward_failures",
            "Completions on which a reward failed",
            ["run", "reward"],
            registry=registry,
        )
        self._seconds = Histogram(
            "gristmill_env_prompt_seconds",
            "Time per prompt, from the first request to the last score",
            ["run"],
            buckets=_SECONDS,
            registry=registry,
        ).labels(run_id)
        self._reward = Gauge(
            "gristmill_env_reward_mean",
            f"Mean reward of the last {_RECENT} scored prompts, submitted or dropped",
            ["run"],
            registry=registry,
        )
        self._parts = Gauge(
            "gristmill_env_reward_part_mean",
            f"Mean of each reward before its weight, over the last {_RECENT} prompts on which it returned a value",
            ["run", "reward"],
            registry=registry,
        )
        self._results = Gauge(
            "gristmill_env_evaluation_result",
            "Results of the last evaluation of this process, by name",
            ["run", "result"],
            registry=registry,
        )
        self._evaluated = Gauge(
            "gristmill_env_evaluation_step", "Training step of the evaluated weights", ["run"], registry=registry
        )
        registry.register(_Loads(run_id, permits, servers, errors))

    def scored(self, prompt: ScoredPrompt) -> None:
        """Counts a scored prompt, whether its group is submitted or dropped."""
        self._seconds.observe(prompt.seconds)
        self._tokens.inc(sum(prompt.lengths))
        reasons = [reason if reason in _FINISH_REASONS else "other" for reason in prompt.finish_reasons]
        for reason in dict.fromkeys(reasons):
            self._completions.labels(self._run, reason).inc(reasons.count(reason))
        totals = [score.total for score in prompt.scores if score.total is not None]
        self._unscored.inc(len(prompt.scores) - len(totals))
        self._failed_rollouts.inc(prompt.failed)
        if totals:
            self._reward.labels(self._run).set(self._mean("", totals))
        parts: defaultdict[str, list[float]] = defaultdict(list)
        for score in prompt.scores:
            for name, value in score.parts.items():
                if value is not None:
                    parts[name].append(value)
            for name in score.failed:
                self._failures.labels(self._run, name).inc()
        for name, values in parts.items():
            if name in self._recent or len(self._recent) <= _MOST_LABELS:
                self._parts.labels(self._run, name).set(self._mean(name, values))

    def finished(self, reason: DropReason | None) -> None:
        """Counts a finished row: submitted (None) or dropped for `reason`."""
        self._groups.labels(self._run, SUBMITTED if reason is None else reason.value).inc()

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Shows the results of an evaluation of training step `step`."""
        self._results.clear()
        for name, value in list(results.items())[:_MOST_LABELS]:
            self._results.labels(self._run, name).set(value)
        self._evaluated.labels(self._run).set(step)

    def _mean(self, name: str, values: list[float]) -> float:
        """Returns the mean over recent prompts, of which `values` is the newest. `name`: of a reward, or "" for the
        total."""
        recent = self._recent[name]
        recent.append(sum(values) / len(values))
        return sum(recent) / len(recent)


_SERVER_GAUGES: Final[tuple[tuple[str, str, Callable[[Endpoint], float]], ...]] = (
    ("up", "1 if the model server may receive requests", lambda endpoint: endpoint.state is EndpointState.UP),
    ("requests", "Requests in flight at the model server", lambda endpoint: endpoint.requests),
    (
        "outstanding_tokens",
        "Prompt tokens and max_tokens of the requests in flight at the model server",
        lambda endpoint: endpoint.tokens,
    ),
)


class _Loads(Collector):
    """Reads the loads and states of the objects of the serve loop at each scrape."""

    def __init__(self, run_id: str, permits: PermitSession, servers: ModelServers, errors: ObserverErrors) -> None:
        self._run = run_id
        self._permits = permits
        self._servers = servers
        self._errors = errors

    def collect(self) -> Iterator[Metric]:
        slots = self._permits.slots
        places = GaugeMetricFamily(
            "gristmill_env_places", "Rows that may be at the model servers at a time", labels=["run"]
        )
        places.add_metric([self._run], slots.places)
        yield places
        rows = GaugeMetricFamily(
            "gristmill_env_rows_in_work",
            "Rows that this process works on, by stage: generating, or scoring (and storing)",
            labels=["run", "stage"],
        )
        rows.add_metric([self._run, "generating"], slots.generating)
        rows.add_metric([self._run, "scoring"], slots.later)
        yield rows
        step = GaugeMetricFamily(
            "gristmill_env_policy_step", "Training step of the newest weights that the API reported", labels=["run"]
        )
        if self._permits.version is not None:
            step.add_metric([self._run], self._permits.version.step)
        yield step
        yield from self._by_server()
        failed = CounterMetricFamily(
            "gristmill_env_observer_errors",
            "Errors of observers (W&B, saved groups, Prometheus); training continues without them",
            labels=["run", "observer"],
        )
        for observer, count in dict(self._errors.counts).items():
            failed.add_metric([self._run, observer], count)
        yield failed

    def _by_server(self) -> Iterator[Metric]:
        labels = ["run", "server"]
        for name, what, gauged in _SERVER_GAUGES:
            gauge = GaugeMetricFamily(f"gristmill_env_model_server_{name}", what, labels=labels)
            for server, endpoint in by_label(self._servers.endpoints).items():
                gauge.add_metric([self._run, server], gauged(endpoint))
            yield gauge
        outages = CounterMetricFamily(
            "gristmill_env_model_server_outages",
            "How often the model server was taken out of use, because it failed or had unpublished weights",
            labels=labels,
        )
        for server, endpoint in by_label(self._servers.endpoints).items():
            outages.add_metric([self._run, server], endpoint.turn)
        yield outages


def by_label(endpoints: Iterable[Endpoint]) -> dict[str, Endpoint]:
    """Returns the model servers by host and port, without path and password. A repeated address gets a number."""
    found: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        address = urlsplit(endpoint.server.url).netloc.rpartition("@")[2]
        again = sum(label.partition("#")[0] == address for label in found)
        found[f"{address}#{again + 1}" if again else address] = endpoint
    return found
