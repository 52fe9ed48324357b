"""Rollouts of a conversation, made of the tokens of its replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill import SamplingParams
from gristmill_env.data import Item, Message, assistant
from gristmill_env.errors import EpisodeError
from gristmill_env.gateway import Branch, Turns
from gristmill_env.gateway.turns import Place
from gristmill_env.inference import Completion
from gristmill_env.rewards import Score
from gristmill_env.rollouts.groups import Rollout, RolloutGroup, joined
from gristmill_env.rollouts.prompts import Prompt


@dataclass(frozen=True)
class Said:
    """One reply, and the messages before it."""

    completion: Completion
    text: str
    messages: Sequence[Message] = ()
    """The messages since the last reply."""
    between: Sequence[int] = ()
    """The tokens between the last reply and this one."""
    trained: bool = True


def rollout_of(prompt: Prompt, *replies: Said, reward: float | None = None) -> Rollout:
    """Returns the rollout of one conversation."""
    turns, parent = Turns(), None
    for reply in replies:
        more = tuple(reply.messages) if parent is not None else prompt.messages
        given = reply.between if parent is not None else prompt.token_ids
        parent = turns.add(Place(parent, more, b""), given, reply.completion, dict(assistant(reply.text)))

    def part(branch: Branch) -> Rollout:
        return Rollout.of(branch, prompt, replies[-1].text, reward)

    untrained = {number for number, reply in enumerate(replies) if not reply.trained}
    rollout = joined(turns.branches(untrained=untrained), len(replies), part)
    assert rollout is not None
    return rollout


def scored_group(
    scores: Sequence[Score],
    lengths: Sequence[int | None] | None = None,
    reasons: Sequence[str] | None = None,
    seconds: float = 1.0,
    *,
    failed: int = 0,
    source: str | None = None,
) -> RolloutGroup:
    """Returns a group of these scores, of rollouts without text. By default each has one token and ends itself."""
    ends = zip(lengths or [1] * len(scores), reasons or ["stop"] * len(scores), strict=True)
    rollouts = [Rollout(Prompt("", ()), [], [], [], [], "", (), end, 1, length) for length, end in ends]
    item = Item(0, 0, "?", None, source=source)
    errors = [EpisodeError("agent_failed", "no")] * failed
    return RolloutGroup(item, SamplingParams(temperature=1.0, max_tokens=4), rollouts, list(scores), seconds, errors)
