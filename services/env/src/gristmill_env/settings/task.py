"""A task: its rows and rewards, and the environment or the agent that plays it. A run has one, or several `sources`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gristmill.internal.settings import Settings
from gristmill_env.settings.dataset import ROW_SOURCES, DatasetConfig, RewardSpec, whole_split, without_secrets


class EnvironmentSpec(Settings):
    """The environment that defines the task. A bare name means {type: name}."""

    type: str = "dataset"
    """Registered name, or your own class: path/to/file.py:Class, package.module:Class. It runs in a separate process.
    `tools` gives the model functions as tools."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, e.g. {tries: 3}; of tools: {tools: [my_tools.py:search], max_turns: 8}. Secrets
    (api_key) are not recorded."""

    step_timeout: float = Field(default=600.0, gt=0)
    """Seconds that one call of a method (reset, step, close) may take, and `play` between two replies. Then its rollout
    has failed."""

    @classmethod
    def in_full(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that distinguish this environment from others, without secrets and addresses."""
        addresses = ("base_url",) if self.type == "openenv" else ()
        return {"type": self.type, "params": without_secrets(self.model_dump(mode="json")["params"], *addresses)}


class AgentSpec(Settings):
    """The program that plays rollouts. A bare text means {function: text}, and `external` means {external: true}."""

    function: str | None = None
    """A function, as path/to/file.py:name or package.module:name: async def run(task, endpoint) -> float | None. It
    runs in a separate process, which all rollouts share."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the function. Secrets (api_key) are not recorded."""

    command: list[str] | None = None
    """A command that is started for each rollout, in the configuration's folder. OPENAI_BASE_URL and OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY lead its clients to the model, GRISTMILL_TASK names a file with the task,
    and GRISTMILL_REWARD the file for its reward."""

    env: dict[str, str] = Field(default_factory=dict)
    """Variables for the command: {NAME: value}. The command inherits no secret; ${NAME} as a value passes one on."""

    external: bool = False
    """Programs elsewhere ask the gateway for tasks and report rewards (docs/environments.md)."""

    timeout: float = Field(default=900.0, gt=0)
    """Seconds that one rollout may take. Then it has failed. The time of a program elsewhere begins when it gets the
    task."""

    off_policy: Literal["refuse", "untrained"] = "refuse"
    """What happens to requests for which the model samples from another distribution than the one that is trained
    (tool_choice, response_format, logit_bias): refuse answers 400; untrained answers, and trains no token of the
    reply."""

    address: str | None = Field(default=None, coerce_numbers_to_str=True)
    """Where the gateway listens: PORT, which only this machine reaches, or HOST:PORT. For external agents
    the variable GRISTMILL_GATEWAY_ADDRESS overrides the YAML. Default: a free port; for external agents 9100, which in
    Compose the stack's network reaches too."""

    @classmethod
    def in_full(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"external": True} if value == "external" else {"function": value}
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum((self.function is not None, self.command is not None, self.external)) != 1:
            raise PydanticCustomError("agent_kind", "an agent has one of function, command and external")
        if self.command == []:
            raise PydanticCustomError("agent_kind", "the agent's command is empty")
        if self.params and self.function is None:
            raise PydanticCustomError("agent_kind", "params belongs to an agent that is a function")
        if self.env and self.command is None:
            raise PydanticCustomError(
                "agent_kind", "env belongs to an agent's command; a function inherits all variables"
            )
        return self

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that distinguish this agent from others."""
        params = without_secrets(self.model_dump(mode="json")["params"], "base_url")
        return {
            "function": self.function,
            **({"params": params} if self.params else {}),
            "command": self.command,
            "external": self.external,
            "off_policy": self.off_policy,
        }


NAME: Final = r"^[A-Za-z0-9_.-]{1,64}$"
"""The names of sources and evaluations."""
OWN_EVALUATION: Final = "dataset"
"""The name of the evaluation of a run's own data set, among others."""


class SourceSpec(Settings):
    """One task of a run with several."""

    name: str = Field(pattern=NAME)
    """Name in groups, metrics and tables."""

    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Its part of the prompts: weight / sum of all weights. After any number of prompts, the number of this source's
    prompts differs from its part by less than one."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    """Keys of `dataset:` for this source, which override the run's keys."""

    rewards: list[str | RewardSpec] | None = None
    """The same as dataset.reward_functions of this source, which may be set instead."""

    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec)
    """The source's environment. Default: the run's."""

    agent: AgentSpec | None = None
    """The source's agent. Default: the run's, if the source has no environment."""

    @model_validator(mode="after")
    def _one_player(self) -> Self:
        if self.agent is not None and self.environment != EnvironmentSpec():
            raise PydanticCustomError("agent_and_environment", "a source has an agent or an environment, not both")
        return self

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that distinguish this source from others, without secrets and evaluation."""
        return {
            "weight": self.weight,
            "environment": self.environment.recorded(),
            **({} if self.agent is None else {"agent": self.agent.recorded()}),
            "dataset": self.dataset.recorded(),
        }


class CurriculumSpec(Settings):
    """Rows that rest because they are too easy or too hard. `true` means {}: the defaults."""

    band: tuple[Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]] = (0.1, 0.9)
    """Least and greatest mean reward of a row that does not rest, in the units of the run's rewards."""

    window: int = Field(default=1, ge=1, le=16)
    """The mean is over this number of the row's last groups. A row with fewer groups does not rest."""

    rest: int = Field(default=3, ge=1, le=64)
    """Epochs for which such a row is left out. Then it is played again."""

    @model_validator(mode="after")
    def _low_is_first(self) -> Self:
        low, high = self.band
        if low >= high:
            raise PydanticCustomError(
                "band_order",
                "band is [{low}, {high}]; it is the least and the greatest mean reward, such as [0.1, 0.9]",
                {"low": f"{low:g}", "high": f"{high:g}"},
            )
        return self


class EvaluationSpec(Settings):
    """One held-out evaluation of a run with several."""

    name: str = Field(pattern=NAME)
    """Name in the figures, as NAME/pass@1."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    """Keys of `dataset:` for this evaluation, which override the run's keys. Its rows are evaluated in their order,
    without shuffling. Without its own data set, the evaluation has the rows of a run without `sources`."""

    rewards: list[str | RewardSpec] | None = None
    """The same as dataset.reward_functions of this evaluation, which may be set instead. Default: the run's."""

    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec)
    """The evaluation's environment. Default: the run's environment or agent; an agent next to `sources` plays no
    evaluation, so there the environment must be set."""


_ROWS: Final = frozenset({*ROW_SOURCES, "rows_params", "dataset_config", "dataset_revision"})
"""Keys of `dataset:` that say where rows come from."""
_EVAL_ROWS: Final = frozenset(
    name for name in DatasetConfig.model_fields if name.startswith(("eval_dataset", "eval_split"))
)


_VERIFIERS: Final = "gristmill_env.adapters.verifiers"


def _with_verifiers(task: Any) -> Any:
    """Reads `environment: {type: verifiers}` as its agent, with the rows of its taskset unless the task names rows."""
    environment = task.get("environment") if isinstance(task, Mapping) else None
    environment = {"type": environment} if isinstance(environment, str) else environment
    if not isinstance(environment, Mapping) or environment.get("type") != "verifiers" or task.get("agent"):
        return task
    params, dataset = environment.get("params") or {}, task.get("dataset") or {}
    if not isinstance(params, Mapping) or environment.keys() - {"type", "params", "step_timeout"}:
        return task  # The check of the settings reports it.
    agent = {"function": f"{_VERIFIERS}:run", "params": params}
    if "step_timeout" in environment:
        agent["timeout"] = environment["step_timeout"]
    if isinstance(dataset, Mapping) and dataset.keys().isdisjoint(ROW_SOURCES):
        taskset = {key: params[key] for key in ("taskset",) if key in params}
        dataset = {**dataset, "rows": f"{_VERIFIERS}:rows", "rows_params": taskset}
    others = {key: value for key, value in task.items() if key != "environment"}
    return {**others, "agent": agent, "dataset": dataset}


def complete_tasks(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run with the keys of each source and each evaluation completed by the run's keys.

    Changes nothing that is not of the expected type, so that the check of the settings can report it.
    """
    if not values.get("sources"):
        values = _with_verifiers(values)
    dataset = {key: value for key, value in _plain(values.get("dataset")).items() if key in DatasetConfig.model_fields}
    players = {key: values[key] for key in ("environment", "agent") if values.get(key) is not None}
    complete = dict(values)
    for kind in ("sources", "evaluations"):
        if isinstance(values.get(kind), list):
            complete[kind] = [_completed(task, dataset, players, kind) for task in values[kind]]
    if values.get("sources"):
        if isinstance(complete["sources"], list):
            complete["sources"] = [_with_verifiers(source) for source in complete["sources"]]
        _check_players(complete.get("evaluations"), players)
    return complete


def _check_players(evaluations: Any, players: Mapping[str, Any]) -> None:
    """Raises PydanticCustomError for an evaluation next to sources that the run's agent would have to play."""
    for task in evaluations if isinstance(evaluations, list) else []:
        own = task.get("environment") if isinstance(task, Mapping) else None
        kind = own.get("type") if isinstance(own, Mapping) else own
        if kind == "verifiers" or ("agent" in players and kind is None):
            raise PydanticCustomError(
                "evaluation_without_environment",
                "the agent of the run plays its sources, and not the evaluation '{name}'; give the evaluation an "
                "environment (dataset: single replies), or make it the eval_split of a source",
                {"name": str(task.get("name")) if isinstance(task, Mapping) else ""},
            )


def _completed(task: Any, dataset: Mapping[str, Any], players: Mapping[str, Any], kind: str) -> Any:
    if not isinstance(task, Mapping) or not isinstance(task.get("dataset", {}), Mapping):
        return task
    own, rewards = task.get("dataset", {}), task.get("rewards")
    if rewards is not None and "reward_functions" in own:
        raise PydanticCustomError(
            "values_contradict",
            "'{name}' of {kind} has rewards and dataset.reward_functions; keep one",
            {"name": str(task.get("name")), "kind": kind},
        )
    functions = {} if rewards is None else {"reward_functions": rewards}
    inherited = {} if task.keys() & {"environment", "agent"} else dict(players)
    not_shared = _EVAL_ROWS | _ROWS
    if kind == "evaluations":
        inherited.pop("agent", None)  # EnvConfig.by_evaluation adds the run's agent
        not_shared = _EVAL_ROWS if own.keys().isdisjoint(ROW_SOURCES) else not_shared
    shared = {key: value for key, value in dataset.items() if key not in not_shared}
    if isinstance(split := shared.get("split"), str) and not own.keys().isdisjoint(ROW_SOURCES):
        shared["split"] = whole_split(split)
    return {**inherited, **task, "dataset": {**shared, **own, **functions}}


def _plain(section: Any) -> Mapping[str, Any]:
    if isinstance(section, DatasetConfig):
        return section.model_dump(exclude_unset=True)
    return section if isinstance(section, Mapping) else {}


def check_tasks(sources: Sequence[SourceSpec], evaluations: Sequence[EvaluationSpec], dataset: DatasetConfig) -> None:
    """Raises PydanticCustomError for sources and evaluations that contradict each other, or the run's `dataset`."""
    tasks: list[SourceSpec | EvaluationSpec] = [*sources, *evaluations]
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PydanticCustomError(
            "duplicate_name",
            "two sources or evaluations are named '{name}'; give each another name",
            {"name": twice},
        )
    if dataset.has_evaluation_set and not sources and OWN_EVALUATION in names:
        raise PydanticCustomError(
            "name_taken",
            "the evaluation of the run's own data set (eval_*) has the name '{name}'; give the other another name",
            {"name": OWN_EVALUATION},
        )
    for task in tasks:
        if not task.dataset.has_rows:
            raise PydanticCustomError(
                "dataset_unset",
                "'{name}' has no rows; set dataset_name, dataset_path or rows in its dataset",
                {"name": task.name},
            )
    for evaluation in evaluations:
        if found := [key for key in sorted(_EVAL_ROWS) if getattr(evaluation.dataset, key)]:
            raise PydanticCustomError(
                "eval_key_in_evaluation",
                "evaluation '{name}' has {key}; its rows come from {own}",
                {"name": evaluation.name, "key": found[0], "own": found[0].removeprefix("eval_")},
            )
    if not sources:
        return
    if found := [key for key in sorted(_ROWS | _EVAL_ROWS) if getattr(dataset, key)]:
        raise PydanticCustomError(
            "rows_beside_sources",
            "dataset.{key} is set, and the rows of this run come from its sources; move it into a source or into "
            "`evaluations`",
            {"key": found[0]},
        )
    addresses = [source.agent.address for source in sources if source.agent is not None and source.agent.external]
    if len(set(addresses)) < len(addresses):
        raise PydanticCustomError(
            "address_taken", "two sources have external agents at one address; give each another agent.address"
        )
