"""What the pool and a checker process say to each other over the process' stdin and stdout.

Each message is its length (4 bytes, little-endian) and then msgpack. The process says `Ready` once it
can check, or `Broken`; after that, one `Verdict` or `Failed` follows each `Check`, in order.
"""

from __future__ import annotations

import enum
import struct

import msgspec

HEAD = struct.Struct("<I")
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

    @property
    def shown(self) -> str:
        """What is checked, short enough for a message."""
        stated = ", ".join(pair[1] for pair in self.pairs)
        return repr(stated if len(stated) <= _SHOWN else stated[: _SHOWN - 1] + "…")


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The process is warm."""


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """The process cannot check at all, and ends."""

    reason: str


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    """The result of one check."""

    outcome: Outcome
    last: bool = False
    """The process has grown too large and ends now."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The check raised; the process goes on."""

    reason: str


Report = Ready | Broken | Verdict | Failed

_encoder = msgspec.msgpack.Encoder()
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_checks = msgspec.msgpack.Decoder(Check)


def framed(message: Check | Report) -> bytes:
    """The message as it goes over the pipe."""
    body = _encoder.encode(message)
    return HEAD.pack(len(body)) + body


def decode_check(body: bytes) -> Check:
    """A `Check` from its msgpack."""
    return _checks.decode(body)


def decode_report(body: bytes) -> Report:
    """What a process says, from its msgpack."""
    return _reports.decode(body)
