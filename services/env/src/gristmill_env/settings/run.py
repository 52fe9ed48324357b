"""A run, as the environment sees it: the top level of its YAML."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gristmill.deployment import API_URL
from gristmill.redaction import redact
from gristmill.settings import Settings
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.environment import EnvironmentSpec
from gristmill_env.settings.servers import ServerConfig, Url
from gristmill_env.settings.trainer_block import trainer_block


def _count_or_computed(value: int) -> int:
    if value == 0:
        raise PydanticCustomError(
            "no_workers", "0 workers do nothing; write 1 or more, or -1 for max_num_workers_per_node a server"
        )
    return value


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

    run_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")
    """Name of the run. GRISTMILL_RUN_ID (RUN_ID in .env) stands above a YAML's; unset, the file's name is taken."""

    tokenizer_name: str | None = None
    """Tokenizer, a hub id or a path. Only needed where the model service's manifest is not at hand."""

    group_size: int = Field(default=8, ge=1)
    """Completions a prompt. 1 means no group: the advantage is the reward itself."""

    max_num_workers: Annotated[int, AfterValidator(_count_or_computed)] = Field(default=16, ge=-1, le=1024)
    """Prompts worked on at a time by this process; `serve` may have as many again whose completions are there and that
    wait for their scores or the store. -1: max_num_workers_per_node for each model server."""

    max_num_workers_per_node: int = Field(default=8, ge=1, le=1024)
    """Prompts worked on at a time for each model server, where max_num_workers is -1."""

    config_format: Literal["gristmill", "atropos"] | None = None
    """Whose keys and defaults the YAML has. Unset: its keys tell (docs/from-atropos.md)."""

    rollout_server_url: Url = API_URL
    """The trajectory API. GRISTMILL_API_URL stands above a YAML's."""

    max_token_length: int = Field(default=2048, ge=2)
    """Most tokens of prompt and completion together. Prompts that leave no room are skipped and counted."""

    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run; the same as trainer.training_steps, which may be set instead."""

    batch_size: int | None = Field(default=None, ge=1)
    """Sequences an optimizer step: trainer.batch_size x trainer.gradient_accumulation_steps, which may be set instead.
    Where the trainer: block does not split a step, one micro-batch takes them all."""

    max_batches_offpolicy: int | None = Field(default=None, ge=0)
    """Steps that generation may run ahead; the same as trainer.max_staleness, which may be set instead."""

    inference_weight: float | None = Field(default=None, gt=0, le=1e6)
    """Weight of this process among those of the run that have one: it holds at most that part of the permits that are
    out. Unset: as many as it asks for."""

    min_batch_allocation: float | None = Field(default=None, gt=0, le=1)
    """Part of every batch that is kept for this process' groups while it lives, 0 to 1."""

    data_path_to_save_groups: str | None = None
    """File to which every group that is sent is also written as text, a line of JSON each (docs/commands.md).
    Relative to the run's folder."""

    ensure_scores_are_not_same: bool = True
    """Drop groups whose completions all score the same: they carry no gradient."""

    include_messages: bool = False
    """Send the conversations with their groups, as text beside the tokens."""

    worker_timeout: float = -1
    """Seconds that one prompt may take from request to scores, after which it is dropped; -1: no bound."""

    reward_timeout: float = Field(default=60.0, gt=0)
    """Seconds of processor time that one call of a reward may take. A busy machine costs a reward nothing of it."""

    reward_wall_timeout: float = Field(default=600.0, gt=0)
    """Seconds in all that one call of a reward may take: the limit of one that waits for a judge or sleeps."""

    reward_threads: int = Field(default=32, ge=1, le=1024)
    """Most threads for rewards that are not async. More come only for calls that wait, not for calls that compute."""

    reward_processes: int = Field(default=2, ge=1, le=256)
    """Processes of each reward with process: true."""

    reward_failure_limit: float = Field(default=0.5, gt=0, le=1)
    """Share of the last 64 completions on which a reward may fail. Above it, the command ends with the reward's error.
    1: no limit. Rewards of weight 0 have none."""

    check_timeout: float = Field(default=3.0, gt=0)
    """Seconds of processor time that one check by Math-Verify may take; it may last twenty times as long in all."""

    check_processes: int = Field(default=2, ge=1, le=256)
    """Processes for checks by Math-Verify."""

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
    """Folder of evaluations, each in a folder of its own. Relative to the run's folder. Unset: evaluations/ in it."""

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
    """Find the model servers by Slurm's variables (docs/servers.md). Outside Slurm base_url is used, with a warning."""

    testing: bool = False
    """Log every prompt and completion in full. Nothing is faked and nothing else changes."""

    startup_patience: float | None = Field(default=None, gt=0)
    """Seconds to wait at the start for the model server and the API. Unset: 300 in serve, 20 in try."""

    patience: float = Field(default=600.0, gt=0)
    """Seconds for which the API may be away, or all model servers may fail, in mid-run before serve gives up."""

    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec)
    """The task's shape: `dataset`, one turn a row, or one of several turns."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    """Rows, prompts, sampling, rewards."""

    server_configs: list[ServerConfig] = Field(default_factory=lambda: [ServerConfig()], min_length=1)
    """The model servers. A flag of theirs (--base_url) sets the first."""

    thinking_mode: bool | None = None
    """Whether the model thinks before it answers, where its chat template (enable_thinking) or its API lets one
    choose. Unset: as the model does by itself. reasoning_effort and max_reasoning_tokens switch it on."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much it thinks: a word for text APIs that know it, and for chat templates (reasoning_effort). Not every
    model knows every word."""

    max_reasoning_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of thought, for text APIs that can limit them. No effect with token ids, in training above all, and
    warned of there: a thought that is cut by force was not sampled."""

    custom_thinking_prompt: str | None = None
    """System text that asks for thinking; stands before system_prompt."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    """Hyperparameters of this run; they override trainer.yaml. Keys that are not hyperparameters are refused."""

    @model_validator(mode="after")
    def _one_trainer(self) -> Self:
        self.trainer_block()
        return self

    def trainer_block(self) -> dict[str, Any]:
        """`trainer:` with what the top level says of it: total_steps, batch_size, max_batches_offpolicy."""
        return trainer_block(
            self.trainer,
            total_steps=self.total_steps,
            batch_size=self.batch_size,
            max_batches_offpolicy=self.max_batches_offpolicy,
        )

    @property
    def workers(self) -> int:
        """Prompts worked on at a time."""
        return (
            self.max_num_workers
            if self.max_num_workers > 0
            else min(1024, self.max_num_workers_per_node * len(self.server_configs))
        )

    @property
    def server(self) -> ServerConfig:
        """The model server; the first of several."""
        return self.server_configs[0]

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant: one sentence for each such setting."""
        found = []
        if self.dataset.top_p != 1:
            found.append(
                f"top_p is {self.dataset.top_p:g}: tokens outside the nucleus are never sampled, which biases the "
                "trainer's importance ratio; 1.0 does not"
            )
        if self.group_size == 1:
            found.append(
                "group_size is 1: the advantage is the reward itself, and ensure_scores_are_not_same has no effect"
            )
        if self.dataset.max_tokens > self.max_token_length:
            found.append(
                f"max_tokens is {self.dataset.max_tokens}, above max_token_length, {self.max_token_length}, which "
                "limits prompt and completion together; lower max_tokens or raise max_token_length"
            )
        return found

    def recorded(self, model: str) -> dict[str, Any]:
        """The half of the run's record that is the environment's: what makes it this run and no other.

        Addresses, secrets, time-outs, worker counts, logging and evaluation are left out: they may change between
        restarts.
        """
        recorded: dict[str, Any] = redact({
            "model": model,
            "max_token_length": self.max_token_length,
            "ensure_scores_are_not_same": self.ensure_scores_are_not_same,
            "environment": self.environment.recorded(),
            "dataset": self.dataset.recorded(),
            "trainer": self.trainer_block(),
            **self._thinking(),
        })  # fmt: skip
        return recorded

    def _thinking(self) -> dict[str, Any]:
        """The settings of thinking that are set: they are part of what the model is asked."""
        names = ("thinking_mode", "reasoning_effort", "max_reasoning_tokens", "custom_thinking_prompt")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
