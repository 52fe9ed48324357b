"""The profile `monitoring`, compose/monitoring.yaml: limits, loopback ports, pinned images, and targets that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.support.exported_metrics import MONITORING, ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
INCLUDED = MONITORING.with_suffix(".yaml")
OF_THE_FILE: dict[str, Any] = yaml.safe_load(INCLUDED.read_text())["services"]
SERVICES = COMPOSE["services"] | OF_THE_FILE
SCRAPED: list[dict[str, Any]] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
MONITORS = sorted(name for name, service in SERVICES.items() if "monitoring" in service.get("profiles", []))


def target(job: dict[str, Any]) -> tuple[str, int]:
    """Returns the service and the port that a job scrapes."""
    if "dns_sd_configs" in job:
        (found,) = job["dns_sd_configs"]
        (name,) = found["names"]
        return name, found["port"]
    ((address,),) = [found["targets"] for found in job["static_configs"]]
    name, _, port = address.partition(":")
    return name, int(port)


def test_only_prometheus_and_grafana_belong_to_the_profile() -> None:
    assert MONITORS == sorted(OF_THE_FILE) == ["grafana", "prometheus"]
    assert str(INCLUDED.relative_to(ROOT)) in COMPOSE["include"]


def test_sandbox_is_limited_as_the_other_services() -> None:
    (path,) = (one["path"] for one in COMPOSE["include"] if isinstance(one, dict))
    (sandbox,) = yaml.safe_load((ROOT / path).read_text())["services"].values()
    for name, value in COMPOSE["x-service"].items():
        assert name in ("tmpfs", "pids_limit") or sandbox[name] == value
    assert sandbox["mem_limit"]
    assert sandbox["networks"] == ["sandbox"]
    assert not {"volumes", "ports", "secrets"} & set(sandbox)


@pytest.mark.parametrize("name", MONITORS)
def test_container_of_the_profile_is_limited_as_the_others(name: str) -> None:
    service = SERVICES[name]
    for name, value in COMPOSE["x-service"].items():
        assert name == "tmpfs" or service[name] == value
    assert service["mem_limit"]
    assert service["healthcheck"]["test"]
    assert service["networks"] == ["stack"]
    assert all(re.fullmatch(r"127\.0\.0\.1:\$\{\w+_PORT:-\d+\}:\d+", port) for port in service["ports"])
    files = [mount for mount in service["volumes"] if mount.startswith("./")]
    assert files
    assert all(mount.endswith(":ro") for mount in files)
    for mount in files:
        assert (INCLUDED.parent / mount.split(":")[0]).exists()


@pytest.mark.parametrize("name", MONITORS)
def test_image_is_pinned_by_version_without_a_registry_host(name: str) -> None:
    image = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", SERVICES[name]["image"])
    owner, _, rest = image.partition("/")
    assert "." not in owner
    assert ":" not in owner
    assert re.fullmatch(r"[\w-]+:v?\d+\.\d+\.\d+", rest)


def test_every_service_with_metrics_is_scraped_at_its_port() -> None:
    found = dict(target(job) for job in SCRAPED)
    assert {job["job_name"] for job in SCRAPED} == set(found) == {"api", "env", "trainer", "model"}
    for name in ("env", "trainer"):
        host, _, port = SERVICES[name]["environment"]["GRISTMILL_METRICS_ADDRESS"].partition(":")
        assert (host, int(port)) == ("0.0.0.0", found[name])
        published = [line.rpartition(":")[2] for line in SERVICES[name].get("ports", ())]
        assert port not in published, "the port is for the stack's network only"
    ports = {name: SERVICES[publisher]["ports"][0] for name, publisher in {"api": "api", "model": "model-port"}.items()}
    assert [f":{found[name]}" in ports[name] for name in ("api", "model")] == [True, True]


def test_prometheus_reads_the_token_with_the_fewest_rights() -> None:
    (api,) = [job for job in SCRAPED if job["job_name"] == "api"]
    assert api["authorization"] == {"credentials_file": "/run/secrets/token_env"}
    assert SERVICES["prometheus"]["secrets"] == ["token_env"]
    assert "secrets" not in SERVICES["grafana"]


def test_grafana_has_no_account() -> None:
    settings = SERVICES["grafana"]["environment"]
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == settings["GF_USERS_ALLOW_SIGN_UP"] == "false"
