"""What a process for symbolic checks is asked, and what it answers."""

from __future__ import annotations

import enum

import msgspec

_SHOWN = 60


class Outcome(enum.Enum):
    """What a check found."""

    SAME = "same"
    DIFFERENT = "different"
    """Or the stated answer cannot be parsed."""
    UNREADABLE_GOLD = "unreadable gold"
    """The reference answer cannot be parsed: nothing can be said."""


class Check(msgspec.Struct, frozen=True, array_like=True):
    """Is every stated answer the same as its reference?"""

    pairs: tuple[tuple[str, str], ...]
    """Reference and stated answer, as LaTeX without delimiters."""
    tolerance: float
    """Relative; 0 is exact."""
    extract: bool = False
    """The pairs are whole texts, and Math-Verify finds the answers in them."""

    @property
    def shown(self) -> str:
        """What is checked, short enough for a message."""
        stated = ", ".join(pair[1] for pair in self.pairs)
        return f"the check of {stated if len(stated) <= _SHOWN else stated[: _SHOWN - 1] + '…'!r}"


_check = msgspec.msgpack.Encoder()
_checks = msgspec.msgpack.Decoder(Check)


def encode_check(check: Check) -> bytes:
    return _check.encode(check)


def decode_check(body: bytes) -> Check:
    return _checks.decode(body)
