"""deploy/kubernetes/: rendered by kubectl, checked against Kubernetes' schemas, and compared with compose.yaml.

No control plane has run these manifests. kubectl renders without one, and the schemas come with a Python package.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.support.grids import part_of_grid

from gristmill_cli.local.redis_server import SETTINGS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
FOLDERS = ["stack", "run", "cuda/stack", "cuda/run"]
VERSIONS = ["1.28", "1.32", kubernetes_validate.latest_version()]
"""The oldest version that docs/clusters.md names, and later ones."""
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
SERVICES = {"redis": "stack", "api": "stack", "model": "stack", "trainer": "run", "env": "run"}
WITHOUT = {
    "api": {"API_IN_COMPOSE"},  # The manifests always have tokens.
    # compose.yaml mounts no weights into it either. The manifests have no sandbox.
    "env": {"GRISTMILL_WEIGHTS_DIR", "GRISTMILL_SANDBOX_URL"},
    "model": {"GRISTMILL_CONFIG_DIR", "GRISTMILL_API_URL", "GRISTMILL_MODEL_URL"},  # The server reads none of them.
}
IN_CONFIG_MAPS = re.compile(
    r"GRISTMILL_RUN_ID|GRISTMILL_STACK|API_(?!AUTH|TOKENS|VIEW)\w+|MODEL_MAX_LENGTH|LORA_RANK"
    r"|MODEL_(?:TOOL|REASONING)_PARSER|VLLM_ARGS|HF_(?:HUB_OFFLINE|ENDPOINT)|WANDB_(?!API)\w+"
)
"""Variables that users set in the ConfigMaps run, api-settings and model-settings."""


@functools.cache
def rendered(folder: str) -> tuple[dict[str, Any], ...]:
    """Returns the resources. Skips the test without kubectl, and fails it in CI."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        missing = "no kubectl to render deploy/kubernetes: https://kubernetes.io/docs/tasks/tools/"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    done = subprocess.run([kubectl, "kustomize", str(FOLDER / folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def workload(name: str, folder: str | None = None) -> dict[str, Any]:
    (found,) = (
        one
        for one in rendered(folder or SERVICES[name])
        if one["metadata"]["name"] == name and "template" in one.get("spec", {})
    )
    return found


def pod(name: str, folder: str | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = workload(name, folder)["spec"]["template"]["spec"]
    return spec


def container(name: str, folder: str | None = None) -> dict[str, Any]:
    (found,) = pod(name, folder)["containers"]
    assert isinstance(found, dict)
    return found


def kinds(folder: str, kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in rendered(folder) if one["kind"] == kind}


def claims(name: str) -> Iterator[tuple[str, str, bool]]:
    """Yields (claim, place in the container, whether the container may write)."""
    volumes = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod(name)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    for mount in container(name)["volumeMounts"]:
        if mount["name"] in volumes:
            yield volumes[mount["name"]], mount["mountPath"], not mount.get("readOnly", False)


@pytest.mark.parametrize(("folder", "version"), part_of_grid(FOLDERS, VERSIONS, every=3))
@pytest.mark.slow
def test_resources_match_the_schemas_of_kubernetes(folder: str, version: str) -> None:
    for resource in rendered(folder):
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_misspelt_field_does_not_match_the_schemas() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"port": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_resource_is_in_the_namespace(folder: str) -> None:
    for resource in rendered(folder):
        assert resource["kind"] == "Namespace" or resource["metadata"]["namespace"] == "gristmill", resource["metadata"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_container_has_the_variables_of_its_compose_service(name: str) -> None:
    given = {variable["name"] for variable in container(name).get("env", [])}
    wanted = set(COMPOSE[name].get("environment", {})) - WITHOUT.get(name, set())
    assert {variable for variable in wanted - given if not IN_CONFIG_MAPS.fullmatch(variable)} == set()
    in_config_maps = {variable for variable in wanted if IN_CONFIG_MAPS.fullmatch(variable)}
    assert not in_config_maps or container(name)["envFrom"]


@pytest.mark.parametrize("name", SERVICES)
def test_container_has_the_image_and_the_rights_of_its_compose_service(name: str) -> None:
    image = COMPOSE[name]["image"].removeprefix("${IMAGE_REGISTRY:+${IMAGE_REGISTRY:-}/}")
    image = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", image)
    assert container(name)["image"] == image
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    assert pod(name)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(name)["automountServiceAccountToken"] is False
    # MODEL_PORT of a service's address is text that the model server would take for its port.
    assert pod(name)["enableServiceLinks"] is False
    asked = int(re.sub(r"\D", "", COMPOSE[name].get("stop_grace_period", "10")))
    assert pod(name)["terminationGracePeriodSeconds"] >= asked


def test_redis_has_the_settings_of_compose() -> None:
    mounted = {place: ROOT / source for source, place, *_ in (line.split(":") for line in COMPOSE["redis"]["volumes"])}
    for command in (COMPOSE["redis"]["command"], container("redis")["command"]):
        program, file, *options = command
        assert program == "redis-server"
        assert mounted[file] == SETTINGS
        assert set(options[::2]) - {"--port", "--unixsocket", "--unixsocketperm"} == {"--maxmemory", "--aclfile"}
    (settings,) = (one for name, one in kinds("stack", "ConfigMap").items() if name.startswith("redis-"))
    assert settings["data"] == {Path(file).name: SETTINGS.read_text()}
    (volume,) = (one for one in pod("redis")["volumes"] if one["name"] == "conf")
    assert volume["configMap"]["name"] == settings["metadata"]["name"]


def test_each_volume_has_one_writer_and_the_places_of_compose() -> None:
    writers: dict[str, list[str]] = {}
    for name in ("api", "model", "trainer", "env"):
        for claim, place, writes in claims(name):
            in_compose = f"{claim}:{place}" + ("" if writes else ":ro")
            assert in_compose in COMPOSE[name]["volumes"]
            if writes:
                writers.setdefault(claim, []).append(name)
    assert writers == {
        "rollouts": ["api"],
        "models": ["model"],
        "weights": ["trainer"],
        "runs": ["trainer"],
        "env-files": ["env"],
    }
    assert set(kinds("stack", "PersistentVolumeClaim")) == set(writers)


@pytest.mark.parametrize("name", SERVICES)
def test_mounted_volumes_exist(name: str) -> None:
    volumes = {volume["name"] for volume in pod(name)["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in workload(name)["spec"].get("volumeClaimTemplates", [])}
    assert {mount["name"] for mount in container(name)["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", SERVICES)
def test_files_named_by_variables_are_mounted(name: str) -> None:
    mounts = [mount["mountPath"] for mount in container(name)["volumeMounts"]]
    for variable in container(name).get("env", []):
        for path in re.findall(r"(?:^|(?<=:))/[\w/]+", variable["value"].partition("//")[0]):
            assert any(path == mount or path.startswith(mount + "/") for mount in mounts), variable


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "PodDisruptionBudget"])
def test_selectors_name_pods_that_exist(kind: str) -> None:
    labels = {name: workload(name)["spec"]["template"]["metadata"]["labels"] for name in SERVICES}
    for name, resource in kinds("stack", kind).items():
        spec = resource["spec"]
        selector = spec.get("podSelector") or spec.get("selector") or {}
        chosen = selector.get("matchLabels", selector)
        assert name == "refuse-others" or chosen.items() <= labels[name].items()
        ports = {port["containerPort"] for port in container(name)["ports"]} if name in labels else set()
        for port in spec.get("ports", []):
            assert port["port"] in ports
        for rule in spec.get("ingress", []):
            assert {port["port"] for port in rule["ports"]} == ports


def test_clients_may_connect_to_the_services_that_they_use() -> None:
    allowed: dict[str, set[str]] = {}
    for name, policy in kinds("stack", "NetworkPolicy").items():
        for rule in policy["spec"].get("ingress", []):
            for peer in rule["from"]:
                selector = peer["podSelector"]
                allowed[name] = {*selector.get("matchLabels", {}).values()}
                for expression in selector.get("matchExpressions", []):
                    allowed[name] |= {*expression["values"]}
    used: dict[str, set[str]] = {}
    for name in SERVICES:
        for variable in container(name).get("env", []):
            for host in re.findall(r"//(?:\w+@)?(\w+):\d+", variable["value"]):
                used.setdefault(host, set()).add(name)
    assert allowed == used


def test_a_drained_node_does_not_count_as_a_failure_of_a_run() -> None:
    for name in ("trainer", "env"):
        spec = workload(name)["spec"]
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        assert spec["podFailurePolicy"]["rules"] == [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "folder"), [("model", "cuda/stack"), ("trainer", "cuda/run")])
def test_cuda_folders_give_a_gpu(name: str, folder: str) -> None:
    assert container(name, folder)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container(name, folder)["image"] == f"gristmill/{name}:local-cuda"
    devices = {one["value"] for one in container(name, folder).get("env", []) if one["name"] == "DEVICE"}
    assert devices == ({"cuda"} if name == "model" else set())


def test_config_names_a_file_of_this_repository() -> None:
    data = next(iter(kinds("run", "ConfigMap").values()))["data"]
    assert (ROOT / "configs" / f"{data['CONFIG']}.yaml").exists()
    assert container("env")["args"] == ["--config", "$(CONFIG)"]
