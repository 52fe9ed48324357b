"""The publication token: the model servers accept it from one trainer at a time."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path


def claim_publishing(weights_dir: Path) -> str:
    """Replaces `weights_dir`/token with a new token and returns it.

    From then on the model servers refuse the previous trainer (`fenced`), whenever it continues. Call this function
    after the run is taken, and ask the API afterwards whether the run still belongs to this trainer. If the trainer was
    stopped between the two, it replaces the token of its successor. The successor's next publication is then refused,
    and it has to be started again.

    Only a process that may write to the weights folder can make the servers load from it.
    """
    weights_dir.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(32)
    handle, temporary = tempfile.mkstemp(dir=weights_dir, prefix=".token-")
    with os.fdopen(handle, "w") as file:
        file.write(token)
    Path(temporary).chmod(0o640)  # The server runs as another user of the same group.
    Path(temporary).replace(weights_dir / "token")
    return token
