"""Checks of this machine, and of a run before and after its training.

`examine` measures this machine, and `checks` decides. Each check names what it found, and the lines of `.env` that fit
this machine.

`before_run` and `after_run` gather the checks of a run. Each service checks the parts that it owns, in its module
`doctor`: the API Redis, the environment its data, rewards and model server, and the trainer the model. The package of a
service may not be installed here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import httpx
import msgspec

from gristmill.errors import ConfigError
from gristmill.folders import RunFolder
from gristmill.internal import connections
from gristmill.internal.archive_writer import MIN_FREE_BYTES
from gristmill.internal.check import Check, read_memory
from gristmill.internal.trouble import CODES
from gristmill_cli.local.options import PORTS, read_port
from gristmill_view import run_checks

if TYPE_CHECKING:
    from gristmill_env.run_settings import RunSettings

_GIB = 1024**3
_TIMEOUT = 10.0
_HUB: Final = "https://huggingface.co"
_HUB_TIMEOUT = 4.0
ENOUGH_MEMORY: Final = 16 * _GIB
"""The default limits of the containers on a CPU add up to more, but the quickstart uses far less."""
LEAST_MEMORY: Final = 4 * _GIB
ENOUGH_DISK: Final = 20 * _GIB
LEAST_DRIVER: Final = 580
"""The driver for CUDA 13, which vLLM's image needs."""
LEAST_ENGINE: Final = 28
"""Before Docker 28, machines on the same network could reach ports that are published on 127.0.0.1."""

PortUse = Literal["free", "ours", "taken"]


class Gpu(msgspec.Struct, frozen=True):
    """One NVIDIA GPU."""

    index: int
    name: str
    memory_mib: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The measurements. None: the value could not be found out, or does not exist."""

    ports: Mapping[str, tuple[int, PortUse]]
    """Variable of `.env` to the port and its use."""
    memory: int | None
    """Bytes that processes here may use."""
    disk: tuple[Path, int] | None
    """Folder, and the free bytes on its disk."""
    cores: int
    engine: str | None
    """Version of the Docker engine that answers."""
    compose: str | None
    runtimes: str = ""
    """Docker's runtimes, which name NVIDIA's toolkit."""
    gpus: Sequence[Gpu] = ()
    driver: str | None = None
    hub: str = _HUB
    hub_problem: str | None = None
    offline: bool = False
    """HF_HUB_OFFLINE is set."""
    set_up: bool = False
    """`make setup` has run in this folder."""


def checks(machine: Machine) -> list[Check]:
    """Returns what the measurements mean."""
    return [
        *_ports(machine), _memory(machine), _disk(machine), _engine(machine), _gpu(machine), _hub(machine),
    ]  # fmt: skip


def _ports(machine: Machine) -> Iterator[Check]:
    used = {port for port, _ in machine.ports.values()}
    for variable, (port, use) in machine.ports.items():
        if use == "free":
            yield Check(f"port {port}", "ok", "free")
        elif use == "ours":
            yield Check(f"port {port}", "ok", "a service of Gristmill answers")
        else:
            others = (*range(port + 1, 2**16), *range(port - 1, 1023, -1))
            other = next(number for number in others if number not in used)
            used.add(other)
            text = "another program listens there: stop it, or take another port (make local: --api_port, --model_port)"
            yield Check(f"port {port}", "failed", text, (f"{variable}={other}",))


def _memory(machine: Machine) -> Check:
    if machine.memory is None:
        return Check("memory", "warning", "unknown: /proc/meminfo cannot be read")
    size = f"{machine.memory / _GIB:.0f} GiB, {machine.cores} cores"
    if machine.memory >= ENOUGH_MEMORY:
        return Check("memory", "ok", size)
    whole = max(int(machine.memory / _GIB), 1)
    lines = (
        f"MODEL_MEMORY={max(whole * 2 // 5, 2)}g",
        f"TRAINER_MEMORY={max(whole * 2 // 5, 2)}g",
        f"ENV_MEMORY={max(whole // 6, 1)}g",
        "REDIS_MAXMEMORY=512mb",
        "REDIS_MEMORY=1g",
        "API_MEMORY=1g",
    )
    if machine.memory < LEAST_MEMORY:
        return Check("memory", "failed", f"{size}: too little even for `tiny`, which needs about 4 GiB", lines)
    return Check("memory", "warning", f"{size}: enough for small models; these limits fit", lines)


def _disk(machine: Machine) -> Check:
    if machine.disk is None:
        return Check("disk", "warning", "unknown")
    folder, free = machine.disk
    text = f"{free / _GIB:.0f} GiB free at {folder}"
    if free < MIN_FREE_BYTES:
        return Check("disk", "failed", f"{text}: {CODES['disk_floor'].remedy}", code="disk_floor")
    if free < ENOUGH_DISK:
        lines = (f"API_ARCHIVE_MAX_BYTES={max(free // 4 // _GIB, 1) * _GIB}",)
        return Check("disk", "warning", f"{text}: checkpoints and archives of a run take about 10 GiB at most", lines)
    return Check("disk", "ok", text)


def _engine(machine: Machine) -> Check:
    local = "`make local` needs none" if machine.set_up else "`make local` needs none, only Python 3.11 and make"
    if machine.engine is None:
        return Check("container engine", "warning", f"no Docker engine answers; {local}")
    if machine.compose is None:
        return Check("container engine", "warning", f"Docker {machine.engine} without the compose plug-in; {local}")
    text = f"Docker {machine.engine}, compose {machine.compose}"
    major = machine.engine.partition(".")[0]
    if major.isdecimal() and int(major) < LEAST_ENGINE:
        return Check(
            "container engine",
            "warning",
            f"{text}: before {LEAST_ENGINE}, the local network can reach ports that are published on 127.0.0.1; "
            "update it",
        )
    return Check("container engine", "ok", text)


def _gpu(machine: Machine) -> Check:
    if not machine.gpus:
        return Check("GPU", "ok", "none found: everything runs on the CPU", ("DEVICE=cpu",))
    names = ", ".join(sorted({f"{gpu.name} ({gpu.memory_mib / 1024:.0f} GiB)" for gpu in machine.gpus}))
    text = f"{len(machine.gpus)} × {names}, driver {machine.driver}"
    model, trainer = split_gpus([gpu.index for gpu in machine.gpus])
    lines = ("DEVICE=cuda", f"MODEL_GPU={','.join(map(str, model))}", f"TRAINER_GPU={','.join(map(str, trainer))}")
    major = (machine.driver or "").partition(".")[0]
    if major.isdecimal() and int(major) < LEAST_DRIVER:
        return Check("GPU", "failed", f"{text}: CUDA 13 needs driver {LEAST_DRIVER} or newer", lines)
    if machine.engine is not None and "nvidia" not in machine.runtimes:
        return Check(
            "GPU",
            "warning",
            f"{text}: Docker has no NVIDIA runtime; install the NVIDIA container toolkit, or use `make local`",
            lines,
        )
    return Check("GPU", "ok", text, lines)


def split_gpus(indexes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the GPUs of the model server and of the trainer: halves, whose size is a power of two.

    vLLM splits attention heads over its GPUs, and their number is rarely divisible by three.
    """
    if len(indexes) == 1:
        return [*indexes], [*indexes]
    half = 1
    while half * 4 <= len(indexes):
        half *= 2
    return [*indexes[:half]], [*indexes[half : 2 * half]]


def _hub(machine: Machine) -> Check:
    if machine.offline:
        return Check("hub", "ok", "HF_HUB_OFFLINE is set: only files in the cache are used", ("HF_HUB_OFFLINE=1",))
    if machine.hub_problem is None:
        return Check("hub", "ok", f"{machine.hub} answers")
    return Check(
        "hub",
        "warning",
        f"{machine.hub} does not answer ({machine.hub_problem}): `tiny`, `smollm2` and local data work without it",
        ("HF_HUB_OFFLINE=1",),
    )


# --- Runs ------------------------------------------------------------------------------------------------------
def before_run(config: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a configuration and of the services that would train it.

    `config`: name or path of a run's YAML. `environ`: the GRISTMILL_* variables and REDIS_URL.
    """
    if (missing := _missing("gristmill_api")) is not None:
        yield missing
    else:
        from gristmill_api import doctor as api

        yield from api.before_run(config, environ)
    if (missing := _missing("gristmill_env")) is not None:
        yield missing
    else:
        from gristmill_env import doctor as env

        yield from env.before_run(config, environ)
    if (missing := _missing("gristmill_trainer")) is not None:
        yield missing
    else:
        from gristmill_trainer import doctor as trainer

        yield from trainer.before_run(config, environ)


def beyond_check(run: RunSettings, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of `before_run` that `gristmill check` adds to its own, with the settings `run`."""
    from gristmill_env import doctor as env

    yield from env.beyond_check(run)
    if (missing := _missing("gristmill_api")) is not None:
        yield missing
    else:
        from gristmill_api import doctor as api

        yield from api.before_run("", environ)
    if (missing := _missing("gristmill_trainer")) is not None:
        yield missing
    else:
        from gristmill_trainer import doctor as trainer
        from gristmill_trainer.settings import read_settings

        try:
            settings = read_settings(run.deployment.config_dir, run.config.trainer_block(), {}, str(run.config_path))
        except ConfigError as error:
            yield Check("trainer settings", "failed", error.report())
            return
        yield from trainer.check_settings(settings, run.config.dataset.temperature, run.deployment)


def after_run(run: RunFolder, config: str | None, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a run's files: first the archive's checks, then the installed packages' checks.

    `config`: name or path of the run's YAML, with which the rewards are computed again; None: the run's id.
    """
    yield from run_checks.check_files(run)
    config = config or run.run_id  # The API keeps no part of a run except the archive.
    if (missing := _missing("gristmill_env")) is not None:
        yield missing
    else:
        from gristmill_env import doctor as env

        yield from env.after_run(run, config, environ)
    if (missing := _missing("gristmill_trainer")) is not None:
        yield missing
    else:
        from gristmill_trainer import doctor as trainer

        yield from trainer.after_run(run, config, environ)


def _missing(package: str) -> Check | None:
    if importlib.util.find_spec(package) is not None:
        return None
    return Check(package, "warning", f"not checked: the package {package} is not installed in this Python")


# --- Measuring -------------------------------------------------------------------------------------------------
def examine(environ: Mapping[str, str], folder: Path) -> Machine:
    """Measures this machine. `environ`: with API_PORT, MODEL_PORT, HF_ENDPOINT. `folder`: where runs are kept.

    Raises ConfigError for a port that is not valid."""
    ports = {name.upper(): read_port(name, environ) for name in PORTS}
    hub = (environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    gpus, driver = _read_gpus()
    return Machine(
        ports={name: (port, port_use(port)) for name, port in ports.items()},
        memory=read_memory(),
        disk=_read_disk(folder),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        engine=_output("docker", "version", "--format", "{{.Server.Version}}"),
        compose=_output("docker", "compose", "version", "--short"),
        runtimes=_output("docker", "info", "--format", "{{json .Runtimes}} {{json .CDISpecDirs}}") or "",
        gpus=gpus,
        driver=driver,
        hub=hub,
        hub_problem=None if offline else _hub_problem(hub),
        offline=offline,
        set_up=Path(".venv/bin/python").exists(),
    )


def port_use(port: int) -> PortUse:
    """Returns whether a port of loopback is free, or which program listens there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return "free"
    try:
        with connections.client(f"http://127.0.0.1:{port}", timeout=2.0) as http:
            is_api = "paths" in http.get("/openapi.json").text[:100_000] and http.get("/healthz").is_success
            is_ours = is_api or http.get("/weight_info").is_success
    except httpx.HTTPError:
        return "taken"
    return "ours" if is_ours else "taken"


def _read_disk(folder: Path) -> tuple[Path, int] | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return folder.absolute(), shutil.disk_usage(folder).free
    except OSError:
        return None


def _read_gpus() -> tuple[list[Gpu], str | None]:
    text = _output("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")
    gpus, driver = [], None
    for line in (text or "").splitlines():
        fields: list[Any] = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdecimal() and fields[2].isdecimal():
            gpus.append(Gpu(int(fields[0]), fields[1], int(fields[2])))
            driver = fields[3]
    return gpus, driver


def _hub_problem(url: str) -> str | None:
    try:
        with connections.client(url, timeout=_HUB_TIMEOUT) as http:
            http.head("")
    except httpx.HTTPError as error:
        return type(error).__name__
    except ConfigError as error:
        return str(error)
    return None


def _output(*command: str) -> str | None:
    """Returns what a command prints, or None if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
