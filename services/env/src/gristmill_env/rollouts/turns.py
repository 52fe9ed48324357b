"""Plays one rollout: the environment's reset, replies and steps in turn, and the end.

Each rollout is played separately, so a slow environment or a slow reply delays no other rollout of the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill import SamplingParams
from gristmill_env.data import Item, Message
from gristmill_env.environments import Environment, EnvironmentRunner, Reply
from gristmill_env.errors import ROW_ERRORS, PromptTooLongError, RolloutTimeoutError
from gristmill_env.inference import Completion, GenerationRequest, ModelServers
from gristmill_env.rollouts.groups import Rollout, Transcript
from gristmill_env.rollouts.prompts import Prompt, PromptBuilder
from gristmill_env.settings import EnvConfig, TimeoutAction


class GroupPrompts:
    """Builds the first prompts of one group. Equal openings, the rule in a group, are rendered and tokenized once."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._built: list[tuple[Sequence[Message], Prompt]] = []

    def build(self, opening: Sequence[Message]) -> Prompt:
        """Returns the prompt of an opening. Raises PromptError when the template refuses it."""
        for known, prompt in self._built:
            if known == opening:
                return prompt
        prompt = self._builder.build(opening)
        self._built.append((opening, prompt))
        return prompt


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

    def __init__(
        self,
        config: EnvConfig,
        prompts: PromptBuilder,
        server: ModelServers,
        environments: EnvironmentRunner,
        *,
        max_length: int,
    ) -> None:
        """`max_length`: most tokens of a rollout, its prompt included, by configuration and server."""
        self._config = config
        self._prompts = prompts
        self._server = server
        self._environments = environments
        self._max_length = max_length

    async def play(self, item: Item, ask: Ask, number: int = 0) -> Rollout:
        """Plays one rollout to its end, and closes its environment. `number`: of the rollout in its group.

        Raises InferenceError, and one of ROW_ERRORS, which keeps the rollout so far (`EnvError.unfinished`). After
        `rollout_timeout`, returns the rollout as truncated or raises RolloutTimeoutError, by `rollout_timeout_action`.
        """
        limit = self._config.rollout_timeout
        transcript: Transcript | None = None
        try:
            async with asyncio.timeout(limit) as bound, self._environments.opened() as environment:
                opening = await self._environments.reset(environment, item)
                transcript = Transcript(ask.prompts.build(opening))
                rollout = await self._take_turns(environment, item.index, transcript, ask)
                bound.reschedule(None)  # a slow close() is not part of the rollout
        except TimeoutError as error:
            if not bound.expired():
                raise
            truncates = self._config.rollout_timeout_action is TimeoutAction.TRUNCATE
            if truncates and transcript is not None and transcript.replies > 0:
                return transcript.end_at_last_reply("length")
            text = f"the rollout took more than rollout_timeout, {limit:g} s"
            late = RolloutTimeoutError("rollout_timeout", text, seconds=limit)
            late.unfinished = _unfinished(transcript)
            raise late from error
        except ROW_ERRORS as error:
            error.unfinished = _unfinished(transcript)
            raise
        return rollout

    async def play_single_replies(self, item: Item, ask: Ask, count: int) -> list[Rollout]:
        """Plays `count` rollouts of one reply by one request, so that the server reads the prompt once.

        For the environment `dataset`, whose methods neither wait nor fail. Raises as `play` does.
        """
        prompt = ask.prompts.build(await self._environments.opening(item))
        rollouts = []
        for completion in await self._ask(prompt, ask, count):
            transcript = Transcript(prompt)
            transcript.add_reply(completion, prompt.begun + self._text(completion))
            rollouts.append(transcript.end(completion.finish_reason))
        return rollouts

    async def _take_turns(self, environment: Environment, row: int, transcript: Transcript, ask: Ask) -> Rollout:
        prompt, begun = transcript.prompt, transcript.prompt.begun
        earlier: str | None = None
        while True:
            said = transcript.messages
            (completion,) = await self._ask(prompt, ask, earlier=earlier)
            text = begun + self._text(completion)
            transcript.add_reply(completion, text)
            reply = Reply(text, completion.finish_reason, completion.length)
            turn = await self._environments.step(environment, reply, row)
            transcript.add_reward(turn.reward)
            if not turn.trained:
                transcript.leave_out_reply()
            if turn.done or completion.finish_reason == "length":
                return transcript.end(completion.finish_reason)
            if transcript.replies == environment.max_turns:
                return transcript.end("turns")
            between = self._prompts.continuation_tokens(said, turn.messages, transcript.last_token)
            if self._room(len(transcript.token_ids) + len(between.token_ids)) < 1:
                return transcript.end("length")
            transcript.add_messages(turn.messages, between.token_ids)
            prompt = Prompt("", transcript.token_ids, transcript.messages)
            begun, earlier = between.begun, completion.server

    async def _ask(self, prompt: Prompt, ask: Ask, count: int = 1, earlier: str | None = None) -> list[Completion]:
        dataset = self._config.dataset
        request = GenerationRequest(
            token_ids=prompt.token_ids,
            messages=prompt.messages,
            prefill=prompt.prefill,
            sampling=self._within_room(len(prompt.token_ids), ask.sampling),
            count=count,
            stop=dataset.stop,
            stop_token_ids=dataset.stop_token_ids,
            earlier=earlier,
        )
        return await self._server.generate(request, evaluation=ask.evaluation)

    def _text(self, completion: Completion) -> str:
        return self._prompts.decode(completion.token_ids) if completion.text is None else completion.text

    def _room(self, tokens: int) -> int:
        return self._max_length - tokens

    def _within_room(self, tokens: int, sampling: SamplingParams) -> SamplingParams:
        room = self._room(tokens)
        if room < 1:
            raise PromptTooLongError(
                "prompt_too_long",
                f"the prompt has {tokens} tokens; prompt and completion may have {self._max_length}",
                tokens=tokens,
                limit=self._max_length,
            )
        if room >= sampling.max_tokens:
            return sampling
        return SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=room)


def _unfinished(transcript: Transcript | None) -> Rollout | None:
    """Returns the rollout so far; None before its first reply."""
    return transcript.end("error") if transcript is not None and transcript.replies > 0 else None
