"""Debian's Prometheus with the files of compose/monitoring/, on this machine's ports."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.exported_metrics import ALERTS, MONITORING
from tests.support.ports import free_port

from gristmill_cli.local.processes import LocalStack, Service, answers

INTERVAL = "1s"


def program(name: str) -> str:
    """Returns the path of `prometheus` or `promtool`. Skips the test if it is missing; in CI the test fails."""
    found = shutil.which(name)
    if found is None and os.environ.get("CI") != "true":
        pytest.skip(f"no {name} in PATH: scripts/prepare_package.sh prometheus installs it")
    assert found is not None, f"no {name} in PATH: scripts/prepare_package.sh prometheus installs it"
    return found


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """Runs promtool. Returns its output. Raises AssertionError with that output if it fails."""
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)],
        input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def write_config(folder: Path, targets: dict[str, str], token: str = "") -> Path:
    """Writes the stack's prometheus.yml with `targets` (HOST:PORT by job) and a shorter interval. Returns its path."""
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    for job in config["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        if "authorization" in job:
            (folder / "token").write_text(token)
            job["authorization"]["credentials_file"] = str(folder / "token")
    (folder / ALERTS.name).write_bytes(ALERTS.read_bytes())
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


class PrometheusServer:
    """A running Prometheus."""

    def __init__(self, stack: LocalStack, folder: Path, config: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self.service: Service = stack.start("prom", [*command, f"--web.listen-address={self.url.partition('//')[2]}"])
        stack.wait_until(self.service, lambda: answers(f"{self.url}/-/ready"), timeout=60)

    def get(self, path: str, **parameters: str) -> Any:
        """Returns the data of a call of the API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, promql: str) -> dict[str, float]:
        """Returns the values of an instant query, by their labels without the name, sorted and joined by commas."""
        found = self.get("query", query=promql)["result"]
        return {
            ",".join(f"{name}={value}" for name, value in sorted(item["metric"].items()) if name != "__name__"): float(
                item["value"][1]
            )
            for item in found
        }

    def value(self, promql: str) -> float | None:
        """Returns the value of a query with at most one result."""
        found = list(self.query(promql).values())
        assert len(found) <= 1, found
        return found[0] if found else None

    def wait_for(self, promql: str, at_least: float, timeout: float = 20.0) -> None:
        """Waits until the value of a query is `at_least` this number. Raises AssertionError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (value := self.value(promql) or 0.0) < at_least:
            assert time.monotonic() < deadline, f"{promql} is {value}, and stays below {at_least}"
            time.sleep(0.2)
