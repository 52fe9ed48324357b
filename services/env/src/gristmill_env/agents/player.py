"""Plays one rollout by an agent: a session at the gateway, the agent's run, and the sequences that it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.deployment import read_secret
from gristmill.internal.prometheus import parse_address
from gristmill_env.agents.runners import TOKEN_FILE, AgentRunner, CommandAgent, ExternalAgent, FunctionAgent
from gristmill_env.agents.task import AgentTask, Endpoint
from gristmill_env.data import Item, system
from gristmill_env.errors import EpisodeError, RolloutTimeoutError
from gristmill_env.gateway import PORT, Branch, Gateway, Policy, Session, Sessions, serving
from gristmill_env.rollouts.groups import Rollout, joined
from gristmill_env.rollouts.prompts import Prompt, PromptBuilder, opened_thought
from gristmill_env.rollouts.turns import Ask
from gristmill_env.settings.task import AgentSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentPlayer:
    """Plays rollouts. Any number may be played at the same time."""

    spec: AgentSpec
    runner: AgentRunner
    gateway: Gateway
    policy: Policy
    system_prompt: str | None = None
    counts: bool = True
    """Whether the agent's number is a part of the total: the run has the reward `episode`."""
    truncates: bool = False
    """Whether a rollout that takes too long is trained as truncated (`rollout_timeout_action`). Else it has failed."""
    ignored: list[float] = field(default_factory=list)
    """The first number that no reward reads."""

    @property
    def name(self) -> str:
        """The agent's function, the program of its command, or `external`."""
        return self.spec.function or (self.spec.command or ["external"])[0]

    async def play(self, item: Item, ask: Ask, number: int = 0) -> Rollout:
        """Runs the agent on the item, or goes on with the rollout of a killed process.

        After the agent's `timeout`, returns the rollout as truncated or raises RolloutTimeoutError. Raises
        InferenceError if the model servers were away, EnvError if the rollout could not be written, and EpisodeError if
        the agent fails or asks for no reply.
        """
        kept = ask.kept if self.runner.elsewhere else None
        session = Session(self.policy, ask.sampling, evaluation=ask.evaluation, folder=kept, number=number)
        self.gateway.sessions.add(session)
        try:
            await self._run(item, session)
            if session.failure is not None:  # the agent may have caught the error
                session.forget()
                raise session.failure
            reward = None if session.ended is None else session.ended.reward
            rollout = rollout_of(session, reward, self.policy.prompts)
            if rollout is None:
                raise EpisodeError("agent_said_nothing", "the agent has ended without a reply of the model")
        except (EpisodeError, RolloutTimeoutError) as error:
            session.forget()
            if session.failure is not None:
                raise session.failure from error
            late = isinstance(error, RolloutTimeoutError)
            if late and self.truncates and (rollout := self._so_far(session, "length")) is not None:
                return rollout
            error.unfinished = self._so_far(session, "error")
            raise
        finally:
            self.gateway.sessions.remove(session)
            await session.close()
        if reward is not None and not self.counts and not self.ignored:
            self.ignored.append(reward)
            logger.warning(
                "the agent returned the reward %g, and nothing reads it: add `episode` to reward_functions", reward
            )
        return rollout

    async def _run(self, item: Item, session: Session) -> None:
        """Runs the agent until the rollout's reward is recorded in the session."""
        limit = self.spec.timeout
        base_url = self.gateway.base_url(session)
        endpoint = Endpoint(base_url, base_url.removesuffix("/v1"), session.key, self.policy.name)
        try:
            await self.runner.run(self._task(item), endpoint, session, limit)
        except TimeoutError as error:
            raise RolloutTimeoutError(
                "agent_timeout", f"the agent took more than {limit:g} s", seconds=limit
            ) from error  # fmt: skip

    def _so_far(self, session: Session, finish_reason: str) -> Rollout | None:
        """Returns the unfinished rollout up to its last reply; None before its first reply."""
        rollout = rollout_of(session, None, self.policy.prompts)
        return None if rollout is None else dataclasses.replace(rollout, finish_reason=finish_reason)

    def _task(self, item: Item) -> AgentTask:
        messages = item.messages
        if self.system_prompt and messages[0]["role"] != "system":
            messages = (system(self.system_prompt), *messages)
        return AgentTask(
            item.prompt, [dict(message) for message in messages], item.answer, dict(item.columns), item.index
        )  # fmt: skip


@contextlib.asynccontextmanager
async def agents(
    spec: AgentSpec,
    policy: Policy,
    folder: Path | None,
    log: Path,
    environ: Mapping[str, str],
    system_prompt: str | None = None,
    counts: bool = True,
    sessions: Path | None = None,
    truncates: bool = False,
) -> AsyncIterator[AgentPlayer]:
    """Serves the gateway and runs agents inside the block.

    `policy`: its prompts add no system prompt, because the agent writes the messages. `system_prompt`: of the tasks.
    `counts`: whether a reward reads the agents' numbers. `sessions`: the folder of unfinished rollouts. `truncates`: as
    in AgentPlayer. `folder`: the configuration's folder. `log`: receives the output of commands. `environ` names the
    file with the token that programs elsewhere need for a task. Raises EnvError if the gateway's address is taken or
    the agent cannot be loaded, and ConfigError if the token's file cannot be read.
    """
    runner: AgentRunner
    gateway_sessions = Sessions(folder=sessions)
    if spec.function is not None:
        runner = FunctionAgent(spec.function, folder, spec.params)
    elif spec.command is not None:
        runner = CommandAgent(spec.command, folder, log, spec.env)
    else:
        runner = ExternalAgent(gateway_sessions, read_secret(environ, TOKEN_FILE))
    address = ("127.0.0.1", PORT if spec.external else 0) if spec.address is None else parse_address(spec.address)
    async with serving(gateway_sessions, policy.name, address, environ, runner.routes) as gateway, runner:
        yield AgentPlayer(spec, runner, gateway, policy, system_prompt, counts, truncates)


def rollout_of(session: Session, reward: float | None, prompts: PromptBuilder) -> Rollout | None:
    """Returns the session's branches as a rollout; None if it has none. The last branch has the newest reply."""
    rollout = joined(session.branches(), len(session.turns), lambda branch: _part(branch, reward, prompts))
    if rollout is None:
        return None
    parts = {} if session.ended is None else session.ended.parts
    return dataclasses.replace(rollout, counts=session.turns.counts(), parts=parts)


def _part(branch: Branch, reward: float | None, prompts: PromptBuilder) -> Rollout:
    root, last, ids = branch.turns[0], branch.turns[-1], tuple(branch.prompt.tolist())
    text = prompts.decode(ids, special=True)
    prompt = Prompt(text, ids, tuple(root.stored.more), tuple(root.stored.tools), begun=opened_thought(text))
    begun = opened_thought(prompts.decode(last.given.tolist(), special=True))
    return Rollout.of(branch, prompt, begun + prompts.decode(last.sampled.tolist()), reward)
