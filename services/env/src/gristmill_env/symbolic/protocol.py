"""The jobs and results of a process for symbolic checks."""

from __future__ import annotations

import enum

import msgspec

_SHOWN = 60


class Outcome(enum.Enum):
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
        stated = ", ".join(pair[1] for pair in self.pairs)
        return f"the check of {stated if len(stated) <= _SHOWN else stated[: _SHOWN - 1] + '…'!r}"


_check = msgspec.msgpack.Encoder()
_checks = msgspec.msgpack.Decoder(Check)


def encode_check(check: Check) -> bytes:
    return _check.encode(check)


def decode_check(body: bytes) -> Check:
    return _checks.decode(body)
