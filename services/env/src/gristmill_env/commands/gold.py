"""Whether the rewards know a right answer when they see one: each row's own answer, as if a model had given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gristmill_env.commands.progress import Steps
from gristmill_env.data.dataset import Item
from gristmill_env.messages import assistant
from gristmill_env.rewards import Sample, Scorer, WeightedReward
from gristmill_env.rewards.extraction import gold_answer

_FULL = 1.0 - 1e-9

_FORMS: tuple[Callable[[str], str], ...] = (
    lambda answer: answer,
    lambda answer: f"\\boxed{{{gold_answer(answer)}}}",
    lambda answer: f"#### {gold_answer(answer)}",
    lambda answer: f"<answer>{gold_answer(answer)}</answer>",
    lambda answer: f"Answer: {gold_answer(answer)}",
    gold_answer,
)
"""Ways in which models are asked to state an answer. A reward passes with any one: which one the run's prompt asks
for is for the format rewards to say, and those are not under test here."""


@dataclass(frozen=True)
class Miss:
    """A row whose own answer is not worth 1."""

    index: int
    answer: str
    reason: str


@dataclass
class GoldScore:
    """What one reward makes of the rows' own answers."""

    reward: str
    full: int = 0
    """Rows that score 1 or more."""
    silent: list[Miss] = field(default_factory=list)
    """Rows of which the reward says nothing: it cannot read their answer."""
    wrong: list[Miss] = field(default_factory=list)
    """Rows that score less, or on which the reward fails."""

    @property
    def rows(self) -> int:
        """Rows that were tried."""
        return self.full + len(self.silent) + len(self.wrong)


async def score_gold(rewards: Sequence[WeightedReward], items: Sequence[Item]) -> list[GoldScore]:
    """A result for each reward that compares with an answer, over all `items` that have one."""
    judges = [weighted.reward for weighted in rewards if weighted.reward.compares]
    if not judges or not items:
        return []
    found = []
    with Steps("answers", len(judges) * len(items)) as steps:
        for reward in judges:
            score = GoldScore(reward.name)
            async with Scorer([WeightedReward(reward, 1.0)], has_answer=True, columns=list(items[0].columns)) as scorer:
                for item in items:
                    await _try_forms(scorer, item, score)
                    steps.add()
            found.append(score)
    return found


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
            if best >= _FULL:
                score.full += 1
                return
    if best is None:
        score.silent.append(Miss(item.index, item.answer, "no score: the reward cannot read this answer"))
    else:
        score.wrong.append(Miss(item.index, item.answer, f"scores {best:.3g} at best"))
