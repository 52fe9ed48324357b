"""The metrics of one environment process for Prometheus. docs/metrics.md has their healthy ranges and remedies.

Events of the serve loop increase counters. Loads and states are read from the objects that have them at each scrape.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gristmill import PermitSession
from gristmill.internal.metrics import COUNTER, Kind
from gristmill.internal.prometheus import Exported
from gristmill.internal.tracking import ObserverErrors
from gristmill_env.errors import DropReason
from gristmill_env.inference import ModelServers
from gristmill_env.inference.failover import Endpoint, EndpointState
from gristmill_env.rollouts.groups import RolloutGroup

SUBMITTED: Final = "submitted"
_RECENT: Final = 64
"""Scored prompts over which the means of the rewards are taken."""
_MOST_LABELS: Final = 64
"""Values of a label whose values a run chooses: its rewards, and the results of its evaluations."""
_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_FINISH_REASONS: Final = frozenset({"stop", "length"})


_RUN: Final = ("run",)
_SERVER: Final = ("run", "server")


def _row(name: str, meaning: str, kind: Kind = Kind.GAUGE, labels: tuple[str, ...] = _RUN) -> Exported:
    return Exported(f"gristmill_env_{name}", meaning, kind, labels)


METRICS: Final = {
    row.name.removeprefix("gristmill_env_"): row
    for row in (
        _row("groups", "finished rows: `submitted`, or the reason of the drop", COUNTER, ("run", "outcome")),
        _row("rows_in_work", "rows in work: `generating`, or `scoring` and storing", labels=("run", "stage")),
        _row("places", "rows that may be at the model servers at a time; 0 while an evaluation stops rollouts"),
        _row("prompt_seconds", "seconds from the first request to the last score; a histogram", Kind.HISTOGRAM),
        _row("completions", "scored completions: `stop`, `length` (truncated at `max_tokens`) or `other`", COUNTER,
            ("run", "finish_reason")),
        _row("completion_tokens", "sampled tokens of scored completions", COUNTER),
        _row("unscored_completions", "completions without a score, because a reward failed or returned no value",
            COUNTER),
        _row("failed_rollouts", "rollouts that failed after their retries and were left out of their groups", COUNTER),
        _row("reward_mean", f"mean reward of the last {_RECENT} scored prompts, also of dropped prompts"),
        _row("reward_part_mean", f"mean of each reward before its weight, over the last {_RECENT} prompts with a value",
            labels=("run", "reward")),
        _row("source_groups", "finished rows of each source of a run with `sources`: `submitted`, `dropped`", COUNTER,
            ("run", "source", "outcome")),
        _row("source_reward_mean", f"mean reward of the last {_RECENT} scored prompts of each source",
            labels=("run", "source")),
        _row("reward_failures", "completions on which a reward failed", COUNTER, ("run", "reward")),
        _row("evaluation_result", "results of the last evaluation of this process, by name (docs/evaluation.md)",
            labels=("run", "result")),
        _row("evaluation_step", "training step of the evaluated weights"),
        _row("policy_step", "training step of the newest weights that the API reported"),
        _row("observer_errors", "errors of W&B, saved groups or this page. The run continues", COUNTER,
            ("run", "observer")),
        _row("model_server_up", "1 if the server may receive requests", labels=_SERVER),
        _row("model_server_requests", "requests in flight at the server", labels=_SERVER),
        _row("model_server_outstanding_tokens", "prompt tokens and `max_tokens` of these requests", labels=_SERVER),
        _row("model_server_outages", "how often the server was taken out of use, because it failed or had unpublished "
            "weights", COUNTER, _SERVER),
    )
}  # fmt: skip


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
        self._groups: Counter = METRICS["groups"].create(registry)
        for outcome in (SUBMITTED, *DropReason):  # a counter that starts at 1 has no rate for its first event
            self._groups.labels(run_id, str(outcome))
        self._completions: Counter = METRICS["completions"].create(registry)
        self._tokens: Counter = METRICS["completion_tokens"].create(registry).labels(run_id)
        self._unscored: Counter = METRICS["unscored_completions"].create(registry).labels(run_id)
        self._failed_rollouts: Counter = METRICS["failed_rollouts"].create(registry).labels(run_id)
        self._failures: Counter = METRICS["reward_failures"].create(registry)
        self._seconds: Histogram = METRICS["prompt_seconds"].create(registry, buckets=_SECONDS).labels(run_id)
        self._reward: Gauge = METRICS["reward_mean"].create(registry)
        self._parts: Gauge = METRICS["reward_part_mean"].create(registry)
        self._of_sources: Counter = METRICS["source_groups"].create(registry)
        self._source_reward: Gauge = METRICS["source_reward_mean"].create(registry)
        self._results: Gauge = METRICS["evaluation_result"].create(registry)
        self._evaluated: Gauge = METRICS["evaluation_step"].create(registry)
        registry.register(_Loads(run_id, permits, servers, errors))

    def scored(self, group: RolloutGroup) -> None:
        """Counts a scored prompt, whether its group is submitted or dropped."""
        self._seconds.observe(group.seconds)
        self._tokens.inc(sum(rollout.sampled or 0 for rollout in group.rollouts))
        reasons = [one.finish_reason if one.finish_reason in _FINISH_REASONS else "other" for one in group.rollouts]
        for reason in dict.fromkeys(reasons):
            self._completions.labels(self._run, reason).inc(reasons.count(reason))
        totals = [score.total for score in group.scores if score.total is not None]
        self._unscored.inc(len(group.scores) - len(totals))
        self._failed_rollouts.inc(len(group.failed))
        if totals:
            self._reward.labels(self._run).set(self._mean("", totals))
            if (source := group.item.source) is not None:
                self._source_reward.labels(self._run, source).set(self._mean(f"source {source}", totals))
        parts: defaultdict[str, list[float]] = defaultdict(list)
        for score in group.scores:
            for name, value in score.parts.items():
                if value is not None:
                    parts[name].append(value)
            for name in score.failed:
                self._failures.labels(self._run, name).inc()
        for name, values in parts.items():
            if name in self._recent or len(self._recent) <= _MOST_LABELS:
                self._parts.labels(self._run, name).set(self._mean(name, values))

    def finished(self, reason: DropReason | None, source: str | None = None) -> None:
        """Counts a finished row: submitted (None) or dropped for `reason`. `source`: its name, if the run has any."""
        self._groups.labels(self._run, SUBMITTED if reason is None else reason.value).inc()
        if source is not None:
            self._of_sources.labels(self._run, source, SUBMITTED if reason is None else "dropped").inc()

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Shows the results of an evaluation of training step `step`."""
        self._results.clear()
        for name, value in list(results.items())[:_MOST_LABELS]:
            self._results.labels(self._run, name).set(value)
        self._evaluated.labels(self._run).set(step)

    def _mean(self, name: str, values: list[float]) -> float:
        """Returns the mean over recent prompts, of which `values` is the newest. `name`: of a reward, or "" for the
        total, or "source NAME" for the total of a source."""
        recent = self._recent[name]
        recent.append(sum(values) / len(values))
        return sum(recent) / len(recent)


class _Loads(Collector):
    """Reads the loads and states of the objects of the serve loop at each scrape."""

    def __init__(self, run_id: str, permits: PermitSession, servers: ModelServers, errors: ObserverErrors) -> None:
        self._run = run_id
        self._permits = permits
        self._servers = servers
        self._errors = errors

    def collect(self) -> Iterator[Metric]:
        slots, version = self._permits.slots, self._permits.version
        servers = [([server], endpoint) for server, endpoint in by_label(self._servers.endpoints).items()]
        found: dict[str, list[tuple[list[str], float]]] = {
            "places": [([], slots.places)],
            "rows_in_work": [(["generating"], slots.generating), (["scoring"], slots.later)],
            "policy_step": [] if version is None else [([], version.step)],
            "model_server_up": [(server, one.state is EndpointState.UP) for server, one in servers],
            "model_server_requests": [(server, one.requests) for server, one in servers],
            "model_server_outstanding_tokens": [(server, one.tokens) for server, one in servers],
            "model_server_outages": [(server, one.turn) for server, one in servers],
            "observer_errors": [([observer], count) for observer, count in dict(self._errors.counts).items()],
        }
        for name, samples in found.items():
            yield METRICS[name].family(([self._run, *labels], value) for labels, value in samples)


def by_label(endpoints: Iterable[Endpoint]) -> dict[str, Endpoint]:
    """Returns the model servers by host and port, without path and password. A repeated address gets a number."""
    found: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        address = urlsplit(endpoint.server.url).netloc.rpartition("@")[2]
        again = sum(label.partition("#")[0] == address for label in found)
        found[f"{address}#{again + 1}" if again else address] = endpoint
    return found
