"""A run, as the environment sees it: the top level of its YAML."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from gristmill.deployment import API_URL
from gristmill.settings import Settings
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.servers import ServerConfig, Url


class EvalHandling(StrEnum):
    """What becomes of this process' rollouts while it evaluates in `serve`."""

    STOP_TRAIN = "STOP_TRAIN"
    """None is begun; those under way end."""
    LIMIT_TRAIN = "LIMIT_TRAIN"
    """No more than eval_limit_ratio of max_num_workers at a time."""
    NONE = "NONE"
    """They go on beside the evaluation."""


class EnvConfig(Settings):
    """A run, as the environment sees it: one YAML file is one run."""

    run_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run. GRISTMILL_RUN_ID (RUN_ID in .env) stands above a YAML's; unset, the file's name is taken."""

    tokenizer_name: str | None = None
    """Tokenizer, a hub id or a path. Only needed where the model service's manifest is not at hand."""

    group_size: int = Field(default=8, ge=1)
    """Completions a prompt. 1 means no group: the advantage is the reward itself."""

    max_num_workers: int = Field(default=16, ge=1, le=1024)
    """Prompts worked on at a time by this process."""

    rollout_server_url: Url = API_URL
    """The trajectory API. GRISTMILL_API_URL stands above a YAML's."""

    max_token_length: int = Field(default=2048, ge=2)
    """Most tokens of prompt and completion together. Prompts that leave no room are skipped and counted."""

    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run; the same as trainer.training_steps, which may be set instead."""

    ensure_scores_are_not_same: bool = True
    """Drop groups whose completions all score the same: they carry no gradient."""

    max_eval_workers: int = Field(default=16, ge=1, le=1024)
    """Prompts of an evaluation worked on at a time."""

    steps_per_eval: int = Field(default=100, ge=-1)
    """serve evaluates when the policy's step passes a multiple of this, before the first step and at the run's end;
    0 or -1: never. It needs an evaluation set: dataset.eval_dataset_name, eval_dataset_path or eval_split."""

    eval_handling: EvalHandling = EvalHandling.STOP_TRAIN
    """Rollouts while this process evaluates: STOP_TRAIN begins none, LIMIT_TRAIN fewer, NONE as many as ever."""

    eval_limit_ratio: float = Field(default=0.5, gt=0, le=1)
    """Part of max_num_workers that LIMIT_TRAIN leaves to rollouts; at least one worker."""

    data_dir_to_save_evals: Path | None = None
    """Folder of evaluations, each in a folder of its own. Unset: evaluations/ in the run's folder."""

    use_wandb: bool = False
    """Log rewards to Weights & Biases; offline where there are no credentials."""

    wandb_name: str | None = None
    """Name of the W&B run; unset, the run id."""

    slurm: bool = False
    """Accepted for launch scripts. There is no server discovery yet: base_url is used, and a line says so."""

    testing: bool = False
    """Log every prompt and completion in full. Nothing is faked and nothing else changes."""

    startup_patience: float | None = Field(default=None, gt=0)
    """Seconds to wait at the start for the model server and the API. Unset: 300 in serve, 20 in try."""

    patience: float = Field(default=600.0, gt=0)
    """Seconds that an API or model server may be away in mid-run before serve gives up."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    """Rows, prompts, sampling, rewards."""

    server_configs: list[ServerConfig] = Field(default_factory=lambda: [ServerConfig()], min_length=1, max_length=1)
    """The model server (one, for now)."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    """Settings of the trainer that belong to this run; they stand above trainer.yaml. The trainer checks them."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        theirs = self.trainer.get("training_steps")
        if self.total_steps is not None and theirs is not None and theirs != self.total_steps:
            raise ValueError(f"total_steps is {self.total_steps} but trainer.training_steps is {theirs}; keep one")
        return self

    @property
    def server(self) -> ServerConfig:
        """The model server."""
        return self.server_configs[0]

    def recorded(self, model: str) -> dict[str, Any]:
        """The half of the run's record that is the environment's: what makes it this run and no other.

        Addresses, keys, time-outs, worker counts, logging and evaluation are left out: they may change between
        restarts.
        """
        trainer = dict(self.trainer)
        if self.total_steps is not None:
            trainer["training_steps"] = self.total_steps
        return {
            "model": model,
            "max_token_length": self.max_token_length,
            "ensure_scores_are_not_same": self.ensure_scores_are_not_same,
            "dataset": self.dataset.recorded(),
            "trainer": trainer,
        }
