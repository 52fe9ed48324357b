"""The pool of processes in which symbolic checks are decided."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future

from gristmill_env.running import Limits
from gristmill_env.running.processes import ProcessPool
from gristmill_env.running.protocol import Order
from gristmill_env.symbolic.protocol import Check, Outcome, encode_check

_MEMORY = 1 << 30
"""Address space, bytes. sympy with Math-Verify takes about 0.2 GB of it."""
_GROWN = 512 << 20
_NICENESS = 5
_WALL = 20
"""Times the processor time that a check may take in all: a busy trainer on the same machine is no reason to give up."""


def check_limits(cpu: float) -> Limits:
    """Of a check that may take `cpu` seconds of processor time."""
    return Limits(cpu, _WALL * cpu)


class SymbolicPool:
    """Decides checks in `size` processes, each within `limits`."""

    def __init__(self, size: int = 2, limits: Limits | None = None) -> None:
        """`limits`: of one check; 3 s of processor time unless set."""
        self.size, self.limits = size, limits or check_limits(3.0)
        order = Order(
            target="gristmill_env.symbolic.equality:checker",
            cpu=self.limits.cpu,
            wall=self.limits.wall,
            memory=_MEMORY,
            grown=_GROWN,
            niceness=_NICENESS,
        )
        self._processes = ProcessPool(order, size, "symbolic checks", quiet=True)

    @property
    def asked(self) -> int:
        """Checks that the pool was ever asked for."""
        return self._processes.asked

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return self._processes.pids

    def submit(
        self, pairs: Iterable[tuple[str, str]], tolerance: float = 0.0, *, extract: bool = False
    ) -> Future[bytes]:
        """As `check`, for callers without an event loop. The result is the value of an Outcome."""
        check = Check(tuple(pairs), tolerance, extract)
        return self._processes.submit(encode_check(check), check.shown)

    async def check(
        self, pairs: Iterable[tuple[str, str]], tolerance: float = 0.0, *, extract: bool = False
    ) -> Outcome:
        """Whether in all `pairs` the stated LaTeX is the same as the reference LaTeX, which comes first.

        `extract`: the pairs are whole texts, and Math-Verify finds the answers in them. Raises JobError, or one of its
        kinds, when a check does not finish.
        """
        check = Check(tuple(pairs), tolerance, extract)
        return Outcome((await self._processes.do(encode_check(check), check.shown)).decode())

    def close(self) -> None:
        """Kill the processes. Checks that wait or run end with JobError."""
        self._processes.close()


_lock = threading.Lock()
_shared: SymbolicPool | None = None


def symbolic_pool() -> SymbolicPool:
    """The pool of this process, which all rewards share."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = SymbolicPool()
        return _shared


def set_up_checks(size: int, limits: Limits) -> None:
    """Have the shared pool as a run's settings want it. Checks that are under way in another one fail."""
    global _shared
    with _lock:
        if _shared is not None and (_shared.size, _shared.limits) == (size, limits):
            return
        before, _shared = _shared, SymbolicPool(size, limits)
    if before is not None:
        before.close()


def _forget_shared_pool() -> None:
    """A forked child has none of its parent's threads: it needs a pool of its own."""
    global _lock, _shared
    _lock, _shared = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_shared_pool)
