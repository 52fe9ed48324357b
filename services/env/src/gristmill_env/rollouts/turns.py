"""Plays one rollout of an environment: its conversations with the model, its time limit, and the end.

Each rollout is played separately, so a slow environment or a slow reply delays no other rollout of the group.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from gristmill import SamplingParams
from gristmill_env.data import Item
from gristmill_env.environments import EnvironmentRunner
from gristmill_env.errors import ROW_ERRORS, EpisodeError, RolloutTimeoutError
from gristmill_env.gateway import Policy
from gristmill_env.rollouts.conversations import Conversations, GroupPrompts, sample, single_reply
from gristmill_env.rollouts.groups import Rollout
from gristmill_env.settings.run import EnvConfig, TimeoutAction


@dataclass(frozen=True)
class Ask:
    """The prompts of one group, and the options of its requests."""

    prompts: GroupPrompts
    sampling: SamplingParams
    evaluation: bool
    kept: Path | None = None
    """The group's folder, in which rollouts of agents elsewhere are kept until the group is complete."""


class RolloutPlayer:
    """Plays rollouts. Holds no state of an item, so any number of rollouts may be played at the same time."""

    def __init__(self, config: EnvConfig, policy: Policy, environments: EnvironmentRunner) -> None:
        self._config, self._policy, self._environments = config, policy, environments

    async def play(self, item: Item, ask: Ask, number: int = 0) -> Rollout:
        """Plays one rollout to its end, and closes its environment. `number`: of the rollout in its group.

        Raises InferenceError, and one of ROW_ERRORS, which keeps the rollout so far (`EnvError.unfinished`). After
        `rollout_timeout`, returns the rollout as truncated or raises RolloutTimeoutError, by `rollout_timeout_action`.
        """
        limit = self._config.rollout_timeout
        talk = Conversations(self._policy, ask.prompts, ask.sampling, evaluation=ask.evaluation)
        try:
            async with asyncio.timeout(limit) as bound:

                def ended() -> None:
                    bound.reschedule(None)  # a slow close() is not part of the rollout
                    talk.end()

                end = await self._environments.play(item, talk.answer, ended)
        except TimeoutError as error:
            if not bound.expired():
                raise
            truncates = self._config.rollout_timeout_action is TimeoutAction.TRUNCATE
            if truncates and (rollout := talk.rollout_so_far("length")) is not None:
                return rollout
            text = f"the rollout took more than rollout_timeout, {limit:g} s"
            late = RolloutTimeoutError("rollout_timeout", text, seconds=limit)
            late.unfinished = talk.rollout_so_far("error")
            raise late from error
        except ROW_ERRORS as error:
            error.unfinished = talk.rollout_so_far("error")
            raise
        played = talk.rollout(end.reward, end.over)
        if played is None:
            name = self._environments.factory.name
            raise EpisodeError("environment_said_nothing", f"{name} has ended without a reply of the model")
        return played

    async def play_single_replies(self, item: Item, ask: Ask, count: int) -> list[Rollout]:
        """Plays `count` rollouts of one reply by one request, so that the server reads the prompt once.

        For the environment `dataset`, whose methods neither wait nor fail. Raises as `play` does.
        """
        prompt, prompts = ask.prompts.build(item.messages), self._policy.prompts
        completions = await sample(self._policy, prompt, ask.sampling, evaluation=ask.evaluation, count=count)
        return [single_reply(prompt, completion, prompts) for completion in completions]
