"""Rewards to Weights & Biases, when asked."""

from __future__ import annotations

import logging
import netrc
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from gristmill import TrajectoryGroup
from gristmill_env.tally import Tally

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Told of every submitted group."""

    def group(self, group: TrajectoryGroup, tally: Tally) -> None:
        """Log the group's rewards."""

    def close(self) -> None:
        """Flush."""


class NoTracker:
    """Keeps nothing."""

    def group(self, group: TrajectoryGroup, tally: Tally) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class WandbTracker:
    """A W&B run; an offline one where there are no credentials or W&B does not answer."""

    def __init__(self, run_id: str, name: str | None, config: dict[str, Any], folder: Path, environ: Mapping[str, str]):
        import wandb  # slow to import; most runs do without

        self._folder = _writable(folder / run_id)
        start: dict[str, Any] = {
            "project": environ.get("WANDB_PROJECT") or "gristmill",
            "name": name or run_id,
            "group": run_id,
            "job_type": "env",
            "config": config,
            "dir": str(self._folder),
            "settings": wandb.Settings(console="off", silent=True),
        }
        if environ.get("WANDB_MODE"):
            self._run = wandb.init(**start)
        elif not _has_credentials(environ):
            self._say_offline("there are no credentials (WANDB_API_KEY or ~/.netrc)")
            self._run = wandb.init(mode="offline", **start)
        else:
            try:
                self._run = wandb.init(mode="online", **start)
            except wandb.Error as error:
                self._say_offline(f"it cannot be reached ({error})")
                self._run = wandb.init(mode="offline", **start)

    def group(self, group: TrajectoryGroup, tally: Tally) -> None:
        """Means over the group: rewards, their parts, completion tokens; and the counts so far."""
        values = {"reward/mean": float(group.rewards.mean()), "reward/std": float(group.rewards.std())}
        for name, parts in group.reward_parts.items():
            if said := [part for part in parts if part is not None]:
                values[f"reward/{name}"] = statistics.fmean(said)
        values["completion_tokens_mean"] = float(group.mask.sum()) / group.size
        values["policy_step"] = group.oldest_version.step
        values["groups/submitted"] = tally.submitted
        values |= {f"groups/dropped_{reason}": count for reason, count in tally.dropped.items()}
        self._run.log(values)

    def close(self) -> None:
        """Flush and close the run."""
        self._run.finish()

    def _say_offline(self, why: str) -> None:
        logger.warning(
            "W&B runs offline: %s; send it later with `wandb sync %s/wandb/offline-run-*`", why, self._folder
        )


def _has_credentials(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # the run folder may be mounted read-only
        return Path(tempfile.mkdtemp(prefix="gristmill-wandb-"))
