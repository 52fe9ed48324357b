"""The output of `docker compose config` for clones, and for machines with NVIDIA GPUs. Needs no engine and no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.compose import ROOT

from gristmill_model.settings import Settings


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    """None is needed here."""


def printed(folder: Path, **settings: str) -> dict[str, Any]:
    """The configuration of a clone in `folder`, for the settings that a user writes into .env."""
    environ = {"PATH": os.environ["PATH"], **settings}
    command = ["docker", "compose", "--env-file", os.devnull, "config"]
    done = subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, text=True)
    assert done.stderr == "", "Compose warns of variables without a default"
    read: dict[str, Any] = yaml.safe_load(done.stdout)
    return read


def config(**settings: str) -> dict[str, Any]:
    services: dict[str, Any] = printed(ROOT, **settings)["services"]
    return services


def environment(service: dict[str, Any]) -> dict[str, str]:
    """The variables of the container. A variable that `compose config` prints as null is not passed on."""
    return {name: value for name, value in service["environment"].items() if value is not None}


def test_two_clones_have_containers_and_volumes_of_their_own(tmp_path: Path) -> None:
    clones = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / "compose.yaml", tmp_path / folder)
        shutil.copytree(ROOT / "compose", tmp_path / folder / "compose")
        clones.append(printed(tmp_path / folder))
    first, second = ({volume["name"] for volume in clone["volumes"].values()} for clone in clones)
    assert [clone["name"] for clone in clones] == ["first", "second"]
    assert first
    assert first.isdisjoint(second)
    assert printed(tmp_path / "first", COMPOSE_PROJECT_NAME="mine")["name"] == "mine"


def gpus(service: dict[str, Any]) -> list[str]:
    """The GPUs that CUDA shows the service. The container has all GPUs, by a request that engines with CDI accept."""
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}
    visible: str = service["environment"]["CUDA_VISIBLE_DEVICES"]
    return visible.split(",")


@pytest.mark.parametrize(
    ("given", "model_gpus", "trainer_gpus", "memory"),
    [
        pytest.param({}, ["0"], ["0"], 0.45, id="one"),
        pytest.param({"TRAINER_GPU": "1"}, ["0"], ["1"], 0.85, id="two"),
        pytest.param({"MODEL_GPU": "0,1", "TRAINER_GPU": "2,3"}, ["0", "1"], ["2", "3"], 0.85, id="four"),
    ],
)
def test_cuda_services_get_their_gpus(
    given: dict[str, str], model_gpus: list[str], trainer_gpus: list[str], memory: float
) -> None:
    services = config(DEVICE="cuda", **given)
    model, trainer = services["model"], services["trainer"]
    assert (gpus(model), gpus(trainer)) == (model_gpus, trainer_gpus)
    read = Settings.read(environment(model), cuda_available=True)
    assert (read.device, read.gpu_memory, read.tensor_parallel) == ("cuda", memory, len(model_gpus))
    assert read.cuda_graphs
    assert not read.sleep
    for service in (model, trainer):
        assert service["build"]["target"] == "cuda"
        assert service["image"].endswith("-cuda")
        assert int(service.get("mem_limit", 0)) == 0, "a 7B model needs more than any limit that fits a CPU"
        assert int(service["shm_size"]) == 8 << 30
        assert service["read_only"]
        assert service["pids_limit"]


def test_settings_for_gpus_reach_the_model_service() -> None:
    services = config(
        DEVICE="cuda",
        MODEL_GPU="0,1,2,3",
        MODEL_TENSOR_PARALLEL="2",
        GPU_MEMORY_UTILIZATION="0.3",
        MODEL_CUDA_GRAPHS="0",
        MODEL_SLEEP="1",
        VLLM_ARGS="--data-parallel-size 2",
        TRAINER_MEMORY="200g",
    )
    read = Settings.read(environment(services["model"]), cuda_available=True)
    assert (read.tensor_parallel, read.gpu_memory, read.cuda_graphs, read.sleep) == (2, 0.3, False, True)
    assert read.vllm_args == ("--data-parallel-size", "2")
    assert int(services["trainer"]["mem_limit"]) == 200 << 30


def test_variables_without_a_value_are_passed_on_if_they_are_set() -> None:
    assert "LORA_RANK" not in environment(config()["model"])
    assert environment(config(LORA_RANK="16")["model"])["LORA_RANK"] == "16"
    assert environment(config(LORA_RANK="")["model"])["LORA_RANK"] == ""
    mirrored = config(HF_ENDPOINT="https://hub.example")
    assert {environment(mirrored[name])["HF_ENDPOINT"] for name in ("model", "env", "trainer")} == {
        "https://hub.example"
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("registry", "prefix", "policy"), [("", "", "never"), ("hub.example/me", "hub.example/me/", "missing")]
)
def test_images_are_pulled_only_with_a_registry(device: str, registry: str, prefix: str, policy: str) -> None:
    services = config(IMAGE_REGISTRY=registry, TAG="1", DEVICE=device, COMPOSE_PROFILES="agent")
    ours = {name: service for name, service in services.items() if name != "redis"}
    assert {name: service["image"] for name, service in ours.items()} == {
        "api": f"{prefix}gristmill/api:1",
        "model-port": f"{prefix}gristmill/api:1",
        "model": f"{prefix}gristmill/model:1-{device}",
        "trainer": f"{prefix}gristmill/trainer:1-{device}",
        "env": f"{prefix}gristmill/env:1",
        "agent": f"{prefix}gristmill/env:1",
    }
    assert {service["pull_policy"] for service in ours.values()} == {policy}
    assert all("build" in service for name, service in ours.items() if name != "agent")


def test_monitoring_profile_adds_two_services_to_the_network_of_the_stack() -> None:
    monitored = printed(ROOT, COMPOSE_PROFILES="monitoring", SECRETS_DIR="./secrets", GRAFANA_PORT="3333")
    services = monitored["services"]
    assert set(services) - set(config()) == {"prometheus", "grafana"}
    for name in ("prometheus", "grafana"):
        assert set(services[name]["networks"]) == set(services["api"]["networks"]) == {"stack"}
        mounts = [Path(mount["source"]) for mount in services[name]["volumes"] if mount["type"] == "bind"]
        assert [mount for mount in mounts if not mount.exists()] == []
        assert len(mounts) == 2
    assert services["grafana"]["ports"][0]["published"] == "3333"
    assert services["prometheus"]["secrets"][0]["source"] == "token_env"
    assert Path(monitored["secrets"]["token_env"]["file"]) == ROOT / "secrets" / "env"
    assert "prometheus" in monitored["volumes"]


def test_openenv_profile_adds_a_server_that_only_the_environment_reaches() -> None:
    read = printed(ROOT, COMPOSE_PROFILES="openenv", OPENENV_IMAGE="my-game")
    services, server = read["services"], read["services"]["openenv"]
    assert set(services) - set(config()) == {"openenv"}
    assert (server["image"], set(server["networks"])) == ("my-game", {"openenv"})
    assert {name for name, service in services.items() if "openenv" in service.get("networks", {})} == {
        "env",
        "openenv",
    }
    assert read["networks"]["openenv"]["internal"] is True
    assert server["cap_drop"] == ["ALL"]
    assert not {"ports", "volumes", "secrets"} & set(server)


def test_cpu_services_have_limits_and_no_gpus() -> None:
    services = config()
    for name in ("model", "trainer"):
        assert services[name]["build"]["target"] == "cpu"
        assert int(services[name]["mem_limit"]) == 12 << 30
        assert "deploy" not in services[name]
