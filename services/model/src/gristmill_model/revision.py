"""The revision of a model on this machine. A build has it in its name, and a running server may be compared with it.

This module imports no torch, because commands compare a running server before they need torch.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from gristmill_model import smollm2
from gristmill_model.settings import named


def revision(requested: str) -> str | None:
    """Returns the revision that a server of `requested` would have if it started now; None if only the hub knows it.

    `requested`: as MODEL. Raises ModelError if the model is not valid, as `settings.named`.
    """
    if hub := named(requested):
        return hub[2]
    if requested == "tiny":
        return tiny()
    if requested == "smollm2":
        return smollm2.REVISION
    return fingerprint(Path(requested).expanduser().resolve())


@cache
def tiny() -> str:
    """Returns twelve hex digits that change with the weights, the tokenizer, the template and the configuration."""
    total = hashlib.sha256()
    for name in ("tiny.safetensors", "tokenizer.py", "chat_template.py", "tiny.py"):
        total.update(Path(__file__).with_name(name).read_bytes())
    return total.hexdigest()[:12]


def fingerprint(folder: Path) -> str:
    """Returns a hash of the files' paths, sizes and times. It detects changed weights without reading them."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        state = path.stat()
        total.update(f"{path}:{state.st_size}:{state.st_mtime_ns}\n".encode())
    return total.hexdigest()[:12]
