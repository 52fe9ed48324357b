"""Faults in the containers of a stack: kills, stops, restarts, network cuts, a full disk, and steps of the clock.

Needs root on the machine of the Docker engine, for signals to the processes of containers, packet filters in their
network namespaces, and a file system whose size can change.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.compose import ComposeStack

CLOCK_STEP_S = 3600
_SOURCE = Path(__file__).with_name("step_clock.c")
_LIBRARY = "step_clock.so"
_IN_CONTAINER = "/clock"
_SOCKET, _HIDDEN = "/run/redis/redis.sock", "/run/redis/hidden.sock"
_ROOM = "8g"
_OWNERS = {"redis": 999, "rollouts": 10001, "runs": 10001, "weights": 10001, "env-files": 10001}
"""The volumes on the disk that can be full, and the users that own them in the images."""


class Kind(StrEnum):
    """A kind of fault, as the table of docs/reliability.md names it."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP, then SIGCONT"
    RESTART = "restart"
    DISCONNECT = "network of the service cut"
    CUT = "network between the two cut"
    DISK = "disk full"
    FORWARD = "clock 1 h forward"
    BACK = "clock 1 h back"


@dataclass(frozen=True)
class Fault:
    """One fault. `services`: the service, or the two services of a `Kind.CUT`, or all that use the disk."""

    kind: Kind
    services: tuple[str, ...]

    @property
    def lasts(self) -> bool:
        """Whether the fault continues until it is healed. The other faults are events."""
        return self.kind in (Kind.STOP, Kind.DISCONNECT, Kind.CUT, Kind.DISK)

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.services)}"


class Clocks:
    """A wall clock per service, which `step` moves. The services see it through a library in `folder`."""

    def __init__(self, folder: Path, services: Iterable[str]) -> None:
        self._folder = folder
        self._offsets = dict.fromkeys(services, 0)
        folder.mkdir()
        command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-o", str(folder / _LIBRARY), str(_SOURCE)]
        subprocess.run(command, check=True)
        for service in self._offsets:
            self.step(service, 0)

    def step(self, service: str, seconds: int) -> None:
        """Moves the service's wall clock by `seconds`, at once and until the next step."""
        self._offsets[service] += seconds
        # Into the same file, because each process has mapped it.
        file = os.open(self._folder / service, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, struct.pack("=q", self._offsets[service]), 0)
        finally:
            os.close(file)

    def environment(self, service: str, folder: str = _IN_CONTAINER) -> dict[str, str]:
        """Returns the variables with which a process uses the clock. `folder`: where the process sees the files."""
        return {"LD_PRELOAD": f"{folder}/{_LIBRARY}", "STEP_CLOCK": f"{folder}/{service}"}

    def mount(self) -> str:
        """Returns the mount of the files into a container, in Compose's short form."""
        return f"{self._folder}:{_IN_CONTAINER}:ro"


class Disk:
    """A file system in memory with the volumes that the services write to. Its size can change while it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def volumes(self) -> dict[str, object]:
        """Returns Compose's definitions of the volumes."""
        return {
            name: {"driver": "local", "driver_opts": {"type": "none", "o": "bind", "device": str(self.folder / name)}}
            for name in _OWNERS
        }

    def fill(self) -> None:
        """Leaves no free block: writes fail with ENOSPC."""
        for _ in range(100):
            look = os.statvfs(self.folder)
            # Refused if a service has written since: a size below the used blocks is not possible.
            if self._resize(str((look.f_blocks - look.f_bfree) * look.f_frsize)):
                return
        raise AssertionError(f"{self.folder} is written to faster than its size can change")

    def empty(self) -> None:
        """Gives back the room that `fill` took."""
        assert self._resize(_ROOM)

    def _resize(self, size: str) -> bool:
        return subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=False).returncode == 0

    def __enter__(self) -> Disk:
        self.folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "tmpfs", str(self.folder)], check=True)
        for name, owner in _OWNERS.items():
            (self.folder / name).mkdir()
            os.chown(self.folder / name, owner, owner)
        return self

    def __exit__(self, *failure: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class FaultyStack:
    """Injects faults into a running stack."""

    def __init__(self, stack: ComposeStack, disk: Disk, clocks: Clocks) -> None:
        self._stack = stack
        self._disk = disk
        self._clocks = clocks

    @contextlib.contextmanager
    def under(self, fault: Fault) -> Iterator[None]:
        """Injects the fault. Heals it at the end of the block, if it lasts."""
        first, *others = fault.services
        if fault.kind is Kind.KILL:
            os.kill(self._stack.pid(first), signal.SIGKILL)  # The restart policy starts it again.
            yield
        elif fault.kind is Kind.RESTART:
            self._stack.compose("restart", first)
            yield
        elif fault.kind in (Kind.FORWARD, Kind.BACK):
            self._clocks.step(first, CLOCK_STEP_S if fault.kind is Kind.FORWARD else -CLOCK_STEP_S)
            yield
        elif fault.kind is Kind.STOP:
            with stopped(self._stack.pid(first)):
                yield
        elif fault.kind is Kind.DISCONNECT:
            with self._disconnected(first):
                yield
        elif fault.kind is Kind.CUT and "redis" in fault.services:
            with self._without_socket():
                yield
        elif fault.kind is Kind.CUT:
            with self._cut(first, others[0]):
                yield
        else:
            self._disk.fill()
            try:
                yield
            finally:
                self._disk.empty()

    @contextlib.contextmanager
    def _disconnected(self, service: str) -> Iterator[None]:
        """Takes the container's network interface away. Its address may be different afterwards."""
        container = str(self._stack.get_container(service).ID)
        network = f"{self._stack.project}_stack"
        _docker("network", "disconnect", network, container)
        try:
            yield
        finally:
            _docker("network", "connect", "--alias", service, network, container)

    @contextlib.contextmanager
    def _cut(self, first: str, second: str) -> Iterator[None]:
        """Drops every packet between two services, without an answer.

        Both containers filter, because a container that ends and starts again has a new network namespace.
        """
        for service, other in ((first, second), (second, first)):
            for address in self._stack.addresses(other):
                self._filter(service, "-A", "INPUT", "-s", address, "-j", "DROP")
                self._filter(service, "-A", "OUTPUT", "-d", address, "-j", "DROP")
        try:
            yield
        finally:
            for service in (first, second):
                self._filter(service, "-F")

    def _filter(self, service: str, *rule: str) -> None:
        """Runs iptables in the network namespace of a service. A container that is between two starts has none."""
        if pid := self._stack.inspect(service)["State"]["Pid"]:
            subprocess.run(["nsenter", "--target", str(pid), "--net", "iptables", "--wait", *rule], check=True)

    @contextlib.contextmanager
    def _without_socket(self) -> Iterator[None]:
        """Separates redis and api, which have no network between them but a socket in a volume.

        Hides the socket and closes the connections. New connections are refused.
        """
        self._in_redis("mv", _SOCKET, _HIDDEN)
        try:
            for kind in ("normal", "pubsub"):
                self._in_redis("redis-cli", "-s", _HIDDEN, "client", "kill", "type", kind)
            yield
        finally:
            self._in_redis("mv", _HIDDEN, _SOCKET)

    def _in_redis(self, *command: str) -> None:
        self._stack.compose("exec", "-T", "redis", *command)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process and its descendants with SIGSTOP, and continues them at the end of the block."""
    # The parent first, so that no child starts unnoticed.
    found = []
    waiting = [pid]
    while waiting:
        found.append(waiting.pop())
        os.kill(found[-1], signal.SIGSTOP)
        while state(found[-1]) not in "TZ":
            time.sleep(0.01)
        waiting += _children(found[-1])
    try:
        yield
    finally:
        for process in reversed(found):
            os.kill(process, signal.SIGCONT)


def state(pid: int) -> str:
    """Returns the letter of the process' state: "T" if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _docker(*arguments: str) -> None:
    subprocess.run(["docker", *arguments], check=True, stdout=subprocess.DEVNULL)
