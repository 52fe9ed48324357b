"""Debian's Prometheus scrapes a real stack with the files of compose/monitoring/, and promtool checks them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.support.exported_metrics import ALERTS, alerts, dashboard, exported, queries, shown
from tests.support.ports import free_port
from tests.support.prometheus_server import PrometheusServer, program, promtool, write_config
from tests.support.stack import Output, Vllm, start_api, start_redis
from tests.unit.monitoring.test_queries import VLLM

from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack, answers

STEPS = 3


@dataclass(frozen=True)
class Monitored:
    """A stack in training, and the Prometheus that scrapes it."""

    prometheus: PrometheusServer
    pages: dict[str, str]
    """Address of each page of metrics, by job."""
    metrics_file: Path


@pytest.fixture(scope="module")
def monitored(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    program("prometheus")
    folder = tmp_path_factory.mktemp("monitored")
    redis_port, api_port, env_port, trainer_port = (free_port() for _ in range(4))
    targets = {
        "api": f"127.0.0.1:{api_port}",
        "env": f"127.0.0.1:{env_port}",
        "trainer": f"127.0.0.1:{trainer_port}",
        "model": vllm.url.partition("//")[2],
    }
    output = Output()
    with LocalStack(output.add) as stack:
        start_redis(stack, folder / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        prometheus = PrometheusServer(stack, folder, write_config(folder, targets))
        environ = vllm.environ(f"http://{targets['api']}", folder / "runs")
        python = sys.executable
        env = [python, "-m", "gristmill_env", "--config", "quickstart", "--metrics_address", str(env_port)]
        # The trainer's port comes from the variable, as in Compose; the environment's from a flag.
        trainer = [python, "-m", "gristmill_trainer", "--training_steps", "5000"]
        service = stack.start("trainer", trainer, {**environ, "GRISTMILL_METRICS_ADDRESS": targets["trainer"]})
        pages = {job: f"http://{address}/metrics" for job, address in targets.items()}
        # The trainer waits for a run now, and its page already answers.
        stack.wait_until(service, lambda: answers(pages["trainer"]), timeout=120)
        stack.start("env", env, environ)
        stack.wait_until(service, lambda: (prometheus.value("gristmill_trainer_step") or 0) >= STEPS, timeout=240)
        yield Monitored(prometheus, pages, folder / "runs" / "quickstart" / "metrics.jsonl")


@pytest.mark.long
def test_every_target_answers(monitored: Monitored) -> None:
    up = monitored.prometheus.query("up")
    assert {re.search(r"job=(\w+)", labels)[1]: value for labels, value in up.items()} == {  # type: ignore[index]
        "api": 1, "env": 1, "trainer": 1, "model": 1,
    }  # fmt: skip


@pytest.mark.long
def test_prometheus_has_the_values_of_steps_and_rows(monitored: Monitored) -> None:
    prometheus = monitored.prometheus
    step = prometheus.value("gristmill_trainer_step")
    assert step is not None
    assert step >= STEPS
    rows = read_jsonl(monitored.metrics_file)[: int(step)]
    at_least = sum(row["trained_tokens"] for row in rows)
    assert (prometheus.value("gristmill_trainer_trained_tokens_total") or 0) >= at_least > 0
    # Prometheus scrapes one page after another, so its values of env and api may be older than the trainer's step.
    prometheus.wait_for('gristmill_env_groups_total{outcome="submitted"}', 16 * STEPS)
    prometheus.wait_for('gristmill_api_submits_total{outcome="stored"}', 16 * STEPS)
    assert prometheus.query("gristmill_env_model_server_up").popitem()[1] == 1
    difference = prometheus.value("gristmill_trainer_rollout_logprob_diff_max")
    assert difference is not None
    assert difference < 0.01


@pytest.mark.long
def test_gauge_equals_the_row_of_the_step(monitored: Monitored) -> None:
    """One page is one moment: its step and its reward are of the same row of metrics.jsonl."""
    page = httpx.get(monitored.pages["trainer"]).text
    samples = re.findall(r"^(gristmill_trainer_\w+)\{run=\"\w+\"\} (\S+)$", page, re.MULTILINE)
    found = {name: float(value) for name, value in samples}
    row = read_jsonl(monitored.metrics_file)[int(found["gristmill_trainer_step"]) - 1]
    for name in ("reward_mean", "loss", "grad_norm", "rollout_logprob_diff_mean", "tokens_per_second"):
        assert found[f"gristmill_trainer_{name}"] == row[name], name


@pytest.mark.long
def test_rules_load_and_no_alert_of_a_healthy_stack_fires(monitored: Monitored) -> None:
    groups = monitored.prometheus.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == {rule["alert"] for rule in alerts()}
    assert {name for name, rule in rules.items() if rule.get("lastError")} == set()
    # The disk of the test machine may be small.
    firing = {name for name, rule in rules.items() if rule["state"] == "firing"} - {"ArchiveDiskNearlyFull"}
    assert firing == set()


@pytest.mark.long
def test_every_query_of_the_dashboard_is_valid(monitored: Monitored) -> None:
    for _, query in queries():
        if not query.startswith("label_values"):
            monitored.prometheus.get("query", query=query.replace("$run", ".*"))


@pytest.mark.long
def test_panels_of_a_training_have_values(monitored: Monitored) -> None:
    empty = set()
    for panel in dashboard()["panels"]:
        asked = [target["expr"].replace("$run", ".*") for target in panel.get("targets", [])]
        if asked and not any(monitored.prometheus.query(query) for query in asked):
            empty.add(panel["title"])
    # Values that a quickstart on a CPU does not have: an evaluation set, the device's peak, drops, an archive, and a
    # group that waits at this moment. Rates need two scrapes within their window, which a run of seconds has.
    assert empty <= {
        "Evaluation", "MFU", "Dropped by the API's count, rejected by the trainer", "Free space of the archive",
        "Age of the oldest ready group", "Errors of observers",
    }  # fmt: skip


@pytest.mark.long
def test_model_server_has_the_metrics_of_the_dashboard(monitored: Monitored) -> None:
    families = text_string_to_metric_families(httpx.get(monitored.pages["model"]).text)
    assert VLLM - {shown(family) for family in families} == set()


@pytest.mark.long
@pytest.mark.parametrize("job", ["api", "env", "trainer"])
def test_page_has_no_metric_that_the_guide_lacks(monitored: Monitored, job: str) -> None:
    families = list(text_string_to_metric_families(httpx.get(monitored.pages[job]).text))
    ours = {shown(family) for family in families if family.name.startswith("gristmill_")}
    assert {name for name in ours if not name.endswith("_created")} - exported() == set()
    others = {family.name.partition("_")[0] for family in families} - {"gristmill"}
    assert others <= {"process"}


@pytest.mark.long
@pytest.mark.parametrize("job", ["env", "trainer"])
def test_page_passes_the_linter_of_prometheus(monitored: Monitored, job: str) -> None:
    page = httpx.get(monitored.pages[job]).text
    promtool("check", "metrics", text="\n".join(line for line in page.splitlines() if "_created" not in line) + "\n")


@pytest.mark.long
def test_labels_are_bounded_and_hold_no_ids(monitored: Monitored) -> None:
    for job in ("env", "trainer"):
        page = httpx.get(monitored.pages[job]).text
        assert len(page.splitlines()) < 600
        assert not re.search(r"\bg\d{8}\b", page), "the id of a group"


def test_promtool_accepts_rules_and_configuration(tmp_path: Path) -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", ALERTS)
    targets = dict.fromkeys(("api", "env", "trainer", "model"), "127.0.0.1:1")
    promtool("check", "config", write_config(tmp_path, targets))


RUN = 'run="sums"'
FIRES = {
    "ApiDown": {'up{job="api",instance="api:8000"}': "0+0x60"},
    "RedisDown": {"gristmill_api_redis_up": "0+0x60"},
    "RedisCannotWrite": {"gristmill_api_redis_aof_write_ok": "0+0x60"},
    "RedisLostRuns": {"gristmill_api_lost_runs": "1+0x60"},
    "RedisNearlyFull": {
        "gristmill_api_redis_memory_bytes": "95+0x60",
        "gristmill_api_redis_max_memory_bytes": "100+0x60",
    },
    "BackgroundTaskDown": {'gristmill_api_task_up{task="archive"}': "0+0x60"},
    "ArchiveLosesGroups": {"gristmill_api_archive_lost_total": "0+1x60"},
    "ArchiveDiskNearlyFull": {"gristmill_api_archive_free_bytes": "1000000+0x60"},
    "ModelServerAway": {f'gristmill_env_model_server_up{{{RUN},server="model:9001"}}': "0+0x60"},
    "NoEnvironment": {
        f"gristmill_api_environments{{{RUN}}}": "0+0x60",
        f"gristmill_trainer_training_steps{{{RUN}}}": "20+0x60",
    },
    "DeadLetters": {f'gristmill_api_groups{{{RUN},state="dead"}}': "2+0x60"},
    "LeasesExpire": {f"gristmill_api_lease_expiries_total{{{RUN}}}": "0+1x60"},
    "MostRowsDropped": {
        f'gristmill_env_groups_total{{{RUN},outcome="submitted"}}': "0+1x60",
        f'gristmill_env_groups_total{{{RUN},outcome="same_scores"}}': "0+99x60",
    },
    "RewardFails": {f'gristmill_env_reward_failures_total{{{RUN},reward="accuracy"}}': "0+1x60"},
    "NoStep": {f"gristmill_trainer_last_step_timestamp_seconds{{{RUN}}}": "0+0x60"},
    "LogprobsDiffer": {f"gristmill_trainer_rollout_logprob_diff_mean{{{RUN}}}": "0.5+0x60"},
    "StepsChangeNothing": {f"gristmill_trainer_skipped_steps_total{{{RUN}}}": "0+1x60"},
    "NoGradient": {f"gristmill_trainer_zero_advantage_share{{{RUN}}}": "1+0x60"},
    "MostCompletionsTruncated": {f"gristmill_trainer_cut_off_share{{{RUN}}}": "0.8+0x60"},
}
"""Series, one sample per minute, under which the alert fires after an hour. Prometheus' notation: START+STEPxCOUNT."""
HEALTHY = {
    'up{job="api",instance="api:8000"}': "1+0x60",
    "gristmill_api_redis_up": "1+0x60",
    "gristmill_api_redis_aof_write_ok": "1+0x60",
    "gristmill_api_lost_runs": "0+0x60",
    "gristmill_api_redis_memory_bytes": "50+0x60",
    "gristmill_api_redis_max_memory_bytes": "0+0x60",
    'gristmill_api_task_up{task="archive"}': "1+0x60",
    "gristmill_api_archive_lost_total": "3+0x60",
    "gristmill_api_archive_free_bytes": "9000000000+0x60",
    f'gristmill_env_model_server_up{{{RUN},server="model:9001"}}': "1+0x60",
    f"gristmill_api_environments{{{RUN}}}": "1+0x60",
    'gristmill_api_environments{run="left"}': "0+0x60",
    f"gristmill_trainer_training_steps{{{RUN}}}": "20+0x60",
    f'gristmill_api_groups{{{RUN},state="dead"}}': "0+0x60",
    f"gristmill_api_lease_expiries_total{{{RUN}}}": "1+0x60",
    f'gristmill_env_groups_total{{{RUN},outcome="submitted"}}': "0+50x60",
    f'gristmill_env_groups_total{{{RUN},outcome="same_scores"}}': "0+50x60",
    f'gristmill_env_reward_failures_total{{{RUN},reward="accuracy"}}': "1+0x60",
    f"gristmill_trainer_last_step_timestamp_seconds{{{RUN}}}": "0+60x60",
    f"gristmill_trainer_rollout_logprob_diff_mean{{{RUN}}}": "0.00001+0x60",
    f"gristmill_trainer_skipped_steps_total{{{RUN}}}": "1+0x60",
    f"gristmill_trainer_updates_left_out_total{{{RUN}}}": "1+0x60",
    f"gristmill_trainer_zero_advantage_share{{{RUN}}}": "0.5+0x60",
    f"gristmill_trainer_cut_off_share{{{RUN}}}": "0.1+0x60",
}


def check_firing(folder: Path, series: dict[str, str], expected: dict[str, int]) -> None:
    """Checks with promtool for how many series each alert fires after an hour."""
    tests = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                "eval_time": "1h",
                "exp_samples": [{"labels": "{}", "value": count}],
            }
            for alert, count in expected.items()
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [tests]}))
    promtool("test", "rules", path)


@pytest.mark.parametrize("alert", [rule["alert"] for rule in alerts()])
def test_alert_fires_for_its_failing_series(alert: str, tmp_path: Path) -> None:
    check_firing(tmp_path, FIRES[alert], {alert: 1})


def test_healthy_series_fire_no_alert(tmp_path: Path) -> None:
    check_firing(tmp_path, HEALTHY, {rule["alert"]: 0 for rule in alerts()})
