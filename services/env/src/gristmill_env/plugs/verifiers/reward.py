"""An environment's rubric as a reward: `type: verifiers`.

Each completion goes through the environment's own rollout, with a model client that returns the completion (`replay`).
The rubric's score_group then scores the resulting states. So totals and metrics equal the results of verifiers, except
if a function fails: here a failure is an error, never a 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from gristmill import ConfigError
from gristmill.settings import Settings, parse
from gristmill_env.errors import RewardError
from gristmill_env.plugs.verifiers.environment import load_environment
from gristmill_env.plugs.verifiers.failures import noted_failures
from gristmill_env.rewards.calls import Task
from gristmill_env.rewards.inputs import Known
from gristmill_env.rewards.reward import Reward
from gristmill_env.rewards.sample import Detailed, Sample, private

_PROMPT = "prompt"
"""Column in the rows of every environment."""


class RubricParams(Settings):
    """Which environment's rubric."""

    id: str
    """What vf.load_environment takes."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's load_environment."""


@dataclass(frozen=True)
class RubricReward(Reward):
    """The rubric of one environment. The unweighted values of its functions are the reward's parts."""

    name: str
    environment: Any
    """The vf.SingleTurnEnv."""

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset({"completion", "finish_reason", "messages", "row"})

    def bind(self, known: Known, name: str) -> Task:
        if _PROMPT not in known.columns:
            raise RewardError(
                "unknown_input",
                f"reward '{self.name}' scores rows of its verifiers environment, with a column '{_PROMPT}'; the data "
                f"set has {', '.join(known.columns) or 'no columns'}",
                reward=self.name,
                input=_PROMPT,
                columns=list(known.columns),
            )
        # Score each completion alone if possible. Then a failure affects one completion, not its group.
        in_group = self.environment.rubric.has_group_rewards
        function = self._score if in_group else self._score_one
        return Task(name, function, True, in_group, lambda samples: {"samples": samples})

    async def _score_one(self, samples: Sequence[Sample]) -> Detailed:
        (detailed,) = await self._score(samples)
        return detailed

    async def _score(self, samples: Sequence[Sample]) -> list[Detailed]:
        rubric = self.environment.rubric
        with noted_failures() as failures:
            states = await asyncio.gather(*(self._state(sample) for sample in samples))
            await rubric.score_group(states)
            for state in states:
                await rubric.cleanup(state)
        for function, failure in failures.items():
            if failure.counts:
                raise _named(function, failure.error) from failure.error
        failed = {function: failure.error for function, failure in failures.items()}
        return [Detailed(state["reward"], {**state["metrics"], **failed}) for state in states]

    async def _state(self, sample: Sample) -> Any:
        """Returns the final state of the environment's rollout."""
        from gristmill_env.plugs.verifiers.replay import Replay  # here, because it needs the extra

        prompt = _messages(sample)
        client = Replay(sample, prompt)
        state = await self.environment.rollout({**private(sample.row), _PROMPT: prompt}, client, "policy", {})
        if (error := state.get("error")) is not None:
            cause = error.__cause__ or error  # verifiers wraps the error in another error
            if isinstance(cause, RewardError):
                raise RewardError(cause.code, str(cause), **cause.values) from error
            raise _named("the environment's rollout", cause) from error
        return state


def rubric_reward(name: str, params: Mapping[str, Any]) -> RubricReward:
    """Returns the rubric of the environment that `params` describe (`RubricParams`).

    Raises RewardError for invalid params, PluginError for an environment that cannot be loaded.
    """
    try:
        wanted = parse(RubricParams, dict(params), f"params of reward '{name}'")
    except ConfigError as error:
        remedy = (
            "; if params is empty, the reward uses the environment of dataset.dataset_name: verifiers:<id>"
            if not params
            else ""
        )
        raise RewardError(error.code, f"{error}{remedy}", **error.values) from error
    return RubricReward(name, load_environment(wanted.id, wanted.args))


def _named(what: str, error: BaseException) -> RewardError:
    """Returns the RewardError for an `error` of the environment's code. `what`: the code's name, for the message."""
    if isinstance(error, RewardError):
        return RewardError(error.code, f"{what}: {error}", **error.values)
    kind = type(error).__name__
    return RewardError("reward_raised", f"{what}: {kind}: {error}", error=kind)


def _messages(sample: Sample) -> list[dict[str, Any]]:
    """Returns the model's prompt messages, or the row's prompt if the sample has no messages."""
    prompt = sample.messages or sample.row[_PROMPT]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]
