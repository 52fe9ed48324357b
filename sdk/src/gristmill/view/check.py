"""The result of one check of the doctor."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "warning", "failed"]


class Check(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    state: State
    """ "warning" also means that the check could not be made; `text` then has the reason."""
    text: str
    env: tuple[str, ...] = ()
    """Lines for `.env`."""
