"""Whether W&B would let us in."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from urllib.parse import urlsplit


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether there is a key for W&B's host: in WANDB_API_KEY, or in the netrc file."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
