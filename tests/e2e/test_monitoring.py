"""The profile `monitoring` as the engine reads it. Its images are not started here: CI cannot pull them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.compose import ComposeStack


def test_engine_accepts_the_profile_and_publishes_on_loopback_only(tmp_path: Path) -> None:
    stack = ComposeStack(tmp_path, "gristmill-monitoring", {"PROMETHEUS_PORT": "19090"})
    services = json.loads(stack.compose("--profile", "monitoring", "config", "--format", "json"))["services"]
    assert {"prometheus", "grafana"} < set(services)
    published = {
        (name, port["host_ip"], port["published"])
        for name, service in services.items()
        for port in service.get("ports", [])
    }
    assert {host for _, host, _ in published} == {"127.0.0.1"}
    assert ("prometheus", "127.0.0.1", "19090") in published
    assert {name for name, _, _ in published} == {"api", "model-port", "env", "prometheus", "grafana"}


def test_stack_without_the_monitoring_profile_starts_neither_prometheus_nor_grafana(tmp_path: Path) -> None:
    stack = ComposeStack(tmp_path, "gristmill-monitoring", {})
    services = json.loads(stack.compose("config", "--format", "json"))["services"]
    assert set(services) == {"redis", "api", "model", "model-port", "trainer", "env"}
