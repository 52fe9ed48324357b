"""The token that the model server's developer endpoints ask for."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def publish_token(weights_dir: Path) -> str:
    """Read `weights_dir`/token; create it the first time.

    Who may write the weights folder may tell the server to load from it, and nobody else.
    """
    weights_dir.mkdir(parents=True, exist_ok=True)
    path = weights_dir / "token"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
    return path.read_text().strip()
