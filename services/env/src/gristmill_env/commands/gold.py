"""Whether the rewards know a right answer when they see one: each row's own answer, as if a model had given it."""

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
"""What nobody can make up for an answer that no model has given."""

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
    """Its full name: "r1/accuracy" of a part."""
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


@dataclass(frozen=True)
class GoldCheck:
    """What the rewards of a run make of the rows' own answers."""

    scores: Sequence[GoldScore]
    """Of those that were tried."""
    untried: Sequence[str]
    """Those that were not: they ask for no answer, or for more than a text. Of a TRL function and of an environment's
    rubric, only their code says whether they compare."""


async def score_gold(rewards: Sequence[WeightedReward], items: Sequence[Item]) -> GoldCheck:
    """Try each reward that compares with an answer, over all `items` that have one.

    Of a composed reward its parts are tried: its sum depends on the shape of the text and on weights too.
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
