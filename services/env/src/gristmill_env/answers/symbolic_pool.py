"""Checks whether two mathematical expressions are equal, in a pool of processes that can be killed."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterable

import msgspec

from gristmill_env.running.limiter import Limits
from gristmill_env.running.processes import ProcessPool, ProcessSpec

_SHOWN = 60
_MEMORY = 1 << 30
"""Limit of the address space, in bytes. sympy with Math-Verify takes about 0.2 GB."""
_GROWN = 512 << 20
_NICENESS = 5
_WALL = 20
"""Elapsed-time limit of a check, as a multiple of its processor-time limit. Large, because a trainer on the same
machine may delay the check."""


class Verdict(enum.Enum):
    """The result of a check."""

    SAME = "same"
    DIFFERENT = "different"
    """The answers differ, or the extracted answer cannot be parsed."""
    UNREADABLE_GOLD = "unreadable gold"
    """The reference answer cannot be parsed, so the check decides nothing."""


class Check(msgspec.Struct, frozen=True, array_like=True):
    """The question whether every extracted answer equals its reference."""

    pairs: tuple[tuple[str, str], ...]
    """Pairs of reference and extracted answer, as LaTeX without delimiters."""
    tolerance: float
    """Relative tolerance; 0 requires exact equality."""
    extract: bool = False
    """Whether the pairs are whole texts in which Math-Verify finds the answers."""

    @property
    def shown(self) -> str:
        """The checked answers, short enough for a message."""
        extracted = ", ".join(pair[1] for pair in self.pairs)
        return f"the check of {extracted if len(extracted) <= _SHOWN else extracted[: _SHOWN - 1] + '…'!r}"


def check_limits(cpu: float) -> Limits:
    """Returns the limits of a check that may take `cpu` seconds of processor time."""
    return Limits(cpu, _WALL * cpu)


class SymbolicPool(ProcessPool):
    """Decides checks in `size` processes, each within `limits`."""

    def __init__(self, size: int = 2, limits: Limits | None = None) -> None:
        """`limits`: the limits of one check; by default 3 s of processor time."""
        self.size, self.limits = size, limits or check_limits(3.0)
        spec = ProcessSpec(
            target="gristmill_env.answers.symbolic_checker:checker",
            cpu=self.limits.cpu,
            wall=self.limits.wall,
            memory=_MEMORY,
            grown=_GROWN,
            niceness=_NICENESS,
        )
        super().__init__(spec, size, "symbolic checks", quiet=True)

    async def check(
        self, pairs: Iterable[tuple[str, str]], tolerance: float = 0.0, *, extract: bool = False
    ) -> Verdict:
        """Checks whether in all `pairs` (reference, extracted) the two LaTeX answers are equal.

        `extract`: the pairs are whole texts, and Math-Verify finds the answers in the texts. Raises JobError
        when a check does not finish.
        """
        check = Check(tuple(pairs), tolerance, extract)
        return Verdict((await self.do(msgspec.msgpack.encode(check), check.shown)).decode())


_lock = threading.Lock()
_shared: SymbolicPool | None = None


def symbolic_pool() -> SymbolicPool:
    """Returns this process's pool, which all rewards share."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = SymbolicPool()
        return _shared


def set_up_checks(size: int, limits: Limits) -> None:
    """Replaces the shared pool if its size or limits differ from these. Unfinished checks in the old pool fail."""
    global _shared
    with _lock:
        if _shared is not None and (_shared.size, _shared.limits) == (size, limits):
            return
        before, _shared = _shared, SymbolicPool(size, limits)
    if before is not None:
        before.close()


def _forget_shared_pool() -> None:
    """Resets the shared pool in a forked child, which has none of its parent's threads and so needs a new pool."""
    global _lock, _shared
    _lock, _shared = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_shared_pool)
