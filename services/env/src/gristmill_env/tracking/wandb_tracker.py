"""Sends metrics, rollouts and evaluations to Weights & Biases, if configured."""

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
"""Times `min_items_sent_before_logging`: after this number of scored prompts, they are logged even without groups.

Users most need the metrics of a run whose groups are all dropped."""


class WandbTracker:
    """A W&B run; an offline run without credentials, or if W&B does not answer.

    Each environment process has one run, in a group named after the training run. The x axis is `policy_step`: the
    training steps of the newest weights for which a prompt was scored.
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
        """`recorded`: the run's record, shown as its configuration. `folder`: the runs' folder. `decision`: the run's
        correctness reward."""
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
        """Counts the prompt. Logs it with the next groups, or without groups if too few are submitted."""
        self._step = max(self._step, prompt.step)
        self._window.add(prompt)
        if self._window.prompts >= _NOT_IN_THE_DARK * self._log_after:
            self._log()

    def group(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally) -> None:
        """Counts the group. Logs all since the last log after `min_items_sent_before_logging` groups."""
        self._rollouts.add(group, texts)
        self._tally = tally
        self._unlogged += 1
        if self._unlogged >= self._log_after:
            self._log()

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Logs the results at once, as eval/NAME."""
        self._run.log({"policy_step": step, **{f"eval/{name}": value for name, value in results.items()}})

    def close(self) -> None:
        """Logs the remaining values, flushes, and closes the run."""
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
