"""A run, as the environment sees it: the top level of its YAML."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from gristmill.deployment import API_URL
from gristmill.settings import Settings
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.servers import ServerConfig, Url


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

    use_wandb: bool = False
    """Log metrics and rollouts to Weights & Biases; offline where there are no credentials."""

    wandb_name: str | None = None
    """Name of the W&B run; unset, the run id."""

    num_rollouts_to_keep: int = Field(default=32, ge=0)
    """Most rows of a W&B table of rollouts; the latest are kept. 0: no table."""

    num_rollouts_per_group_for_logging: int = Field(default=1, ge=-1)
    """Rollouts of each group that go into that table; -1: all."""

    min_items_sent_before_logging: int = 2
    """Groups submitted between two entries in W&B, at least; 0 or less: every group is one."""

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

        Addresses, keys, time-outs, worker counts and logging are left out: they may change between restarts.
        """
        trainer = dict(self.trainer)
        if self.total_steps is not None:
            trainer["training_steps"] = self.total_steps
        return {
            "model": model,
            "max_token_length": self.max_token_length,
            "ensure_scores_are_not_same": self.ensure_scores_are_not_same,
            "dataset": {
                **self.dataset.model_dump(mode="json", exclude={"reward_functions"}),
                "reward_functions": [spec.recorded() for spec in self.dataset.rewards()],
            },
            "trainer": trainer,
        }
