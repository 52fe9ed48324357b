"""What `serve` and `try` both need before the first prompt: data set, rewards, model server, tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from gristmill import Manifest, ManifestError
from gristmill_env.data.dataset import PromptDataset
from gristmill_env.environments import EnvironmentRunner, create_environment
from gristmill_env.errors import PromptError
from gristmill_env.inference import ModelServers, ServedModel, Thinking
from gristmill_env.launch import Launch
from gristmill_env.prompts import PromptBuilder, load_tokenizer
from gristmill_env.rewards import Execution, Scorer, WeightedReward, create_reward
from gristmill_env.roller import Roller
from gristmill_env.running import Limits
from gristmill_env.settings import DatasetConfig, EnvConfig
from gristmill_env.symbolic.pool import check_limits, set_up_checks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

AT_A_TERMINAL: Final = 20.0
"""Seconds to wait for the model server where somebody looks on."""


@dataclass(frozen=True)
class Task:
    """What needs no server: checked first, so that mistakes show at once."""

    dataset: PromptDataset
    scorer: Scorer
    environments: EnvironmentRunner

    @classmethod
    def load(cls, launch: Launch) -> Task:
        """Raises RewardError, DatasetError, EpisodeError, PluginError."""
        config = launch.config.dataset
        folder = launch.config_path.parent if launch.config_path is not None else None
        spec = launch.config.environment
        environments = EnvironmentRunner(create_environment(spec.type, spec.params, folder), spec.step_timeout)
        rewards = create_rewards(config, folder)
        dataset = PromptDataset(config, folder)
        has_answer, how = config.gold_field is not None, execution(launch.config)
        scorer = Scorer(
            rewards,
            has_answer=has_answer,
            columns=dataset.columns,
            execution=how,
            failure_limit=launch.config.reward_failure_limit,
        )
        logger.info("%s: %d rows; rewards: %s", dataset.label, len(dataset), ", ".join(scorer.names))
        return cls(dataset, scorer, environments)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads and processes of rewards and environments."""
        self.environments.stop()
        await self.scorer.close()


def execution(config: EnvConfig) -> Execution:
    """How the settings want rewards called. Sets up the pool of symbolic checks, too."""
    set_up_checks(config.check_processes, check_limits(config.check_timeout))
    limits = Limits(config.reward_timeout, config.reward_wall_timeout)
    return Execution(limits, config.reward_threads, config.reward_processes)


def create_rewards(config: DatasetConfig, folder: Path | None) -> list[WeightedReward]:
    """The rewards that the configuration lists. `folder`: the configuration file's. Raises RewardError."""
    return [WeightedReward(create_reward(spec, folder=folder), spec.weight) for spec in config.rewards()]


async def meet_model(launch: Launch, task: Task, server: ModelServers, patience: float) -> tuple[ServedModel, Roller]:
    """Wait for the model server, load its tokenizer, and be ready to roll. Raises InferenceError, PromptError."""
    config = launch.config
    manifest = read_manifest(launch.deployment.models_dir)
    # Seconds of imports and reading that need not wait for the server.
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
    prompts = prompt_builder(config, tokenizer)
    logger.info("model %s at %s", served.name, server.description)
    roller = Roller(config, prompts, server, task.scorer, task.environments, max_length=_max_length(config, served))
    return served, roller


def _load_early(name: str | None) -> None:
    """Load the tokenizer that will be wanted, where it is a folder; a hub may keep one waiting. What is wrong with it
    is told when it is wanted."""
    if name is None or not Path(name).is_dir():
        import transformers  # noqa: F401

        return
    with contextlib.suppress(PromptError):
        load_tokenizer(name)


def prompt_builder(config: EnvConfig, tokenizer: PreTrainedTokenizerBase | None) -> PromptBuilder:
    """Prompts as the run's settings want them. `tokenizer`: None where only text is sent."""
    parts = [config.custom_thinking_prompt, config.dataset.system_prompt]
    system_prompt = "\n\n".join(part for part in parts if part) or None
    thinking = Thinking.of(config)
    return PromptBuilder(
        tokenizer, system_prompt, config.dataset.prefill, thinking=thinking.enabled, effort=thinking.effort
    )


def read_manifest(models_dir: Path) -> Manifest | None:
    """The model service's manifest, where there is one."""
    try:
        return Manifest.read(models_dir)
    except ManifestError as error:
        logger.debug("%s", error)  # fine: a server of one's own has none, and tokenizer_name stands in
        return None


def _tokenizer(config: EnvConfig, manifest: Manifest | None, served: ServedModel) -> str:
    """Path or hub id of the tokenizer: the one that the served model was built with, wherever it is known."""
    if manifest is not None and manifest.name == served.name:
        if config.tokenizer_name not in (None, manifest.name, manifest.requested, manifest.tokenizer_path):
            logger.info("tokenizer: %s, of the served model, not %s", manifest.tokenizer_path, config.tokenizer_name)
        return manifest.tokenizer_path
    return config.tokenizer_name or served.root or served.name


def tokenizer_name(config: EnvConfig, manifest: Manifest | None) -> str | None:
    """Path or hub id of the tokenizer where no server says what it serves; None when nothing names one."""
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
