"""The machine and the versions with which the figures were measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from redis_binary import redis_server

_ROOT = Path(__file__).parents[2]


def hardware() -> dict[str, str]:
    """Returns hardware, command and time, in the order of the report."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": _commit(),
        "processor": f"{_first('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def facts(atropos_python: Path) -> dict[str, str]:
    """Returns `hardware` and the versions of the trajectory API's parts."""
    return hardware() | {
        "redis": _output(str(redis_server()), "--version").split(" sha=")[0],
        "python": platform.python_version(),
        "ours": _versions(sys.executable),
        "reference": _versions(str(atropos_python)),
    }


def training(device: str) -> dict[str, str]:
    """Returns the versions and the hardware that compute a training step. `device`: "cpu" or "cuda"."""
    import torch

    versions = [_version(name) for name in ("torch", "transformers", "trl", "peft", "flash_attn", "numpy")]
    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": card, "python": platform.python_version(), "versions": ", ".join(filter(None, versions))}


def _versions(python: str) -> str:
    """Returns the versions of the packages that serve HTTP in the environment of `python`."""
    names = ("atroposlib", "fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools", "redis", "hiredis")
    if python == sys.executable:
        found = [_version(name) for name in names]
    else:
        code = (
            "import importlib.metadata as m\n"
            f"have = {{d.name.lower(): d.version for d in m.distributions()}}\n"
            f"print(*(f'{{n}} {{have[n]}}' for n in {names} if n in have), sep='\\n')"
        )
        found = _output(python, "-c", code).splitlines()
    return ", ".join(filter(None, found))


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def _commit() -> str:
    """Returns the commit, or "unknown" without a git history or without git."""
    try:
        return _output("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
