"""Dashboard and alert rules ask for metrics that the services register, and the rules name sections of the guide."""

from __future__ import annotations

import pytest
import yaml
from tests.support.exported_metrics import MONITORING, ROOT, alerts, dashboard, exported, names_in, queries
from tests.unit.docs.test_links import anchors

VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",
}
"""Metrics of the model server. tests/integration/loop/test_prometheus.py finds them in a real vLLM."""


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_query_asks_for_metrics_that_exist(place: str, query: str) -> None:
    assert names_in(query) - exported() == set(), place
    assert names_in(query, "vllm:") - VLLM == set(), place


def test_metric_that_no_service_registers_is_found() -> None:
    misspelt = 'rate(gristmill_env_goups_total{run="gristmill_x"}[5m])'
    assert names_in(misspelt) - exported() == {"gristmill_env_goups_total"}


def test_panels_have_different_ids_and_the_provisioned_data_source() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 40
    provisioned = MONITORING / "grafana" / "provisioning" / "datasources" / "prometheus.yaml"
    (source,) = yaml.safe_load(provisioned.read_text())["datasources"]
    used = {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"}
    assert used == {source["uid"]}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_has_a_severity_and_names_a_section_of_the_guide(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
    page, _, anchor = rule["annotations"]["page"].partition("#")
    assert anchor in anchors((ROOT / page).read_text())
