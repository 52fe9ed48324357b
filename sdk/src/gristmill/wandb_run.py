"""A Weights & Biases run of one of a run's processes; an offline one where W&B cannot be reached."""

from __future__ import annotations

import logging
import netrc
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gristmill.deployment import read_secret
from gristmill.redaction import redact, redact_arguments

_LOG = logging.getLogger(__name__)
KEY_FILE = "WANDB_API_KEY_FILE"


def start_wandb(
    run_id: str,
    job_type: str,
    config: Mapping[str, Any],
    folder: Path,
    environ: Mapping[str, str],
    *,
    name: str | None = None,
    project: str | None = None,
) -> Any:
    """The W&B run `name` (default: `run_id`), in the group `run_id`. Its files are in `folder`, or in a temporary
    folder if that cannot be written. Secrets in `config` and in the command line are redacted.

    It is offline, and a warning says how to send it later, where there are no credentials or W&B does not answer;
    WANDB_MODE decides where it is set. `project`: default WANDB_PROJECT, else gristmill.

    The key is WANDB_API_KEY, else the word in the file that WANDB_API_KEY_FILE names, else the one in ~/.netrc. Raises
    ConfigError for a key file that cannot be read.
    """
    import wandb  # slow to import; most runs do without

    key = None if environ.get("WANDB_API_KEY") else read_secret(environ, KEY_FILE)
    folder = _writable(folder)
    start: dict[str, Any] = {
        "project": project or environ.get("WANDB_PROJECT") or "gristmill",
        "name": name or run_id,
        "group": run_id,
        "job_type": job_type,
        "config": redact(config),
        "dir": str(folder),
        "settings": wandb.Settings(console="off", silent=True, api_key=key),
    }
    with _redacted_command_line():
        if environ.get("WANDB_MODE"):
            return wandb.init(**start)
        if not has_credentials(environ):
            _say_offline(f"there are no credentials (WANDB_API_KEY, {KEY_FILE} or ~/.netrc)", folder)
            return wandb.init(mode="offline", **start)
        try:
            return wandb.init(mode="online", **start)
        except wandb.Error as error:
            _say_offline(f"it cannot be reached ({error})", folder)
            return wandb.init(mode="offline", **start)


@contextmanager
def _redacted_command_line() -> Iterator[None]:
    """W&B copies the process' arguments into the run. It has no setting for that."""
    arguments, sys.argv = sys.argv, redact_arguments(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether there is a key for W&B's host: in WANDB_API_KEY, in the file WANDB_API_KEY_FILE, or in the netrc file."""
    if environ.get("WANDB_API_KEY") or read_secret(environ, KEY_FILE):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _say_offline(why: str, folder: Path) -> None:
    _LOG.warning("W&B runs offline: %s; send it later with `wandb sync %s/wandb/offline-run-*`", why, folder)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # the run folder may be mounted read-only
        return Path(tempfile.mkdtemp(prefix="gristmill-wandb-"))
