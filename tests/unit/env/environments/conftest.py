"""Rollouts of environments that ask a model with prescribed replies."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.unit.env.conftest import FailingServer
from tests.unit.env.gateway.conftest import TEMPLATE, ScriptedModel
from transformers import PreTrainedTokenizerFast

from gristmill_env.data import Item
from gristmill_env.environments import Environment, EnvironmentFactory, EnvironmentRunner, Model
from gristmill_env.gateway import Policy
from gristmill_env.inference import ModelServers
from gristmill_env.rewards import Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.groups import Rollout
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.servers import ServerConfig

ITEM = Item(row=3, index=3, prompt="2 + 2?", answer="4")
Play = Callable[[Item, Model], Any]
Roll = Callable[..., Any]


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast, failing_server: FailingServer) -> ScriptedModel:
    return ScriptedModel(tokenizer, failing_server)


@pytest.fixture
async def roll(model: ScriptedModel) -> AsyncIterator[Roll]:
    """Returns a function that plays one rollout of a class, or of a class with the function `play`."""
    model.tokenizer.chat_template, before = TEMPLATE, model.tokenizer.chat_template
    runners: list[EnvironmentRunner] = []

    async def play(
        kind: type[Environment] | EnvironmentFactory | Play, *, tools: bool | None = None, **settings: Any
    ) -> Rollout:
        if not isinstance(kind, type | EnvironmentFactory):
            kind = playing(kind, settings.pop("max_turns", 16))
        made = kind if isinstance(kind, EnvironmentFactory) else EnvironmentFactory(kind)
        runners.append(EnvironmentRunner(made, settings.pop("step_timeout", 60.0)))
        room = settings.pop("max_length", 1024)
        item = dataclasses.replace(ITEM, columns=settings.pop("columns", {}))
        config = EnvConfig.model_validate({"group_size": 1, "rollout_retries": 0, **settings})
        async with (
            Scorer([WeightedReward(create_reward("episode"), 1.0)], has_answer=True) as scorer,
            ModelServers([ServerConfig(base_url=model.server.url)], patience=0.5) as servers,
        ):
            await servers.connect(patience=5)
            policy = Policy("tiny", PromptBuilder(model.tokenizer, "Be brief."), servers, room, tools)
            generator = RolloutGenerator(config, policy, scorer, runners[-1])
            (rollout,) = (await generator.generate(item, "test")).rollouts
        return rollout

    yield play
    for runner in runners:
        await runner.close()
    model.tokenizer.chat_template = before


def playing(play: Play, turns: int = 16) -> type[Environment]:
    """Returns a class with the function as its `play`."""

    class Playing(Environment):
        max_turns = turns

        async def play(self, item: Item, model: Model) -> Any:
            return await play(item, model)

    return Playing


def text(model: ScriptedModel, ids: Any) -> str:
    return str(model.tokenizer.decode(list(ids)))


def trained(model: ScriptedModel, rollout: Rollout) -> list[str]:
    """Returns the text of the trained tokens of each branch."""
    return [
        text(model, [token for token, mask in zip(branch.token_ids, branch.mask, strict=True) if mask])
        for branch in rollout.branches
    ]
