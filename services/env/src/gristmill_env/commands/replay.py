"""`replay`: scores saved groups again, with other rewards or with rewards that have changed."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.table import Table

from gristmill.internal.redaction import redact
from gristmill.internal.settings import parse
from gristmill_env.commands import ReplayOptions
from gristmill_env.commands.source import count_lines, open_groups, require_turns
from gristmill_env.console import Steps, plain, say
from gristmill_env.data.dataset import NoFieldError, lookup
from gristmill_env.errors import SavedError
from gristmill_env.rewards import Sample, Score, Scorer
from gristmill_env.rollouts.prompts import opened_thought
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import GroupWriter, SavedGroup
from gristmill_env.saved.group import errors_of
from gristmill_env.saved.summary import SAME, GroupStats, figure
from gristmill_env.saved.writer import new_file
from gristmill_env.session import create_rewards, execution
from gristmill_env.settings.dataset import DatasetConfig, RewardSpec, without_secrets
from gristmill_env.values import NotTextError, text_of


@dataclass
class ScoreChanges:
    """Old scores compared with new scores."""

    old: GroupStats = field(default_factory=GroupStats)
    new: GroupStats = field(default_factory=GroupStats)
    reordered: int = 0
    """Groups in which two completions swapped order: the better one before is the worse one now."""
    turned: int = 0
    """Completions whose advantage changed its sign, or became 0, or is no longer 0."""
    turned_groups: int = 0
    """Groups with such a completion."""

    def add(self, old: SavedGroup, new: SavedGroup) -> None:
        """Adds one group, before and after."""
        self.old.add(old)
        self.new.add(new)
        pairs = [(a.total, b.total) for a, b in zip(old.completions, new.completions, strict=True)]
        numbers = [(a, b) for a, b in pairs if a is not None and b is not None]
        self.reordered += any(
            _sign(a - c, _rounding(a, c)) * _sign(b - d, _rounding(b, d)) < 0 for a, b in numbers for c, d in numbers
        )
        turned = (
            sum(a != b for a, b in zip(*map(_advantage_signs, zip(*numbers, strict=True)), strict=True))
            if numbers
            else 0
        )
        self.turned += turned
        self.turned_groups += turned > 0


async def replay(run: RunSettings, options: ReplayOptions, console: Console) -> None:
    """Scores the groups again and shows the changes. Raises GristmillError."""
    changes, scorers = ScoreChanges(), dict[str | None, Scorer]()
    parts = {part.source: part for part in run.by_source()}
    with contextlib.ExitStack() as stack:
        writer = None
        if options.out is not None:
            writer = stack.enter_context(GroupWriter(stack.enter_context(new_file(options.out, options.saved))))
        try:
            with Steps("groups", count_lines(options.saved)) as steps:
                for group in open_groups(run, options.saved):
                    require_turns(group, options.saved)
                    part = parts.get(group.source, run)
                    if group.source not in scorers:
                        scorers[group.source] = _scorer(part, group)
                    config, scorer = part.config.dataset, scorers[group.source]
                    scored = _with(group, await score_group(scorer, group, config.gold_field), config)
                    changes.add(group, scored)
                    if writer is not None:
                        await asyncio.to_thread(writer.append, scored)
                    steps.add()
            if not scorers:
                raise SavedError("no_groups", f"{options.saved} holds no groups", path=options.saved)
        finally:
            for scorer in scorers.values():
                await scorer.close()
    show_changes(console, changes)
    if options.out is not None:
        say(console, f"groups: {options.out}")


def _scorer(run: RunSettings, first: SavedGroup) -> Scorer:
    """Returns the rewards of the configuration or the command line; otherwise the rewards saved with the groups."""
    config, folder = run.config.dataset, run.config_folder
    columns, how = [*first.columns, *first.columns_left_out], execution(run.config)
    if config.reward_functions:
        return Scorer(create_rewards(config, folder), has_answer=True, columns=columns, execution=how)
    saved = (first.settings or {}).get("dataset", {}).get("reward_functions", [])
    if not saved:
        raise SavedError(
            "rewards_not_saved",
            "the groups do not say which rewards scored them; name some: --reward_functions or --config",
        )
    specs: list[str | RewardSpec] = [
        parse(RewardSpec, without_secrets(spec), "reward_functions of the saved groups") for spec in saved
    ]
    as_saved = config.model_copy(update={"reward_functions": specs})
    return Scorer(create_rewards(as_saved, folder), has_answer=True, columns=columns, execution=how)


async def score_group(scorer: Scorer, group: SavedGroup, answer_field: str | None) -> list[Score]:
    """Scores the group's completions again.

    `answer_field`: field of the row that holds the answer, if the group has that field; otherwise the saved answer is
    used. Raises SavedError when a reward needs data that was not saved.
    """
    answer = group.answer
    if answer_field is not None:
        # The column could not be saved, is of another data set, or has no text. The saved answer is the row's.
        with contextlib.suppress(NoFieldError, NotTextError):
            answer = text_of(lookup(group.columns, answer_field))
    place = "a saved group" if group.row is None else f"the saved group of row {group.row}"
    for weighted in scorer.rewards:
        reward = weighted.reward
        if reward.compares and answer is None:
            raise SavedError(
                "answer_not_saved",
                f"reward '{reward.name}' compares with the row's answer, and {place} has none; "
                "give the run's --config, so that it can be looked up in the data set",
                reward=reward.name,
                row=group.row,
            )
        if "tokens" in reward.asks_for and any(completion.token_ids is None for completion in group.completions):
            raise SavedError(
                "token_ids_not_saved",
                f"reward '{reward.name}' counts tokens, and {place} was saved without token ids",
                reward=reward.name,
                row=group.row,
            )
        if "episode_reward" in reward.asks_for and all(c.episode_reward is None for c in group.completions):
            raise SavedError(
                "episode_reward_not_saved",
                f"reward '{reward.name}' is what the environment gave, and {place} does not have it",
                reward=reward.name,
                row=group.row,
            )
        only_parts = "episode_parts" in reward.asks_for and "episode_reward" not in reward.asks_for
        if only_parts and all(c.episode_parts is None for c in group.completions):
            raise SavedError(
                "episode_parts_not_saved",
                f"reward '{reward.name}' reads the parts that the agent gave, and {place} does not have them",
                reward=reward.name,
                row=group.row,
            )
    messages = group.messages or []
    # The reply of a group that was archived as tokens lacks the <think> with which the prompt ends.
    begun = opened_thought(group.prompt_text or "") if group.messages is None else ""
    texts = [begun + completion.text for completion in group.completions]
    return await scorer.score(
        [
            Sample(
                completion=text,
                answer=answer,
                prompt=group.prompt,
                tokens=completion.sampled_ids,
                finish_reason=completion.finish_reason or "stop",
                row=group.columns,
                messages=messages,
                conversation=[*messages, *msgspec.structs.replace(completion, text=text).turns],
                episode_reward=completion.episode_reward,
                episode_parts=completion.episode_parts or {},
                conversational=group.conversational,
            )
            for completion, text in zip(group.completions, texts, strict=True)
        ],
    )


def _with(group: SavedGroup, scores: list[Score], config: DatasetConfig) -> SavedGroup:
    """Returns the group with new scores, and with the rewards that gave them."""
    completions = [
        msgspec.structs.replace(
            completion, scores=dict(score.parts), total=score.total, error=score.error, errors=errors_of(score),
            right=None, extracted=None,
        )
        for completion, score in zip(group.completions, scores, strict=True)
    ]  # fmt: skip
    settings = redact(group.settings)
    if settings is not None and config.reward_functions:
        rewards = config.recorded()["reward_functions"]
        settings = settings | {"dataset": settings.get("dataset", {}) | {"reward_functions": rewards}}
    return msgspec.structs.replace(group, completions=completions, settings=settings)


def show_changes(console: Console, changes: ScoreChanges) -> None:
    """Prints a table of old and new means, and how many advantages change."""
    old, new = changes.old, changes.new
    table = Table("reward", "old mean", "new mean", "old no score", "new no score")
    parts = {name: (old.parts.get(name), new.parts.get(name)) for name in [*old.parts, *new.parts]}
    for name, (before, after) in {**parts, "total": (old.rewards, new.rewards)}.items():
        means = [figure(values.mean) if values is not None else "" for values in (before, after)]
        unscored = [str(values.unscored) if values is not None else "" for values in (before, after)]
        table.add_row(plain(name), *means, *unscored)
    console.print(table)
    for text in (
        f"{new.groups} groups, {new.completions} completions",
        f"{changes.reordered} groups change their order",
        f"{changes.turned} completions in {changes.turned_groups} groups change the sign of their advantage",
        f"groups of one score: {old.same} before, {new.same} now",
        *([f"a reward failed on {new.failed} completions"] if new.failed else []),
    ):
        say(console, text)


_FLOAT32 = 1e-6


def _sign(value: float, rounding: float) -> int:
    return (value > rounding) - (value < -rounding)


def _advantage_signs(values: Sequence[float]) -> list[int]:
    # A group of one is trained on its raw reward.
    mean = math.fsum(values) / len(values) if len(values) > 1 else 0.0
    rounding = _rounding(*values)
    return [_sign(value - mean, rounding) for value in values]


def _rounding(*values: float) -> float:
    """Returns the difference that may be rounding alone: archives keep rewards as float32, with 24 bits."""
    return max(SAME, _FLOAT32 * max(map(abs, values)))
