"""Checks that the rewards recognise a right answer: scores each row's own answer as if a model had given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gristmill_env.commands.progress import Steps
from gristmill_env.data.dataset import Item
from gristmill_env.messages import assistant
from gristmill_env.rewards import Sample, Scorer, WeightedReward
from gristmill_env.rewards.deciding import FULL
from gristmill_env.rewards.extraction import gold_answer

_NOT_THERE = frozenset({"tokens", "episode_reward"})
"""Inputs that cannot be constructed for an answer that a model did not generate."""

_FORMS: tuple[Callable[[str], str], ...] = (
    lambda answer: answer,
    lambda answer: f"\\boxed{{{gold_answer(answer)}}}",
    lambda answer: f"#### {gold_answer(answer)}",
    lambda answer: f"<answer>{gold_answer(answer)}</answer>",
    lambda answer: f"Answer: {gold_answer(answer)}",
    gold_answer,
)
"""Ways in which models are asked to state an answer. A reward passes with any one of them.

The format rewards check which way the run's prompt asks for; this check does not test format rewards."""


@dataclass(frozen=True)
class Miss:
    """A row whose own answer scores less than 1."""

    index: int
    answer: str
    reason: str


@dataclass
class GoldScore:
    """One reward's results for the rows' own answers."""

    reward: str
    """The reward's full name; "r1/accuracy" for a part of a composed reward."""
    full: int = 0
    """Rows that score 1 or more."""
    silent: list[Miss] = field(default_factory=list)
    """Rows for which the reward gives no score, because it cannot read their answer."""
    wrong: list[Miss] = field(default_factory=list)
    """Rows that score less than 1, or on which the reward fails."""

    @property
    def rows(self) -> int:
        """Rows that were tried."""
        return self.full + len(self.silent) + len(self.wrong)


@dataclass(frozen=True)
class GoldCheck:
    """The results of a run's rewards for the rows' own answers."""

    scores: Sequence[GoldScore]
    """Scores of the rewards that were tried."""
    untried: Sequence[str]
    """Rewards that were not tried, because they ask for no answer or for more than a text. For a TRL function or
    an environment's rubric, only its code shows whether it compares."""


async def score_gold(rewards: Sequence[WeightedReward], items: Sequence[Item]) -> GoldCheck:
    """Tries each reward that compares with an answer, over all `items` that have one.

    Tries the parts of a composed reward instead, because its sum also depends on the shape of the text and on weights.
    """
    leaves = {name: leaf for weighted in rewards for name, leaf in weighted.reward.leaves().items()}
    judges = {name: leaf for name, leaf in leaves.items() if leaf.compares and leaf.asks_for.isdisjoint(_NOT_THERE)}
    untried = [name for name in leaves if name not in judges]
    if not judges or not items:
        return GoldCheck([], untried)
    found = []
    with Steps("answers", len(judges) * len(items)) as steps:
        for name, reward in judges.items():
            score = GoldScore(name)
            async with Scorer([WeightedReward(reward, 1.0)], has_answer=True, columns=list(items[0].columns)) as scorer:
                for item in items:
                    await _try_forms(scorer, item, score)
                    steps.add()
            found.append(score)
    return GoldCheck(found, untried)


async def _try_forms(scorer: Scorer, item: Item, score: GoldScore) -> None:
    if item.answer is None:
        return
    best: float | None = None
    for form in _FORMS:
        sample = Sample(
            completion=form(item.answer),
            answer=item.answer,
            prompt=item.prompt,
            row=item.columns,
            messages=item.messages,
            conversation=(*item.messages, assistant(form(item.answer))),
            conversational=item.conversation is not None,
        )
        (said,) = await scorer.score([sample])
        if said.error is not None:
            score.wrong.append(Miss(item.index, item.answer, said.error))
            return
        if said.total is not None:
            best = said.total if best is None else max(best, said.total)
            if best >= FULL:
                score.full += 1
                return
    if best is None:
        score.silent.append(Miss(item.index, item.answer, "no score: the reward cannot read this answer"))
    else:
        score.wrong.append(Miss(item.index, item.answer, f"scores {best:.3g} at best"))
