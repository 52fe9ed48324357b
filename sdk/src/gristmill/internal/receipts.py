"""Receipts: a model server's answer after each publication, one JSON object per receipt in receipts.jsonl.

The trainer writes the file into the run's folder. The page, the doctor and the card of the model read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from gristmill.internal.lines import read_jsonl

RECEIPTS_FILE: Final = "receipts.jsonl"
UNPROVEN: Final = "unproven"
"""Label of a server whose receipt failed. It is not a policy version, so environments do not sample from the server."""


class ReceiptState(StrEnum):
    """The result that a receipt shows."""

    OK = "ok"
    """The server's log-probabilities are the trainer's, and it has the step's change."""
    FAILED = "failed"
    """The server's log-probabilities differ by more than the bound, or tensors are not those that were published."""
    UNPROVEN = "unproven"
    """The answers agree, but nothing shows the step's change, or the server did not answer the probes."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One server's answers to the probes after one publication. Differences are in nats."""

    step: int
    version: str
    server: str
    """URL."""
    state: ReceiptState
    difference: float | None
    """Root mean square of the server's log-probabilities minus the trainer's; None without comparable answers."""
    bound: float
    """Largest difference that counts as rounding."""
    change: float | None = None
    """Root mean square of the change of the server's answers since its receipt before; None for its first."""
    wanted_change: float | None = None
    """The same change as the trainer computed it."""
    compared: int = 0
    """Tensors of the server that were compared exactly with the published ones."""
    seconds: float = 0.0
    """Time that the server took to answer."""
    attempt: int = 1
    """1, or 2 after the version was published again because its first receipt failed."""
    cause: str | None = None
    """Code of the cause that the diagnosis found; None unless the state is `failed`."""
    detail: str = ""
    """The cause and its remedy as a sentence, or why the server did not answer the probes."""


class Proven(NamedTuple):
    """Publications with receipts."""

    proven: int
    """Publications whose last receipts are all `ok`."""
    publications: int


def proven(receipts: Iterable[Receipt]) -> Proven:
    """Counts the publications. A version that was published again counts once, by its last receipt per server."""
    last: dict[str, dict[str, ReceiptState]] = {}
    for receipt in receipts:
        last.setdefault(receipt.version, {})[receipt.server] = receipt.state
    good = sum(all(state is ReceiptState.OK for state in servers.values()) for servers in last.values())
    return Proven(good, len(last))


def failing(receipts: Iterable[Receipt]) -> list[Receipt]:
    """Returns the last receipt of each server whose last receipt is `failed`."""
    last = {receipt.server: receipt for receipt in receipts}
    return [receipt for receipt in last.values() if receipt.state is ReceiptState.FAILED]


def read_receipts(path: Path) -> list[Receipt]:
    """Returns the receipts of a run's receipts.jsonl; none if the file does not exist."""
    return parse_receipts(read_jsonl(path)) if path.is_file() else []


def parse_receipts(rows: Iterable[Any]) -> list[Receipt]:
    """Returns the receipts in rows of JSON. Leaves out rows that are not receipts, which another program wrote."""
    receipts = []
    for row in rows:
        with suppress(msgspec.ValidationError):
            receipts.append(msgspec.convert(row, Receipt))
    return receipts
