"""Metrics, rollouts and evaluations to Weights & Biases, when asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill import TrajectoryGroup
from gristmill.wandb_run import start_wandb
from gristmill_env.rewards import Decision
from gristmill_env.settings import EnvConfig
from gristmill_env.tally import Tally
from gristmill_env.tracking.rollouts import COLUMNS, Rollouts
from gristmill_env.tracking.tracker import ScoredPrompt
from gristmill_env.tracking.window import Window

_NOT_IN_THE_DARK = 16
"""Times `min_items_sent_before_logging`: when so many prompts were scored, they are logged though fewer groups came of
them. A run whose groups are all dropped is the one that somebody wants to look at."""


class WandbTracker:
    """A W&B run; an offline one where there are no credentials or W&B does not answer.

    One of each environment process, in one group named after the run. The x axis is `policy_step`: training
    steps of the newest weights that a prompt was asked of.
    """

    def __init__(
        self,
        run_id: str,
        config: EnvConfig,
        recorded: dict[str, Any],
        folder: Path,
        environ: Mapping[str, str],
        *,
        decision: Decision,
    ) -> None:
        """`recorded`: the run's record, shown as its configuration. `folder`: the runs' folder. `decision`: which of
        the run's rewards says what is right."""
        self._run = start_wandb(run_id, "env", recorded, folder / run_id, environ, name=config.wandb_name)
        self._run.define_metric("policy_step")
        self._run.define_metric("*", step_metric="policy_step")
        self._window = Window(decision)
        self._rollouts = Rollouts(config.num_rollouts_to_keep, config.num_rollouts_per_group_for_logging)
        self._log_after = max(1, config.min_items_sent_before_logging)
        self._unlogged = 0
        self._step = 0
        self._tally: Tally | None = None

    def scored(self, prompt: ScoredPrompt) -> None:
        """Counted, and logged with the groups that come of it and of others; or without, where too few come."""
        self._step = max(self._step, prompt.step)
        self._window.add(prompt)
        if self._window.prompts >= _NOT_IN_THE_DARK * self._log_after:
            self._log()

    def group(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally) -> None:
        """Logged, with all that was scored since, once `min_items_sent_before_logging` were submitted."""
        self._rollouts.add(group, texts)
        self._tally = tally
        self._unlogged += 1
        if self._unlogged >= self._log_after:
            self._log()

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Logged at once, as eval/NAME."""
        self._run.log({"policy_step": step, **{f"eval/{name}": value for name, value in results.items()}})

    def close(self) -> None:
        """Log what is left, flush, and close the run."""
        if self._unlogged or self._window.prompts:
            self._log()
        self._run.finish()

    def _log(self) -> None:
        values: dict[str, Any] = {"policy_step": self._step, **self._window.take(self._tally)}
        if rows := self._rollouts.take():
            import wandb

            values["train/rollouts"] = wandb.Table(columns=[*COLUMNS], data=[list(row) for row in rows])
        self._unlogged = 0
        self._run.log(values)
