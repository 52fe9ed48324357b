"""Opens what a command needs: data set and rewards, the model servers with their tokenizer, and the API."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from gristmill import Client, GristmillError, Manifest
from gristmill_env.agents.player import AgentPlayer, agents
from gristmill_env.answers.symbolic_pool import check_limits, set_up_checks
from gristmill_env.data.dataset import PromptDataset
from gristmill_env.data.schedule import Schedule
from gristmill_env.environments import EnvironmentRunner, create_environment
from gristmill_env.errors import PromptError
from gristmill_env.gateway import Policy
from gristmill_env.inference import ModelServers, ServedModel, Thinking
from gristmill_env.rewards import Execution, Scorer, WeightedReward, create_reward
from gristmill_env.rewards.judge import refuse_own_judges
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.run_settings import RunSettings
from gristmill_env.running.limiter import Limits
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.run import EnvConfig, TimeoutAction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


AT_A_TERMINAL: Final = 20.0
"""Seconds to wait for the model server when a user watches the terminal."""


@dataclass(frozen=True)
class Task:
    """The parts that need no server. They load first, so that mistakes show at once."""

    run: RunSettings
    """The settings, of one source if the run has several."""
    dataset: PromptDataset
    scorer: Scorer
    environments: EnvironmentRunner

    @classmethod
    def load(cls, run: RunSettings) -> Task:
        """Loads the parts of a run without sources, or of a source of a run (`load_tasks`).

        Raises RewardError, DatasetError, EpisodeError, PluginError.
        """
        config, folder = run.config.dataset, run.config_folder
        spec = run.config.environment
        environments = EnvironmentRunner(create_environment(spec.type, spec.params, folder), spec.step_timeout)
        rewards = create_rewards(config, folder)
        servers = (server.base_url for server in run.config.server_configs)
        refuse_own_judges((weighted.reward for weighted in rewards), servers)
        dataset = PromptDataset(config, folder, run.source)
        has_answer, how = config.gold_field is not None, execution(run.config)
        scorer = Scorer(
            rewards,
            has_answer=has_answer,
            columns=dataset.columns,
            execution=how,
            failure_limit=run.config.reward_failure_limit,
            patience=run.config.patience,
        )
        logger.info("%s: %d rows; rewards: %s", dataset.label, len(dataset), ", ".join(scorer.names))
        return cls(run, dataset, scorer, environments)

    @property
    def name(self) -> str | None:
        """Name of the source; None if the run has no `sources`."""
        return self.run.source

    async def __aenter__(self) -> Self:
        """Starts the processes of rewards. Raises RewardError if the code of a reward cannot be loaded there."""
        await self.scorer.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Ends the threads and processes of rewards and environments."""
        await self.environments.close()
        await self.scorer.close()


def load_tasks(run: RunSettings) -> list[Task]:
    """Loads the task of each source; the one task of a run without. Raises as `Task.load`, with the source's name."""
    run.config.schedule()  # reports weights of too many digits before a server is needed
    return [load_task(part) for part in run.by_source()]


def load_task(part: RunSettings, kind: str = "source") -> Task:
    """Loads the task of a source or of an evaluation. Raises as `Task.load`, with the name. `kind`: for the message."""
    with naming_source(part.source, kind):
        return Task.load(part)


def of_source(error: GristmillError, source: str | None, kind: str = "source") -> GristmillError:
    """Returns the error with the name of its source; the same error if the run has no `sources`."""
    if source is None:
        return error
    return type(error)(error.code, f"{kind} '{source}': {error}", **{**error.values, "source": source})


@contextlib.contextmanager
def naming_source(source: str | None, kind: str = "source") -> Iterator[None]:
    """Gives the errors of the block the name of their source (`of_source`)."""
    try:
        yield
    except GristmillError as error:
        if source is None:
            raise
        raise of_source(error, source, kind) from error


@dataclass(frozen=True)
class Source:
    """A task with the generator that plays its rows."""

    task: Task
    generator: RolloutGenerator


@dataclass(frozen=True)
class Model:
    """The served model."""

    served: ServedModel
    servers: ModelServers
    tokenizer: PreTrainedTokenizerBase | None
    """None if the server gives text only."""
    max_length: int
    """Most tokens of a prompt and its completion."""
    manifest: Manifest | None
    """Of this model; None if the model service does not serve it."""

    def policy(self, config: EnvConfig) -> Policy:
        """Returns the model with a run's settings for prompts and sampling."""
        manifest = self.manifest
        return Policy(
            name=self.served.name,
            prompts=prompt_builder(config, self.tokenizer),
            servers=self.servers,
            max_length=self.max_length,
            tools=None if manifest is None else manifest.tool_parser is not None,
            reasoning=manifest is not None and manifest.reasoning_parser is not None,
            stop=tuple(config.dataset.stop),
            stop_token_ids=tuple(config.dataset.stop_token_ids),
            sampling=config.dataset.more_sampling,
        )

    def generator(self, task: Task) -> RolloutGenerator:
        """Returns what makes the rollouts of a task."""
        config = task.run.config
        return RolloutGenerator(config, self.policy(config), task.scorer, task.environments)


@dataclass(frozen=True)
class Session:
    """The tasks of a run with a connected model server."""

    sources: Sequence[Source]
    schedule: Schedule | None
    """None if there is only one task, because the run has no `sources`."""
    model: Model

    @property
    def server(self) -> ModelServers:
        """The model servers."""
        return self.model.servers

    @property
    def served(self) -> ServedModel:
        """The served model."""
        return self.model.served

    def evaluator(self, task: Task) -> RolloutGenerator:
        """Returns what makes the rollouts of an evaluation. That of a source plays as the source does.

        The run's agent plays another one with the evaluation's own prompts, sampling and rewards.
        """
        for source in self.sources:
            if source.task.name == task.name:
                return dataclasses.replace(source.generator, scorer=task.scorer, environments=task.environments)
        generator = self.model.generator(task)
        agent = self.sources[0].generator.agent
        if task.run.config.agent is None or not isinstance(agent, AgentPlayer):
            return generator
        policy, prompt, counts = _for_agent(task, self.served, generator.policy)
        player = dataclasses.replace(agent, policy=policy, system_prompt=prompt, counts=counts)
        return dataclasses.replace(generator, agent=player)

    def at(self, number: int) -> tuple[Source, int]:
        """Returns the source of a permit's row number, and the number of the row among the source's rows."""
        if self.schedule is None:
            return self.sources[0], number
        name, row = self.schedule.at(number)
        return next(source for source in self.sources if source.task.name == name), row

    @property
    def epoch(self) -> int:
        """The permits after which every row of every source had a turn."""
        if self.schedule is None:
            return len(self.sources[0].task.dataset)
        return max(
            self.schedule.number(name, len(source.task.dataset))
            for source in self.sources
            if (name := source.task.name) is not None
        )

    def turns(self, source: Source, row: int, count: int) -> list[int]:
        """Returns the row numbers of the permits for the next `count` turns of the source's `row`-th row."""
        rows = source.task.dataset.turns(row, count)
        if self.schedule is None:
            return rows
        assert source.task.name is not None
        return [self.schedule.number(source.task.name, turn) for turn in rows]


@contextlib.asynccontextmanager
async def open_session(
    run: RunSettings, tasks: Sequence[Task], *, wait: float = AT_A_TERMINAL, patience: float | None = None
) -> AsyncIterator[Session]:
    """Connects to the model server, and closes the connection and the tasks at the end.

    `wait`: seconds to wait for the server at the start, unless startup_patience is set. `patience`: seconds for which
    all servers may fail later; None: the run's. Raises InferenceError, PromptError.
    """
    config = run.config
    schedule = config.schedule()
    servers = ModelServers(config.server_configs, patience=patience or config.patience, thinking=Thinking.of(config))
    async with contextlib.AsyncExitStack() as opened:
        for task in tasks:
            with naming_source(task.name):
                await opened.enter_async_context(task)
        server = await opened.enter_async_context(servers)
        model = await meet_model(run, server, config.startup_patience or wait)
        sources = []
        for task in tasks:
            with naming_source(task.name):
                generator = model.generator(task)
                if task.run.config.agent is not None:
                    agent = await opened.enter_async_context(_agents(task, model.served, generator.policy))
                    generator = dataclasses.replace(generator, agent=agent)
                sources.append(Source(task, generator))
        yield Session(sources, schedule, model)


def _agents(task: Task, served: ServedModel, policy: Policy) -> AbstractAsyncContextManager[AgentPlayer]:
    """Returns the context of the task's agents. Raises InferenceError if the model server gives text only."""
    run, config = task.run, task.run.config
    assert config.agent is not None
    policy.servers.refuse_text_only()
    policy, prompt, counts = _for_agent(task, served, policy)
    log = run.run_folder / "logs" / ("agent.log" if task.name is None else f"agent.{task.name}.log")
    truncates = config.rollout_timeout_action is TimeoutAction.TRUNCATE
    return agents(
        config.agent, policy, run.config_folder, log, os.environ, prompt, counts, sessions_folder(run),
        truncates=truncates,
    )  # fmt: skip


def _for_agent(task: Task, served: ServedModel, policy: Policy) -> tuple[Policy, str | None, bool]:
    """Returns the policy that a task's agent asks, the system prompt of its tasks, and whether its number counts."""
    run, config = task.run, task.run.config
    assert config.agent is not None
    manifest = Manifest.find(run.deployment.models_dir)
    prompts = prompt_builder(for_agents(config), load_tokenizer(_tokenizer(config, manifest, served)))
    policy = dataclasses.replace(policy, prompts=prompts, untrained=config.agent.off_policy == "untrained")
    counts = any("episode_reward" in weighted.reward.asks_for for weighted in task.scorer.rewards)
    return policy, system_prompt(config), counts


def for_agents(config: EnvConfig) -> EnvConfig:
    """Returns the settings without what a run adds to prompts, because an agent writes its messages itself."""
    bare = config.dataset.model_copy(update={"system_prompt": None, "prefill": None})
    return config.model_copy(update={"dataset": bare, "custom_thinking_prompt": None})


def connect_api(run: RunSettings, patience: float, word: str | None = None) -> Client:
    """Returns a client of the run's API, to be used as a context. `patience`: seconds for which the API may be away.
    `word`: of the process' registrations, see `Client`."""
    return Client(run.config.rollout_server_url, patience=patience, token=run.deployment.api_token, word=word)


async def meet_model(run: RunSettings, server: ModelServers, patience: float) -> Model:
    """Waits for the model server, and loads its tokenizer. Raises InferenceError, PromptError."""
    config = run.config
    manifest = Manifest.find(run.deployment.models_dir)
    # Imports and file reads take seconds and need no server.
    early = asyncio.create_task(asyncio.to_thread(_load_early, tokenizer_name(config, manifest)))
    served = await server.connect(patience=patience, manifest=manifest)
    await early
    if served.text_only:
        logger.warning("%s gives text only: no token ids, so nothing here can be trained on", server.description)
        tokenizer = None
    else:
        tokenizer = load_tokenizer(_tokenizer(config, manifest, served))
        if config.max_reasoning_tokens is not None:
            logger.warning(
                "max_reasoning_tokens has no effect: %s gives token ids, and there no thought is cut by force; "
                "max_tokens bounds thought and answer together",
                server.description,
            )
    logger.info("model %s at %s", served.name, server.description)
    own_manifest = manifest if manifest is not None and manifest.name == served.name else None
    return Model(served, server, tokenizer, _max_length(config, served), own_manifest)


def execution(config: EnvConfig) -> Execution:
    """Returns the settings for calls of rewards. Also sets up the pool of symbolic checks."""
    set_up_checks(config.check_processes, check_limits(config.check_timeout))
    limits = Limits(config.reward_timeout, config.reward_wall_timeout)
    return Execution(limits, config.reward_threads, config.reward_processes)


def create_rewards(config: DatasetConfig, folder: Path | None) -> list[WeightedReward]:
    """Creates the configured rewards. `folder`: the folder of the configuration file. Raises RewardError."""
    return [WeightedReward(create_reward(spec, folder=folder), spec.weight) for spec in config.rewards()]


def _load_early(name: str | None) -> None:
    """Loads the tokenizer early if it is a local folder, because a hub may be slow. The later load raises errors."""
    if name is None or not Path(name).is_dir():
        import transformers  # noqa: F401

        return
    with contextlib.suppress(PromptError):
        load_tokenizer(name)


def prompt_builder(config: EnvConfig, tokenizer: PreTrainedTokenizerBase | None) -> PromptBuilder:
    """Creates the prompt builder of the run's settings. `tokenizer`: None if only text is sent."""
    thinking = Thinking.of(config)
    return PromptBuilder(
        tokenizer,
        system_prompt(config),
        config.dataset.prefill,
        thinking=thinking.enabled,
        effort=thinking.effort,
        template=config.dataset.chat_template,
        values=config.dataset.chat_template_kwargs,
    )


def sessions_folder(run: RunSettings) -> Path:
    """Returns the folder of unfinished rollouts of agents elsewhere."""
    return run.run_folder / "sessions"


def system_prompt(config: EnvConfig) -> str | None:
    """Returns the system prompt of the run's prompts."""
    parts = [config.custom_thinking_prompt, config.dataset.system_prompt]
    return "\n\n".join(part for part in parts if part) or None


def _tokenizer(config: EnvConfig, manifest: Manifest | None, served: ServedModel) -> str:
    """Returns the tokenizer's path or hub id; if known, the tokenizer of the served model."""
    if manifest is not None and manifest.name == served.name:
        if config.tokenizer_name not in (None, manifest.name, manifest.requested, manifest.tokenizer_path):
            logger.info("tokenizer: %s, of the served model, not %s", manifest.tokenizer_path, config.tokenizer_name)
        return manifest.tokenizer_path
    return config.tokenizer_name or served.root or served.name


def tokenizer_name(config: EnvConfig, manifest: Manifest | None) -> str | None:
    """Returns the tokenizer's path or hub id when no server reports its model; None when no setting names it."""
    names = (None, manifest.name, manifest.requested) if manifest is not None else (None,)
    if manifest is not None and config.tokenizer_name in names:
        return manifest.tokenizer_path
    return config.tokenizer_name or config.server.model_name


def _max_length(config: EnvConfig, served: ServedModel) -> int:
    if served.max_model_len is not None and served.max_model_len < config.max_token_length:
        logger.warning(
            "max_token_length is %d, but %s takes %d tokens at most; %d is used",
            config.max_token_length,
            served.name,
            served.max_model_len,
            served.max_model_len,
        )
        return served.max_model_len
    return config.max_token_length
