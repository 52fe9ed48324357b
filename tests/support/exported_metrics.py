"""The metrics that the services register for Prometheus, and the names that dashboard and rules ask for."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from gristmill import Client, PermitSession, RunState, RunStatus
from gristmill.internal.tracking import ObserverErrors
from gristmill_api.metrics import STATES, Metrics
from gristmill_env.inference import ModelServers
from gristmill_env.prometheus import EnvMetrics
from gristmill_env.settings.servers import ServerConfig
from gristmill_trainer.prometheus import StepCollector

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "compose" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "gristmill.json"
ALERTS = MONITORING / "alerts.yml"
REDIS_INFO = {
    "used_memory": 1,
    "maxmemory": 1,
    "aof_current_size": 1,
    "aof_last_bgrewrite_status": "ok",
    "aof_last_write_status": "ok",
    "aof_delayed_fsync": 1,
}


def api_registry() -> CollectorRegistry:
    """The metrics of an API with one open run."""
    metrics = Metrics(Path("/"))
    nothing = dict.fromkeys(STATES, 0)
    status = RunStatus(
        state=RunState.OPEN, ready=0, leased=0, trained=0, dead=0, sequences=nothing, bytes_by_state=nothing,
        accepted=0, outstanding=0, rows_issued=0, bytes=0,
    )  # fmt: skip
    metrics.store.runs = {"sums": status}
    metrics.store.redis_info = REDIS_INFO
    return metrics.registry


def env_registry() -> CollectorRegistry:
    """The metrics of an environment that has not begun."""
    registry = CollectorRegistry()
    permits = PermitSession(Client("http://127.0.0.1:1"), "sums", "env-1")
    servers = ModelServers([ServerConfig(base_url="http://model:9001")], patience=1)
    EnvMetrics(registry, "sums", permits, servers, ObserverErrors())
    return registry


def trainer_registry() -> CollectorRegistry:
    """The metrics of a trainer before its first step."""
    registry = CollectorRegistry()
    StepCollector("sums", 10, 0, ObserverErrors()).register(registry)
    return registry


@functools.cache
def exported() -> frozenset[str]:
    """Returns the names of all metrics of API, environment and trainer as Prometheus shows them."""
    registries = (api_registry(), env_registry(), trainer_registry())
    return frozenset(shown(metric) for registry in registries for metric in registry.collect())


def shown(metric: Metric) -> str:
    """Returns the name of the family in Prometheus: counters end in _total."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def alerts() -> list[dict[str, Any]]:
    """Returns the rules of alerts.yml."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Returns the provisioned dashboard."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Yields (place, PromQL) for each query of the dashboard and each alert."""
    found = dashboard()
    for panel in found["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in found["templating"]["list"]:
        yield f"${variable['name']}", variable["definition"]
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def names_in(query: str, prefix: str = "gristmill_") -> set[str]:
    """Returns the names of families in a query. The parts of a histogram count as the histogram."""
    found = set(re.findall(rf"\b{prefix}\w+", re.sub(r'"[^"]*"', "", query)))
    return {re.sub(r"_bucket$", "", name) for name in found}
