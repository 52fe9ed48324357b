"""The doctor's verdicts on recorded machines."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.internal.check import Check
from gristmill_cli.doctor import Gpu, Machine, beyond_check, checks, examine, port_use, split_gpus
from gristmill_env.run_settings import RunSettings

GIB = 1024**3
LAPTOP = Machine(
    ports={"API_PORT": (8000, "free"), "MODEL_PORT": (9001, "free")}, memory=32 * GIB, disk=(Path("runs"), 100 * GIB),
    cores=8, engine="28.5.1", compose="2.40.0", hub_problem=None,
)  # fmt: skip
H100 = [Gpu(number, "NVIDIA H100", 81559) for number in range(4)]


def found(**changes: Any) -> dict[str, Check]:
    return {check.name: check for check in checks(replace(LAPTOP, **changes))}


def test_good_machine_has_no_complaint() -> None:
    assert {check.state for check in checks(LAPTOP)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "changes", "state", "env"),
    [
        (
            "port 8000",
            {"ports": {"API_PORT": (8000, "taken"), "MODEL_PORT": (8001, "free")}},
            "failed",
            ("API_PORT=8002",),
        ),
        ("port 8000", {"ports": {"API_PORT": (8000, "ours")}}, "ok", ()),
        ("memory", {"memory": 3 * GIB}, "failed", None),
        ("memory", {"memory": 10 * GIB}, "warning", None),
        ("memory", {"memory": None}, "warning", ()),
        ("disk", {"disk": (Path("runs"), GIB)}, "failed", ()),
        ("disk", {"disk": (Path("runs"), 12 * GIB)}, "warning", (f"API_ARCHIVE_MAX_BYTES={3 * GIB}",)),
        ("container engine", {"engine": None}, "warning", ()),
        ("container engine", {"compose": None}, "warning", ()),
        ("container engine", {"engine": "27.0.3"}, "warning", ()),
        ("GPU", {}, "ok", ("DEVICE=cpu",)),
        (
            "GPU",
            {"gpus": H100[:1], "driver": "580.65.06", "runtimes": "nvidia"},
            "ok",
            ("DEVICE=cuda", "MODEL_GPU=0", "TRAINER_GPU=0"),
        ),
        (
            "GPU",
            {"gpus": H100, "driver": "580.65.06", "runtimes": "nvidia"},
            "ok",
            ("DEVICE=cuda", "MODEL_GPU=0,1", "TRAINER_GPU=2,3"),
        ),
        ("GPU", {"gpus": H100[:1], "driver": "550.54", "runtimes": "nvidia"}, "failed", None),
        ("GPU", {"gpus": H100[:1], "driver": "580.65", "runtimes": "runc"}, "warning", None),
        ("GPU", {"gpus": H100[:1], "driver": "580.65", "engine": None}, "ok", None),
        ("hub", {"hub_problem": "ConnectError"}, "warning", ("HF_HUB_OFFLINE=1",)),
        ("hub", {"hub_problem": None, "offline": True}, "ok", ("HF_HUB_OFFLINE=1",)),
    ],
)
def test_doctor_reports_the_state_of_each_check(
    name: str, changes: dict[str, Any], state: str, env: tuple[str, ...] | None
) -> None:
    check = found(**changes)[name]
    assert check.state == state
    if env is not None:
        assert check.env == env


@pytest.mark.parametrize(
    ("count", "model", "trainer"),
    [(1, [0], [0]), (2, [0], [1]), (3, [0], [1]), (4, [0, 1], [2, 3]), (8, [0, 1, 2, 3], [4, 5, 6, 7])],
)
def test_split_gpus_divides_gpus_between_model_and_trainer(count: int, model: list[int], trainer: list[int]) -> None:
    assert split_gpus(range(count)) == (model, trainer)


def test_lines_of_env_are_variables_of_compose() -> None:
    known = (Path(__file__).parents[3] / ".env.example").read_text()
    machines: list[dict[str, Any]] = [
        {"memory": 10 * GIB}, {"gpus": H100}, {"disk": (Path(), 12 * GIB)}, {"hub_problem": "x"},
        {"ports": {"API_PORT": (8000, "taken"), "MODEL_PORT": (9001, "taken")}},
    ]  # fmt: skip
    for changes in machines:
        for line in (line for check in found(**changes).values() for line in check.env):
            assert re.search(rf"^(# ?)?{line.partition('=')[0]}=", known, re.MULTILINE), line


@pytest.mark.slow
def test_examine_measures_this_machine(tmp_path: Path) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        free.bind(("127.0.0.1", 0))
        taken.listen()
        environ = {"API_PORT": str(taken.getsockname()[1]), "MODEL_PORT": str(free.getsockname()[1])}
        taken.settimeout(0.1)
        machine = examine({**environ, "HF_HUB_OFFLINE": "1"}, tmp_path / "not" / "there")
    assert machine.ports["MODEL_PORT"][1] == "free"
    assert machine.ports["API_PORT"][1] == "taken"
    assert machine.memory is not None
    assert machine.memory > GIB
    assert machine.disk is not None
    assert machine.disk[1] > 0
    assert machine.hub_problem is None


def test_free_port_is_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert port_use(probe.getsockname()[1]) == "free"


@pytest.mark.slow
def test_check_adds_the_checks_of_all_services(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    places = {"GRISTMILL_MODELS_DIR": str(tmp_path), "GRISTMILL_CONFIG_DIR": str(tmp_path)}
    places |= {"GRISTMILL_MODEL_URL": "http://127.0.0.1:1"}
    flags = ["--dataset_path", str(tmp_path / "rows.jsonl")]
    flags += ["--prompt_field", "question", "--answer_field", "answer", "--reward_functions", "accuracy"]
    run = RunSettings.read(flags, places, "test")
    states = {check.name: check.state for check in beyond_check(run, {"REDIS_URL": "redis://127.0.0.1:1/0"})}
    assert states == {
        "chat template": "warning", "rewards": "ok", "model server http://127.0.0.1:1": "warning", "redis": "warning",
        "model": "warning",
    }  # fmt: skip
