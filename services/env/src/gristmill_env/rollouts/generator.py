"""Makes rollouts: prompt, replies, turns (`generate`), then scores (`score`)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gristmill import SamplingParams
from gristmill.logs import line
from gristmill_env.data import Item, Message
from gristmill_env.environments import Environment, EnvironmentGroup, EnvironmentRunner, Reply
from gristmill_env.errors import ROW_ERRORS, EnvError, EpisodeError, PromptTooLongError
from gristmill_env.gather import gather
from gristmill_env.inference import Completion, GenerationRequest, ModelServers
from gristmill_env.outages import Outages, Wait, may_pass
from gristmill_env.rewards import Sample, Scorer
from gristmill_env.rollouts.groups import Rollout, RolloutGroup, Transcript
from gristmill_env.rollouts.prompts import Prompt, PromptBuilder
from gristmill_env.settings import EnvConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ask:
    """Options of the requests for one group's completions."""

    sampling: SamplingParams
    evaluation: bool


@dataclass(frozen=True)
class UnscoredGroup:
    """The finished rollouts of one item, before scoring."""

    item: Item
    name: str
    """The group's name in the logs."""
    step: int | None
    """Training steps done when the group began."""
    sampling: SamplingParams
    rollouts: list[Rollout]
    started: float
    """time.monotonic()."""


class RolloutGenerator:
    """Makes rollouts. Holds no state of an item, so any number of rollouts may run at the same time."""

    def __init__(
        self,
        config: EnvConfig,
        prompts: PromptBuilder,
        server: ModelServers,
        scorer: Scorer,
        environments: EnvironmentRunner,
        *,
        max_length: int,
    ) -> None:
        """`max_length`: most tokens of a rollout, its prompt included, by configuration and server."""
        self._config = config
        self._prompts = prompts
        self._server = server
        self._scorer = scorer
        self._environments = environments
        self._max_length = max_length
        self._outages = Outages(config.patience, "environment", EnvError)

    def for_task(self, scorer: Scorer, environments: EnvironmentRunner) -> RolloutGenerator:
        """Returns a generator with the same model, which uses other rewards and environments."""
        return RolloutGenerator(
            self._config, self._prompts, self._server, scorer, environments, max_length=self._max_length
        )

    @property
    def prompts(self) -> PromptBuilder:
        """Renders the prompts."""
        return self._prompts

    async def generate_and_score(
        self,
        item: Item,
        name: str,
        *,
        step: int | None = None,
        sampling: SamplingParams | None = None,
        count: int | None = None,
        evaluation: bool = False,
    ) -> RolloutGroup:
        """Makes `count` rollouts (default: `group_size`) of the item and scores them. `name` appears in the logs.

        `step`: training steps done, for the warm-up of `max_tokens`; None: as after it. `sampling`: overrides the
        configuration's sampling. `evaluation`: counts the requests against num_requests_for_eval of the servers.

        Raises InferenceError, and one of ROW_ERRORS for an error of the row. A failed reward is recorded in its score.
        """
        return await self.score(
            await self.generate(item, name, step=step, sampling=sampling, count=count, evaluation=evaluation)
        )

    async def generate(
        self,
        item: Item,
        name: str,
        *,
        step: int | None = None,
        sampling: SamplingParams | None = None,
        count: int | None = None,
        evaluation: bool = False,
    ) -> UnscoredGroup:
        """Makes the rollouts, the part of `generate_and_score` that needs the model servers.

        Takes the same arguments and raises the same errors.
        """
        started = time.monotonic()
        sampling = sampling or self.sampling(step)
        ask = _Ask(sampling, evaluation)
        rollouts = await self._repeated_rollouts(item, ask, count or self._config.group_size)
        self._log_rollouts(item, rollouts, name, time.monotonic() - started)
        return UnscoredGroup(item, name, step, sampling, rollouts, started)

    async def score(self, unscored: UnscoredGroup) -> RolloutGroup:
        """Scores the rollouts, the second part of `generate_and_score`."""
        item, rollouts = unscored.item, unscored.rollouts
        scores = await self._scorer.score([_sample(item, rollout, unscored.step) for rollout in rollouts])
        scored = RolloutGroup(item, unscored.sampling, rollouts, scores, time.monotonic() - unscored.started)
        self._log_scores(scored, unscored.name)
        return scored

    def sampling(self, step: int | None = None) -> SamplingParams:
        """Returns the sampling after `step` training steps; None: after the warm-up."""
        dataset = self._config.dataset
        most = dataset.max_tokens
        if step is not None and step < dataset.length_warmup_steps:
            progress = step / dataset.length_warmup_steps
            most = max(1, round(dataset.min_tokens + progress * (dataset.max_tokens - dataset.min_tokens)))
        return SamplingParams(temperature=dataset.temperature, top_p=dataset.top_p, max_tokens=most)

    async def _repeated_rollouts(self, item: Item, ask: _Ask, count: int) -> list[Rollout]:
        """Makes the rollouts, and makes them again after an error of the environment that may pass."""
        name, wait = self._environments.factory.name, Wait()
        while True:
            try:
                rollouts = await self._rollouts(item, ask, count)
            except EpisodeError as error:
                if not may_pass(error) or not await self._outages.wait(name, wait, str(error)):
                    raise
            else:
                self._outages.answered(name)
                return rollouts

    async def _rollouts(self, item: Item, ask: _Ask, count: int) -> list[Rollout]:
        async with self._environments.group() as group:
            begun = await gather(group.begin(item) for _ in range(count))
            prompts = self._build([opening for _, opening in begun])
            first = await self._first_replies(prompts, ask)
            return await gather(
                self._finish(group, environment, item.index, Transcript(prompt), completion, ask)
                for (environment, _), prompt, completion in zip(begun, prompts, first, strict=True)
            )

    def _build(self, openings: Sequence[Sequence[Message]]) -> list[Prompt]:
        """Builds a prompt from each opening. Equal openings, the rule in a group, are rendered and tokenized once."""
        built: list[Prompt] = []
        for number, opening in enumerate(openings):
            same = openings.index(opening)
            built.append(built[same] if same < number else self._prompts.build(opening))
        return built

    async def _first_replies(self, prompts: Sequence[Prompt], ask: _Ask) -> list[Completion]:
        """Returns a completion of each prompt. Equal prompts share one request, so the server reads the prompt once."""
        alike: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            alike.setdefault(prompt.text, []).append(prompt)
        answers = await gather(self._ask(same[0], ask, len(same)) for same in alike.values())
        replies = dict(zip(alike, map(iter, answers), strict=True))
        return [next(replies[prompt.text]) for prompt in prompts]

    async def _ask(self, prompt: Prompt, ask: _Ask, count: int = 1, earlier: str | None = None) -> list[Completion]:
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

    async def _finish(
        self,
        group: EnvironmentGroup,
        environment: Environment,
        row: int,
        transcript: Transcript,
        completion: Completion,
        ask: _Ask,
    ) -> Rollout:
        """Plays the rollout from its first reply to its end, and closes its environment."""
        try:
            rollout = await self._take_turns(environment, row, transcript, completion, ask)
        except ROW_ERRORS as error:
            error.unfinished = transcript.end("error")
            raise
        await group.close(environment)
        return rollout

    async def _take_turns(
        self, environment: Environment, row: int, transcript: Transcript, completion: Completion, ask: _Ask
    ) -> Rollout:
        replies = 0
        begun = transcript.begun
        while True:
            said = transcript.messages
            text = self._prompts.decode(completion.token_ids) if completion.text is None else completion.text
            text = begun + text
            transcript.add_reply(completion, text)
            replies += 1
            reply = Reply(text, completion.finish_reason, completion.length)
            turn = await self._environments.step(environment, reply, row)
            transcript.add_reward(turn.reward)
            if not turn.trained:
                transcript.leave_out_reply()
            if turn.done or completion.finish_reason == "length":
                return transcript.end(completion.finish_reason)
            if replies == environment.max_turns:
                return transcript.end("turns")
            between = self._prompts.continuation_tokens(said, turn.messages, transcript.last_token)
            if self._room(len(transcript.token_ids) + len(between.token_ids)) < 1:
                return transcript.end("length")
            transcript.add_messages(turn.messages, between.token_ids)
            begun = between.begun
            prompt = Prompt("", transcript.token_ids, transcript.messages)
            (completion,) = await self._ask(prompt, ask, earlier=completion.server)

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

    def _log_rollouts(self, item: Item, rollouts: Sequence[Rollout], name: str, seconds: float) -> None:
        testing = self._config.testing
        if testing:
            logger.info(line("prompt", prompt=name, row=item.index, text=rollouts[0].prompt.text))
        for number, rollout in enumerate(rollouts):
            version = ",".join(dict.fromkeys(span.version for span in rollout.labels)) or "unknown"
            tokens = "unknown" if rollout.sampled is None else rollout.sampled
            fields: dict[str, object] = {"prompt": name, "n": number, "tokens": tokens, "seconds": seconds}
            fields |= {"version": version, "finish": rollout.finish_reason}
            if rollout.replies > 1:
                fields["turns"] = rollout.replies
            text = repr(rollout.text) if rollout.replies == 1 else repr([dict(m) for m in rollout.messages])
            logger.info(line("completion", **fields) + (f" text={text}" if testing else ""))

    def _log_scores(self, scored: RolloutGroup, name: str) -> None:
        for number, score in enumerate(scored.scores):
            parts = {part: "none" if value is None else value for part, value in score.parts.items()}
            total = "none" if score.total is None else score.total
            logger.info(line("score", prompt=name, n=number, **parts, total=total))


def _trained(rollout: Rollout) -> list[int]:
    return list(itertools.compress(rollout.token_ids, rollout.mask))


def _sample(item: Item, rollout: Rollout, step: int | None) -> Sample:
    return Sample(
        completion=rollout.text,
        answer=item.answer,
        prompt=item.prompt,
        tokens=_trained(rollout) if rollout.token_ids else None,
        finish_reason=rollout.finish_reason,
        row=item.columns,
        messages=rollout.prompt.messages,
        conversation=rollout.messages,
        episode_reward=rollout.reward,
        conversational=item.conversation is not None,
        step=step,
    )
