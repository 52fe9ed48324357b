"""One item, end to end: prompt, completions, scores."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import msgspec

from gristmill import SamplingParams
from gristmill.logs import line
from gristmill_env.data.dataset import Item
from gristmill_env.inference import Completion, ModelServer
from gristmill_env.prompts import Prompt, PromptBuilder
from gristmill_env.rewards import Sample, Score, Scorer
from gristmill_env.settings import EnvConfig

logger = logging.getLogger(__name__)


class PromptTooLongError(Exception):
    """The prompt leaves no room for a completion."""


@dataclass(frozen=True)
class Rollout:
    """The completions of one item and what they scored, in the same order."""

    item: Item
    prompt: Prompt
    sampling: SamplingParams
    completions: list[Completion]
    texts: list[str]
    scores: list[Score]


class Roller:
    """Makes rollouts. Holds no state of an item, so that any number may run at a time without mixing."""

    def __init__(
        self, config: EnvConfig, prompts: PromptBuilder, server: ModelServer, scorer: Scorer, *, max_length: int
    ) -> None:
        """`max_length`: most tokens of prompt and completion together, by configuration and server."""
        self._config = config
        self._prompts = prompts
        self._server = server
        self._scorer = scorer
        self._max_length = max_length

    async def roll(
        self, item: Item, name: str, *, sampling: SamplingParams | None = None, count: int | None = None
    ) -> Rollout:
        """Sample `count` (`group_size`) completions of the item and score them. `name` stands in the logs.

        `sampling`: instead of the run's. Its max_tokens is cut to the room that the prompt leaves.

        Raises PromptTooLongError, PromptError, InferenceError; a failing reward is in its score.
        """
        prompt = self._prompts.build(item.prompt)
        room = self._max_length - len(prompt.token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt.token_ids)} tokens; prompt and completion may have {self._max_length}"
            )
        if sampling is None:
            settings = self._config.dataset
            sampling = SamplingParams(
                temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_tokens
            )
        sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        started = time.monotonic()
        completions = await self._server.generate(prompt.token_ids, sampling, count or self._config.group_size)
        seconds = time.monotonic() - started
        texts = [self._prompts.decode(completion.token_ids) for completion in completions]
        # On a thread: a slow reward must not hold up the other items, nor the renewal of permits.
        scores = await asyncio.to_thread(self._score, item, completions, texts)
        rollout = Rollout(item, prompt, sampling, completions, texts, scores)
        self._log(rollout, name, seconds)
        return rollout

    def _score(self, item: Item, completions: list[Completion], texts: list[str]) -> list[Score]:
        return [
            self._scorer.score(
                Sample(
                    completion=text,
                    answer=item.answer,
                    prompt=item.prompt,
                    tokens=completion.token_ids,
                    finish_reason=completion.finish_reason,
                    row=item.columns,
                )
            )
            for completion, text in zip(completions, texts, strict=True)
        ]

    def _log(self, rollout: Rollout, name: str, seconds: float) -> None:
        if self._config.testing:
            logger.info(line("prompt", prompt=name, row=rollout.item.index, text=rollout.prompt.text))
        triples = zip(rollout.completions, rollout.texts, rollout.scores, strict=True)
        for number, (completion, text, score) in enumerate(triples):
            version = ",".join(dict.fromkeys(span.version for span in completion.labels)) or "unknown"
            tokens, reason = len(completion.token_ids), completion.finish_reason
            fields = {"prompt": name, "n": number}
            logger.info(
                line("completion", **fields, tokens=tokens, seconds=seconds, version=version, finish=reason)
                + (f" text={text!r}" if self._config.testing else "")
            )
            parts = {part: "none" if value is None else value for part, value in score.parts.items()}
            logger.info(line("score", **fields, **parts, total="none" if score.total is None else score.total))
