"""The machine and the versions with which the figures were measured, and the memory and time of processes."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from gristmill_cli.local.redis_server import redis_server

_ROOT = Path(__file__).parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")


def hardware() -> dict[str, str]:
    """Returns hardware, command and time, in the order of the report."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(),
        "commit": _commit(),
        "processor": f"{_first('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def command() -> str:
    """Returns the command line, as a user types it in the repository's folder."""
    program = Path(sys.argv[0]).resolve()
    name = program.parent.name if program.name == "__main__.py" else program.stem
    return shlex.join(["python", "-m", "benchmarks", name, *sys.argv[1:]])


def facts(atropos_python: Path) -> dict[str, str]:
    """Returns `hardware` and the versions of the trajectory API's parts."""
    return {
        **hardware(),
        **redis(),
        "ours": _versions(sys.executable),
        "reference": _versions(str(atropos_python)),
    }


def redis() -> dict[str, str]:
    """Returns the versions of Redis and Python."""
    version = _output(str(redis_server()), "--version").split(" sha=")[0]
    return {"redis": version, "python": platform.python_version()}


def training(device: str) -> dict[str, str]:
    """Returns the versions and the hardware that compute a training step. `device`: "cpu" or "cuda"."""
    import torch

    versions = [_version(name) for name in ("torch", "transformers", "trl", "peft", "flash_attn", "numpy")]
    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": card, "python": platform.python_version(), "versions": ", ".join(filter(None, versions))}


def peak_rss(pid: int) -> int:
    """Returns the process' peak resident memory, in bytes."""
    return _status(pid, "VmHWM")


def rss(pid: int) -> int:
    """Returns the process' resident memory, in bytes."""
    return _status(pid, "VmRSS")


def cpu_seconds(*pids: int) -> float:
    """Returns the user and system time of the processes so far, in seconds."""
    used = 0
    for pid in pids:
        # Field 2, the name, is in parentheses and may hold any text. User and system time are fields 14 and 15.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / _TICKS


def with_children(pid: int) -> list[int]:
    """Returns the process and all processes that it started and that have not ended."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended meanwhile
            for child in (task / "children").read_text().split():
                pids += with_children(int(child))
    return pids


def _versions(python: str) -> str:
    """Returns the versions of the packages that serve HTTP in the environment of `python`."""
    names = ("atroposlib", "fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools", "redis", "hiredis")
    if python == sys.executable:
        versions = [_version(name) for name in names]
    else:
        code = (
            "import importlib.metadata as m\n"
            f"have = {{d.name.lower(): d.version for d in m.distributions()}}\n"
            f"print(*(f'{{n}} {{have[n]}}' for n in {names} if n in have), sep='\\n')"
        )
        versions = _output(python, "-c", code).splitlines()
    return ", ".join(filter(None, versions))


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


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no {name}, because it has ended")
