"""A run, as the environment sees it: the top level of its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gristmill.deployment import API_URL, RUN_ID
from gristmill.hyperparameters import Hyperparameters
from gristmill.internal.redaction import redact
from gristmill.internal.settings import Settings
from gristmill_env.data.schedule import Schedule
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.servers import ServerConfig, Url
from gristmill_env.settings.task import (
    AgentSpec,
    CurriculumSpec,
    EnvironmentSpec,
    EvaluationSpec,
    SourceSpec,
    check_tasks,
    complete_tasks,
)


class EvalHandling(StrEnum):
    """The rollouts of this process while it evaluates in `serve`."""

    STOP_TRAIN = "STOP_TRAIN"
    """The process begins no rollouts. Rollouts in progress finish."""
    LIMIT_TRAIN = "LIMIT_TRAIN"
    """At most eval_limit_ratio of max_num_workers run at a time."""
    NONE = "NONE"
    """Rollouts continue at the same time as the evaluation."""


class TimeoutAction(StrEnum):
    """The use of a rollout that has exceeded rollout_timeout."""

    LEAVE_OUT = "leave_out"
    """It has failed: it is tried again, and then left out of its group."""
    TRUNCATE = "truncate"
    """It ends with its last finished reply, as a truncated rollout. Without a finished reply it has failed."""


def _count_or_computed(value: int) -> int:
    if value == 0:
        raise PydanticCustomError(
            "no_workers", "0 workers do nothing; write 1 or more, or -1 for max_num_workers_per_node a server"
        )
    return value


def _shortest_curriculum(value: Any) -> Any:
    return {} if value is True else None if value is False else value


class EnvConfig(Settings):
    """A run, as the environment sees it: one YAML file is one run."""

    run_id: str | None = Field(default=None, pattern=f"^{RUN_ID}$")
    """Id of the run. GRISTMILL_RUN_ID (RUN_ID in .env) overrides the YAML. Default: the file's name."""

    tokenizer_name: str | None = None
    """Tokenizer, a hub id or a path. Needed only without the model service's manifest."""

    group_size: int = Field(default=8, ge=1)
    """Completions per prompt. 1 means no group: the advantage is the reward itself."""

    rollout_retries: int = Field(default=1, ge=0)
    """How often a rollout that failed is tried again. Then it is left out of its group."""

    min_rollouts: int = Field(default=2, ge=2)
    """Least number of rollouts with a score in a submitted group. If group_size is smaller, all rollouts need a score.
    A group with fewer is dropped."""

    rollout_timeout: float | None = Field(default=None, gt=0)
    """Seconds that one rollout may take, from its reset to its last step, including waits for a model server. Default:
    no limit."""

    rollout_timeout_action: TimeoutAction = TimeoutAction.LEAVE_OUT
    """Use of a rollout that takes longer, also of an agent that takes longer than agent.timeout: leave_out (it has
    failed), or truncate (it ends with its last finished reply, as truncated)."""

    group_timeout: float | None = Field(default=None, gt=0)
    """Seconds after which a group is scored without its unfinished rollouts. The group is dropped if fewer than
    min_rollouts have finished. Default: no limit."""

    max_num_workers: Annotated[int, AfterValidator(_count_or_computed)] = Field(default=16, ge=-1, le=1024)
    """Prompts that this process works on at a time. `serve` may have the same number again that wait for scores or the
    store. -1: max_num_workers_per_node for each model server."""

    max_num_workers_per_node: int = Field(default=8, ge=1, le=1024)
    """Prompts per model server that are worked on at a time, if max_num_workers is -1."""

    config_format: Literal["gristmill", "atropos"] | None = None
    """Format of the YAML: its keys and defaults. Default: recognised by the keys (docs/from-atropos.md)."""

    rollout_server_url: Url = API_URL
    """The trajectory API. GRISTMILL_API_URL overrides the YAML. API_PORT is the port of the default."""

    max_token_length: int = Field(default=2048, ge=2)
    """Most tokens of prompt and completion together. Prompts that leave no room are skipped and counted."""

    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run; the same as trainer.training_steps, which may be set instead."""

    batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step: trainer.batch_size x trainer.gradient_accumulation_steps, which may be set instead.
    If the trainer: block does not split a step, one micro-batch takes all sequences."""

    max_batches_offpolicy: int | None = Field(default=None, ge=0)
    """Steps that generation may run ahead; the same as trainer.max_staleness, which may be set instead."""

    inference_weight: float | None = Field(default=None, gt=0, le=1e6)
    """Weight of this process among the run's processes with a weight: it holds at most that part of the open permits.
    Default: as many permits as it asks for."""

    data_path_to_save_groups: str | None = None
    """File to which every submitted group is also written as a line of JSON (docs/commands.md). Relative to the run's
    folder."""

    ensure_scores_are_not_same: bool = True
    """Drop groups whose completions all score the same: they give no gradient."""

    include_messages: bool = False
    """Send the conversations with their groups, as text in addition to the tokens."""

    worker_timeout: float = -1
    """Seconds that one prompt may take from request to scores. Then it is dropped. -1: no limit."""

    reward_timeout: float = Field(default=60.0, gt=0)
    """Seconds of processor time that one call of a reward of yours may take. Waiting for a busy machine does not count.
    Also the seconds for which a call may block its process."""

    reward_wall_timeout: float = Field(default=600.0, gt=0)
    """Seconds in total that one call of a reward of yours may take: the limit of a call that waits for a judge or
    sleeps."""

    reward_threads: int = Field(default=32, ge=1, le=1024)
    """Most threads of a process for rewards that are not async. Threads are added while calls take long."""

    reward_processes: int = Field(default=2, ge=1, le=256)
    """Processes for each reward with process: true."""

    reward_failure_limit: float = Field(default=0.5, gt=0, le=1)
    """Share of the last 64 completions on which a reward may fail. Above it, the command ends with the reward's error.
    1: no limit. Rewards of weight 0 have none."""

    check_timeout: float = Field(default=3.0, gt=0)
    """Seconds of processor time that one check by Math-Verify may take, and twenty times as long in total."""

    check_processes: int = Field(default=2, ge=1, le=256)
    """Processes for checks by Math-Verify."""

    max_eval_workers: int = Field(default=16, ge=1, le=1024)
    """Prompts of an evaluation that are worked on at a time."""

    steps_per_eval: int = Field(default=100, ge=-1)
    """serve evaluates when the policy's step passes a multiple of this, before the first step and at the run's end;
    0 or -1: never. It needs an evaluation set: dataset.eval_dataset_name, eval_dataset_path or eval_split, or
    `evaluations`."""

    eval_handling: EvalHandling = EvalHandling.STOP_TRAIN
    """Rollouts while this process evaluates: STOP_TRAIN begins none, LIMIT_TRAIN fewer, NONE as many as usual."""

    eval_limit_ratio: float = Field(default=0.5, gt=0, le=1)
    """Part of max_num_workers that LIMIT_TRAIN leaves to rollouts; at least one worker."""

    data_dir_to_save_evals: Path | None = None
    """Folder of evaluations, with a subfolder for each. Relative to the run's folder. Default: evaluations/ in it."""

    metrics_address: str | None = Field(default=None, coerce_numbers_to_str=True)
    """Where serve answers Prometheus at /metrics: PORT, which only this machine reaches, or HOST:PORT. The variable
    GRISTMILL_METRICS_ADDRESS overrides the YAML. Default: nowhere; in Compose the network of the stack."""

    use_wandb: bool = False
    """Log metrics and rollouts to Weights & Biases; offline without credentials."""

    wandb_name: str | None = None
    """Name of the W&B run. Default: the run id."""

    num_rollouts_to_keep: int = Field(default=32, ge=0)
    """Most rows of a W&B table of rollouts; the latest are kept. 0: no table."""

    num_rollouts_per_group_for_logging: int = Field(default=1, ge=-1)
    """Rollouts of each group that go into that table; -1: all."""

    min_items_sent_before_logging: int = 2
    """Least number of groups between two entries in W&B; 0 or less: one entry per group."""

    slurm: bool = False
    """Find the model servers through Slurm's variables (docs/servers.md). Outside Slurm base_url is used, with a
    warning."""

    testing: bool = False
    """Log every prompt and completion in full. Nothing is faked and nothing else changes."""

    startup_patience: float | None = Field(default=None, gt=0)
    """Seconds to wait at the start for the model server and the API. Default: 300 in serve, 20 in try."""

    patience: float = Field(default=600.0, gt=0)
    """Seconds for which the API may be away, or all model servers or a service that a reward or an environment calls
    may fail, before serve ends."""

    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec)
    """The task: `dataset` with one turn per row, or an environment of several turns."""

    agent: AgentSpec | None = None
    """The program that plays the rollouts through the gateway, in place of an environment (docs/environments.md)."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    """Rows, prompts, sampling, rewards. With `sources`, the keys that they share."""

    sources: list[SourceSpec] = Field(default_factory=list, max_length=64)
    """Several tasks in one run, each with its name, its weight, its rows and rewards (docs/data.md)."""

    curriculum: Annotated[CurriculumSpec | None, BeforeValidator(_shortest_curriculum)] = None
    """Leaves out rows for some epochs that are too easy or too hard for the model now (docs/data.md#curriculum).
    `true`: the defaults of its keys."""

    evaluations: list[EvaluationSpec] = Field(default_factory=list, max_length=32)
    """Held-out evaluations by name, in addition to the evaluation set of `dataset` or of each source
    (docs/evaluation.md)."""

    server_configs: list[ServerConfig] = Field(default_factory=lambda: [ServerConfig()], min_length=1)
    """The model servers. A flag of a server (--base_url) sets the first server."""

    thinking_mode: bool | None = None
    """Whether the model thinks before it answers, if its chat template (enable_thinking, thinking) or its API has a
    choice. Default: the model's default. reasoning_effort and max_reasoning_tokens switch it on."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Amount of thinking: a word for text APIs and for chat templates (reasoning_effort). Models support different
    words."""

    max_reasoning_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of reasoning, for text APIs that can limit them. With token ids, as in training, it has no effect and
    logs a warning, because truncated reasoning was not sampled."""

    custom_thinking_prompt: str | None = None
    """System text that asks for thinking, placed before system_prompt."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    """Hyperparameters of this run; they override trainer.yaml. Keys that are not hyperparameters are refused."""

    @field_validator("trainer")
    @classmethod
    def _without_text(cls, block: dict[str, Any]) -> dict[str, Any]:
        """Converts the text of a variable, or of 1e-5 in YAML, so that equal blocks are recorded alike."""
        try:
            typed = Hyperparameters.model_validate(block)
        except ValidationError:
            return block  # check_run_block names the mistakes
        return {key: getattr(typed, key) if isinstance(value, str) else value for key, value in block.items()}

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        return complete_tasks(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _agent_or_environment(self) -> Self:
        if self.agent is not None and self.environment != EnvironmentSpec():
            raise PydanticCustomError("agent_and_environment", "a run has an agent or an environment, not both")
        return self

    @model_validator(mode="after")
    def _tasks_differ(self) -> Self:
        check_tasks(self.sources, self.evaluations, self.dataset)
        return self

    @model_validator(mode="after")
    def _one_place_of_thinking(self) -> Self:
        """The values of the chat template and the settings of thinking do not name one switch twice."""
        switches = {
            "enable_thinking": self.thinking_mode,
            "thinking": self.thinking_mode,
            "reasoning_effort": self.reasoning_effort,
        }
        for part in self.by_source().values():
            for name, value in switches.items():
                if value is not None and name in part.dataset.chat_template_kwargs:
                    raise PydanticCustomError(
                        "values_contradict",
                        "chat_template_kwargs.{name} and {setting} are set; keep one",
                        {"name": name, "setting": "reasoning_effort" if "effort" in name else "thinking_mode"},
                    )
        return self

    @model_validator(mode="after")
    def _one_trainer(self) -> Self:
        self.trainer_block()
        return self

    def trainer_block(self) -> dict[str, Any]:
        """Returns the run's `trainer:` block with the hyperparameters of the top level added.

        The top level's batch_size counts the sequences of an optimizer step, and the block's batch_size the sequences
        of a micro-batch. So it is divided by the block's gradient_accumulation_steps. Without that key one micro-batch
        takes the whole step, whatever trainer.yaml says. Raises PydanticCustomError, a ValueError, if the two places
        contradict each other.
        """
        whole = dict(self.trainer)
        for name, here in (("total_steps", self.total_steps), ("max_batches_offpolicy", self.max_batches_offpolicy)):
            there = TOP_LEVEL[name]
            if here is None:
                continue
            if whole.get(there, here) != here:
                raise PydanticCustomError(
                    "values_contradict",
                    "{name} is {here} but trainer.{there} is {other}; keep one",
                    {"name": name, "here": here, "there": there, "other": str(whole[there])},
                )
            whole[there] = here
        if self.batch_size is None:
            return whole
        steps = whole.setdefault("gradient_accumulation_steps", 1)
        if not isinstance(steps, int) or steps < 1:
            raise PydanticCustomError(
                "not_a_positive_integer",
                "trainer.gradient_accumulation_steps is {steps}; it is a whole number from 1",
                {"steps": repr(steps)},
            )
        if self.batch_size % steps:
            raise PydanticCustomError(
                "batch_not_divisible",
                "batch_size is {batch_size} sequences a step, which cannot be split into "
                "trainer.gradient_accumulation_steps = {steps} micro-batches; change one",
                {"batch_size": self.batch_size, "steps": steps},
            )
        if whole.get("batch_size", self.batch_size // steps) != self.batch_size // steps:
            raise PydanticCustomError(
                "values_contradict",
                "batch_size is {batch_size} sequences a step, but trainer.batch_size x gradient_accumulation_steps is "
                "{other} x {steps}; keep one",
                {"batch_size": self.batch_size, "other": str(whole["batch_size"]), "steps": steps},
            )
        whole["batch_size"] = self.batch_size // steps
        return whole

    def by_source(self) -> dict[str | None, EnvConfig]:
        """Returns the settings of each source, as if the run had only this one. The key of a run without is None."""
        if not self.sources:
            return {None: self}
        return {source.name: self._of_task(source, source.agent) for source in self.sources}

    def by_evaluation(self) -> dict[str | None, EnvConfig]:
        """Returns the settings of each evaluation, as if it were the only one of a run. Their `dataset` has the rows.

        The evaluation set of a source has the source's name. The name is None for a run without `sources`.
        """
        sets = {
            name: part.model_copy(update={"dataset": part.dataset.evaluation_set(), "evaluations": []})
            for name, part in self.by_source().items()
            if part.dataset.has_evaluation_set
        }
        for spec in self.evaluations:
            agent = None if self.sources or "environment" in spec.model_fields_set else self.agent
            part = self._of_task(spec, agent)
            sets[spec.name] = part.model_copy(update={"dataset": part.dataset.evaluation_set()})
        return sets

    def _of_task(self, task: SourceSpec | EvaluationSpec, agent: AgentSpec | None) -> EnvConfig:
        own = {"dataset": task.dataset, "environment": task.environment, "agent": agent}
        return self.model_copy(update={"sources": [], "evaluations": [], **own})

    def schedule(self) -> Schedule | None:
        """Returns the order of the sources; None for a run without. Raises DatasetError for weights of many digits."""
        return Schedule({source.name: source.weight for source in self.sources}) if self.sources else None

    @property
    def workers(self) -> int:
        """Prompts worked on at a time."""
        return (
            self.max_num_workers
            if self.max_num_workers > 0
            else min(1024, self.max_num_workers_per_node * len(self.server_configs))
        )

    @property
    def least_rollouts(self) -> int:
        """The least number of rollouts with a score in a group."""
        return min(self.min_rollouts, self.group_size)

    @property
    def server(self) -> ServerConfig:
        """The model server; the first of several."""
        return self.server_configs[0]

    def with_templates(self, folder: Path | None) -> Self:
        """Returns these settings with the chat templates' text (`DatasetConfig.with_template`). Raises ConfigError."""

        def read(task: Any) -> Any:
            return task.model_copy(update={"dataset": task.dataset.with_template(folder)})

        tasks = {kind: list(map(read, getattr(self, kind))) for kind in ("sources", "evaluations")}
        return cast(Self, read(self).model_copy(update=tasks))

    def recorded(self, model: str) -> dict[str, Any]:
        """Returns the environment's part of the run's record: the settings that distinguish this run from others.

        The record omits addresses, secrets, time-outs, worker counts, logging and evaluation, because they may change
        between restarts.
        """
        recorded: dict[str, Any] = redact({
            "model": model,
            "max_token_length": self.max_token_length,
            "ensure_scores_are_not_same": self.ensure_scores_are_not_same,
            "environment": self.environment.recorded(),
            **({} if self.agent is None else {"agent": self.agent.recorded()}),
            "dataset": self.dataset.recorded(),
            **({"sources": {source.name: source.recorded() for source in self.sources}} if self.sources else {}),
            **({} if self.curriculum is None else {"curriculum": self.curriculum.model_dump(mode="json")}),
            "trainer": self.trainer_block(),
            **self._thinking(),
        })  # fmt: skip
        return recorded

    def _thinking(self) -> dict[str, Any]:
        """Returns the settings of thinking that have a value, because they change the request to the model."""
        names = ("thinking_mode", "reasoning_effort", "max_reasoning_tokens", "custom_thinking_prompt")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


TOP_LEVEL: Final = {
    "total_steps": "training_steps",
    "max_batches_offpolicy": "max_staleness",
    "batch_size": "batch_size",
}
"""Top-level name to the name in the `trainer:` block. A top-level batch_size counts the sequences of a whole step."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Compares two records of settings. Returns lines such as "dataset.temperature: 1.0 -> 0.5".

    For lists, and for `params`, which may hold keys, the lines have only the names.
    """
    changed: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if key == "params" or isinstance(before, list) or isinstance(after, list):
            changed += [f"{prefix}{key}"] if before != after else []
        elif isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}: {before} -> {after}")
    return changed
