"""A Slurm cluster with several nodes on this machine: Debian's slurmctld, munged, and one slurmd per node.

The nodes are named by addresses of loopback: 127.0.0.1, 127.0.0.2, ... So every program resolves their names. The nodes
are otherwise the same machine: they share its processes, its ports on the wildcard address, and its files. All daemons
belong to this process, listen on their own ports, and keep their state in one folder. A Slurm of the machine itself is
not touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.ports import free_port

from gristmill_cli.local.processes import LocalStack, Service

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_REMEDY = "scripts/prepare_package.sh slurm installs it"
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=0
"""


class SlurmCluster:
    """A running cluster, and the commands that tests send to it."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.folder = folder
        self.nodes = nodes
        self.daemons: dict[str, Service] = {}
        """The slurmd of each node."""
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        """Variables for the commands of Slurm."""

    def run(self, *command: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Returns the standard output of a command. Raises AssertionError with its other output if it fails."""
        variables = {**os.environ, **self.environ, **(environ or {})}
        done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def states(self, job: str) -> set[str]:
        """Returns the states of the job's components, such as {"RUNNING"}; an empty set once the job is over."""
        return set(self.run("squeue", "--noheader", "--jobs", job, "--format=%T").split())

    def steps(self) -> dict[str, tuple[str, list[str]]]:
        """Returns the running steps of all jobs by name: the id of each step, and its nodes."""
        rows = self.run("squeue", "--noheader", "--steps", "--format=%j %i %N").splitlines()
        fields = [row.split() for row in rows]
        return {name: (step, self.run("scontrol", "show", "hostnames", nodes).split()) for name, step, nodes in fields}

    def cancel_step(self, step: str) -> None:
        """Sends SIGKILL to a step. In a heterogeneous job, scancel cancels a step of the first component, and then
        fails because the other component has no such step. So the caller checks the effect."""
        subprocess.run(["scancel", step], env={**os.environ, **self.environ}, timeout=60, check=False)

    def update(self, kind: str, name: str, **values: str) -> None:
        """Changes a node or a job: `update("node", "127.0.0.1", state="drain", reason="a test")`."""
        self.run("scontrol", "update", f"{kind}={name}", *(f"{key}={value}" for key, value in values.items()))

    def lose(self, node: str) -> None:
        """Ends all processes of a node, as a power failure does, and tells Slurm, which would notice after minutes.

        With a living slurmd, a node that is set to `down` returns to service at once. Slurm 22.05 may then give it to
        the next start of the same job, and take it away when it reports the end of the start before.
        """
        self.daemons[node].process.kill()
        self.daemons[node].process.wait()
        self.update("nodename", node, state="down", reason="test")
        marks = {f"{name}={value}".encode() for name, value in {**self.environ, "SLURMD_NODENAME": node}.items()}
        for process in Path("/proc").glob("[0-9]*"):
            # Processes may end at any time, and the environment of other users' processes cannot be read.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if marks <= set((process / "environ").read_bytes().split(b"\0")):
                    os.kill(int(process.name), signal.SIGKILL)

    def start_now(self, job: str) -> None:
        """Starts a job that returned to the queue without Slurm's delay of two minutes."""
        self.wait(lambda: self.states(job) == {"PENDING"}, f"job {job} is queued")
        self.update("jobid", job, starttime="now")

    def wait(self, condition: Callable[[], bool], what: str, timeout: float = 600) -> None:
        """Waits until `condition()`. Raises AssertionError with `what` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
            time.sleep(1)


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int) -> Iterator[SlurmCluster]:
    """Starts a cluster in `folder`, and stops it with its jobs at the end.

    Skips the test if Slurm is not installed or the tests do not run as root; in CI the test fails.
    """
    missing = [f"no {name} in PATH: {_REMEDY}" for name in _PROGRAMS if _path(name) is None]
    missing += ["a Slurm cluster needs root"] if os.geteuid() != 0 else []
    if missing and os.environ.get("CI") != "true":
        pytest.skip("; ".join(missing))
    assert not missing, "; ".join(missing)
    names = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
    for name in ("state", "munge"):
        (folder / name).mkdir(parents=True)
    cluster = SlurmCluster(folder, names)
    with tempfile.TemporaryDirectory(prefix="slurm-") as spool, LocalStack(logs=folder / "logs") as stack:
        _write_config(folder, Path(spool), names)
        _start(stack, folder, names, cluster)
        try:
            yield cluster
        finally:
            # Processes of steps belong to no daemon, so stopping the daemons would leave them.
            cluster.run("scancel", "--user=root", "--full")
            cluster.wait(lambda: not cluster.run("squeue", "--noheader"), "all jobs are over", timeout=90)


def _start(stack: LocalStack, folder: Path, names: list[str], cluster: SlurmCluster) -> None:
    munge = folder / "munge"
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = {"socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    munged = stack.start("munged", [_named("munged"), "--foreground", "--force", f"--key-file={key}", *options])
    stack.wait_until(munged, (munge / "socket").exists, timeout=60)
    controller = stack.start("slurmctld", [_named("slurmctld"), "-D"], cluster.environ)
    for name in names:
        cluster.daemons[name] = stack.start(f"slurmd-{name}", [_named("slurmd"), "-D", "-N", name], cluster.environ)

    def ready() -> bool:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env={**os.environ, **cluster.environ}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return asked.stdout.split() == ["idle"] * len(names)

    stack.wait_until(controller, ready, timeout=120)


def _write_config(folder: Path, spool: Path, names: list[str]) -> None:
    """`spool`: a folder with a short path, because the paths of slurmd's Unix sockets have at most 107 bytes."""
    host = socket.gethostname().partition(".")[0]
    lines = [_CONFIG.format(host=host, port=free_port(), folder=folder, spool=spool)]
    # More processors than the machine may have, because steps of one node share them in any case.
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={free_port()} CPUs=4 RealMemory=8000"
        for name in names
    ]
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _path(name: str) -> str | None:
    """Returns the path of a program. The daemons are in a folder that users' PATH may lack."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin")


def _named(name: str) -> str:
    found = _path(name)
    assert found is not None, f"no {name}: {_REMEDY}"
    return found
