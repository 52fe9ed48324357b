"""Makes groups: plays the rollouts of an item (`generate`), then scores them (`score`).

A rollout that fails is tried again, and then left out of its group. The group fails if too few rollouts finish.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from gristmill import SamplingParams
from gristmill.internal.logs import line
from gristmill_env.data import Item
from gristmill_env.environments import DatasetEnvironment, EnvironmentRunner
from gristmill_env.errors import ROLLOUT_ERRORS, ROW_ERRORS, EnvError, EpisodeError, RolloutTimeoutError
from gristmill_env.gateway import Policy
from gristmill_env.gather import gather
from gristmill_env.outages import Outages, Wait, may_pass
from gristmill_env.rewards import Sample, Score, Scorer
from gristmill_env.rollouts.conversations import GroupPrompts
from gristmill_env.rollouts.groups import Rollout, RolloutGroup
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.rollouts.turns import Ask, RolloutPlayer
from gristmill_env.settings.run import EnvConfig

logger = logging.getLogger(__name__)


class Player(Protocol):
    """Plays rollouts."""

    @property
    def name(self) -> str:
        """The user's name for what plays, for the log and for errors."""
        ...

    async def play(self, item: Item, ask: Ask, number: int) -> Rollout:
        """Plays one rollout to its end. `number`: of the rollout in its group.

        Raises InferenceError, and one of ROW_ERRORS.
        """
        ...


Play = Callable[[int], Awaitable[list[Rollout]]]
"""Plays a rollout, or the rollouts of one request."""


class _Results:
    """The rollouts of one group so far."""

    def __init__(self, count: int, least: int) -> None:
        """`count`: rollouts, or requests for several. `least`: how many of them must finish."""
        self.finished: dict[int, list[Rollout]] = {}
        self.failed: list[EnvError] = []
        self._count, self._least = count, least

    @property
    def rollouts(self) -> list[Rollout]:
        """The finished rollouts, in the order of their numbers and not of their ends."""
        return [rollout for number in sorted(self.finished) for rollout in self.finished[number]]

    def fail(self, error: EnvError) -> None:
        """Records a rollout that failed. Raises the group's first error if too few rollouts are left."""
        self.failed.append(error)
        if self._count - len(self.failed) < self._least:
            raise self.failed[0]

    def give_up(self, unfinished: EnvError) -> None:
        """Records that all other rollouts failed with the error `unfinished`. Raises it if too few have finished."""
        self.failed += [unfinished] * (self._count - len(self.finished) - len(self.failed))
        if len(self.finished) < self._least:
            self.keep_in(unfinished)
            raise unfinished

    def keep_in(self, error: EnvError) -> None:
        """Keeps the rollouts in the error that ends the group, for the record of dropped groups."""
        errors = dict.fromkeys((*self.failed, error))
        begun = [one.unfinished for one in errors if one.unfinished is not None]
        error.rollouts, error.failed = [*self.rollouts, *begun], self.failed


@dataclass(frozen=True)
class RolloutGenerator:
    """Makes rollouts. Holds no state of an item, so any number of rollouts may run at the same time."""

    config: EnvConfig
    policy: Policy
    """The model, as the environments' rollouts sample it."""
    scorer: Scorer
    environments: EnvironmentRunner
    agent: Player | None = None
    """Plays the rollouts in place of the environment."""

    @cached_property
    def _player(self) -> RolloutPlayer:
        return RolloutPlayer(self.config, self.policy, self.environments)

    @cached_property
    def _outages(self) -> Outages:
        return Outages(self.config.patience, "environment" if self.agent is None else "agent", EnvError)

    @property
    def prompts(self) -> PromptBuilder:
        """Renders the prompts."""
        return self.policy.prompts

    async def generate_and_score(
        self,
        item: Item,
        name: str,
        *,
        sampling: SamplingParams | None = None,
        count: int | None = None,
        evaluation: bool = False,
    ) -> RolloutGroup:
        """Makes the rollouts of the item and scores them. `name` appears in the logs.

        `count`: the exact number of rollouts, for an evaluation. Default: a group of `group_size` rollouts, which
        leaves out rollouts that fail or exceed `group_timeout` if `min_rollouts` are left. `sampling`: overrides the
        configuration's sampling. `evaluation`: counts the requests against num_requests_for_eval of the servers.

        Raises InferenceError, and one of ROW_ERRORS for an error of the row. A failed reward is recorded in its score.
        """
        group = await self.generate(item, name, sampling=sampling, count=count, evaluation=evaluation)
        return await self.score(group, name)

    async def generate(
        self,
        item: Item,
        name: str,
        *,
        step: int | None = None,
        sampling: SamplingParams | None = None,
        count: int | None = None,
        evaluation: bool = False,
        kept: Path | None = None,
    ) -> RolloutGroup:
        """Makes the rollouts without scores, the part of `generate_and_score` that needs the model servers.

        Takes the same arguments and raises the same errors. `step`: training steps done, for the warm-up of
        `max_tokens`; None: as after it. `kept`: a folder of the group alone, in which rollouts of agents elsewhere
        survive this process. The caller removes it when the group is submitted or dropped.
        """
        started = time.monotonic()
        sampling = sampling or self.sampling(step)
        ask = Ask(GroupPrompts(self.prompts), sampling, evaluation, kept)
        results = await self._rollouts(item, ask, count)
        rollouts, failed = results.rollouts, results.failed
        seconds = time.monotonic() - started
        self._log_rollouts(item, rollouts, name, seconds)
        for number, error in enumerate(failed, len(rollouts)):
            logger.warning(line("rollout_failed", prompt=name, n=number, error=error.code, text=str(error)))
        return RolloutGroup(item, sampling, rollouts, [], seconds, failed)

    async def score(self, group: RolloutGroup, name: str, step: int | None = None) -> RolloutGroup:
        """Scores the rollouts, the second part of `generate_and_score`."""
        started = time.monotonic()
        scores = await self.scorer.score([_sample(group.item, rollout, step) for rollout in group.rollouts])
        self._log_scores(scores, name)
        return dataclasses.replace(group, scores=scores, seconds=group.seconds + time.monotonic() - started)

    def sampling(self, step: int | None = None) -> SamplingParams:
        """Returns the sampling after `step` training steps; None: after the warm-up."""
        dataset = self.config.dataset
        most = dataset.max_tokens
        if step is not None and step < dataset.length_warmup_steps:
            progress = step / dataset.length_warmup_steps
            most = max(1, round(dataset.min_tokens + progress * (dataset.max_tokens - dataset.min_tokens)))
        return SamplingParams(temperature=dataset.temperature, top_p=dataset.top_p, max_tokens=most)

    async def _rollouts(self, item: Item, ask: Ask, count: int | None) -> _Results:
        """Plays the rollouts of a group. Each rollout is a separate task, but single replies share a request."""
        config = self.config
        size = config.group_size if count is None else count
        least, limit = (config.least_rollouts, config.group_timeout) if count is None else (count, None)

        async def play_one(number: int) -> list[Rollout]:
            return [await (self.agent or self._player).play(item, ask, number)]

        async def play_all(number: int) -> list[Rollout]:
            return await self._player.play_single_replies(item, ask, size)

        plain = self.agent is None and self.environments.factory.kind is DatasetEnvironment
        if plain and limit is None and config.rollout_timeout is None:
            results, work = _Results(1, 1), [play_all]
        else:
            results, work = _Results(size, least), [play_one] * size
        try:
            async with asyncio.timeout(limit) as bound:
                await gather(self._with_retries(play, number, results) for number, play in enumerate(work))
        except TimeoutError:
            if not bound.expired():
                raise
            text = f"the rollout did not finish within group_timeout, {limit:g} s"
            results.give_up(RolloutTimeoutError("group_timeout", text, seconds=limit))
        except ROW_ERRORS as error:
            results.keep_in(error)
            raise
        return results

    async def _with_retries(self, play: Play, number: int, results: _Results) -> None:
        """Plays a rollout, or all rollouts of one request, until it finishes or its retries are used up.

        An error of a service that may answer later is waited for, and is not a retry.
        """
        name = self.environments.factory.name if self.agent is None else self.agent.name
        wait, retries = None, self.config.rollout_retries
        while True:
            try:
                rollouts = await play(number)
            except ROLLOUT_ERRORS as error:
                if isinstance(error, EpisodeError) and may_pass(error):
                    wait = wait or Wait()
                    if await self._outages.wait(name, wait, str(error)):
                        continue
                if retries == 0:
                    results.fail(error)
                    return
                retries -= 1
            else:
                self._outages.answered(name)
                results.finished[number] = rollouts
                return

    def _log_rollouts(self, item: Item, rollouts: Sequence[Rollout], name: str, seconds: float) -> None:
        testing = self.config.testing
        if testing:
            logger.info(line("prompt", prompt=name, row=item.index, text=rollouts[0].prompt.text))
        for number, rollout in enumerate(rollouts):
            version = ",".join(dict.fromkeys(span.version for span in rollout.labels)) or "unknown"
            tokens = "unknown" if rollout.sampled is None else rollout.sampled
            fields: dict[str, object] = {"prompt": name, "n": number, "tokens": tokens, "seconds": seconds}
            fields |= {"version": version, "finish": rollout.finish_reason}
            if rollout.replies > 1:
                fields["turns"] = rollout.replies
            if rollout.others:
                fields["branches"] = len(rollout.branches)
            fields |= rollout.counts
            text = repr(rollout.text) if rollout.replies == 1 else repr([dict(m) for m in rollout.messages])
            logger.info(line("completion", **fields) + (f" text={text}" if testing else ""))

    def _log_scores(self, scores: Sequence[Score], name: str) -> None:
        for number, score in enumerate(scores):
            parts = {part: "none" if value is None else value for part, value in score.parts.items()}
            total = "none" if score.total is None else score.total
            logger.info(line("score", prompt=name, n=number, **parts, total=total))


def _trained(rollout: Rollout) -> list[int]:
    return list(itertools.compress(rollout.token_ids, rollout.mask))


def _sample(item: Item, rollout: Rollout, step: int | None) -> Sample:
    return Sample.of(
        item,
        rollout.text,
        tokens=[token for branch in rollout.branches for token in _trained(branch)] if rollout.token_ids else None,
        finish_reason=rollout.finish_reason,
        messages=rollout.prompt.messages,
        conversation=rollout.messages,
        episode_reward=rollout.reward,
        episode_parts=rollout.parts,
        step=step,
    )
