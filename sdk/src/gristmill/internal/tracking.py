"""Experiment tracking with Weights & Biases. Errors of trackers are logged and counted, and never end a training."""

from __future__ import annotations

import logging
import netrc
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gristmill.deployment import read_secret
from gristmill.errors import ConfigError
from gristmill.internal.redaction import redact, redact_arguments

_LOG = logging.getLogger(__name__)
KEY_FILE = "WANDB_API_KEY_FILE"


class ObserverErrors:
    """The errors of a process' observers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of errors since the process began, by observer."""

    @contextmanager
    def of(self, observer: str) -> Iterator[None]:
        """Logs and counts an error of `observer` inside the block. The error ends only the block.

        Lets a ConfigError through, because then a setting of the observer is wrong.
        """
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  a full disk, or any error of W&B
            self.counts[observer] += 1
            count = self.counts[observer]
            if count & (count - 1) == 0:  # a disk stays full for many groups
                _LOG.error(
                    "%s failed (%s: %s); %d errors of it so far; the training continues",
                    observer, type(error).__name__, error, count,
                )  # fmt: skip

    def report(self) -> None:
        """Logs the number of errors of each observer."""
        for observer, count in self.counts.items():
            _LOG.warning("%s failed %d times: its record of this run is not complete", observer, count)


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
    """Starts the W&B run `name` (default: `run_id`) in the group `run_id`. Redacts secrets in `config` and in the
    command line. The run's files are in `folder`, or in a temporary folder if `folder` is not writable.

    WANDB_MODE sets the mode. If it is unset and credentials are missing or W&B does not answer, the run is offline. A
    warning then explains how to send the run later. `project`: default WANDB_PROJECT, else gristmill.

    The key is WANDB_API_KEY, else the word in the file that WANDB_API_KEY_FILE names, else the key in ~/.netrc. Raises
    ConfigError for a key file that cannot be read.
    """
    import wandb  # slow to import, and most runs do not use it

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
            _say_offline(f"no credentials were found (WANDB_API_KEY, {KEY_FILE} or ~/.netrc)", folder)
            return wandb.init(mode="offline", **start)
        try:
            return wandb.init(mode="online", **start)
        except wandb.Error as error:
            _say_offline(f"it cannot be reached ({error})", folder)
            return wandb.init(mode="offline", **start)


@contextmanager
def _redacted_command_line() -> Iterator[None]:
    """Redacts `sys.argv` inside the block, because W&B copies it into the run and has no setting against that."""
    arguments, sys.argv = sys.argv, redact_arguments(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Returns whether WANDB_API_KEY, the file WANDB_API_KEY_FILE, or the netrc file has a key for W&B's host."""
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
