"""Is the final answer the right one?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from gristmill_env.rewards.answers import compare, one_form, read_answer
from gristmill_env.rewards.boxes import count_boxes
from gristmill_env.rewards.extraction import after_thinking, final_answer, gold_answer
from gristmill_env.rewards.registry import reward
from gristmill_env.symbolic.pool import symbolic_pool
from gristmill_env.symbolic.protocol import Outcome


def _stated(
    completion: str, row: Mapping[str, Any], *, last_number: bool = False, split_on_think_tag: bool = True, **_: Any
) -> str | None:
    answer = final_answer(completion, last_number=last_number, split_on_think_tag=split_on_think_tag)
    return None if answer is None else one_form(answer)


@reward("accuracy", states=_stated)
async def accuracy(
    completion: str,
    answer: str,
    *,
    last_number: bool = False,
    tolerance: Annotated[float, Field(ge=0)] = 0.0,
    split_on_think_tag: bool = True,
    max_boxed_threshold: Annotated[int, Field(ge=0)] | None = None,
) -> float | None:
    """1 when the completion's final answer is the row's; 0 when it is not, or none is stated.

    Numbers are compared exactly; only what is no plain number and not written alike is compared by
    algebra, in processes of its own. None (no score) when the row's own answer is no mathematics:
    nothing can be said of the completion then. Raises JobError when algebra does not finish.

    Options: `last_number` takes the last number of a completion that marks no answer; `tolerance`,
    relative, for numbers; `split_on_think_tag` false looks for answers in the reasoning too;
    `max_boxed_threshold` gives 0 to a completion with more boxes than that.
    """
    gold = read_answer(gold_answer(answer))
    if not gold.readable:
        return None
    if max_boxed_threshold is not None:
        said = after_thinking(completion) if split_on_think_tag else completion
        if count_boxes(said) > max_boxed_threshold:
            return 0.0
    stated = final_answer(completion, last_number=last_number, split_on_think_tag=split_on_think_tag)
    if stated is None:
        return 0.0
    decision = compare(gold, read_answer(stated), tolerance)
    if isinstance(decision, bool):
        return float(decision)
    outcome = await symbolic_pool().check(((pair.gold, pair.stated) for pair in decision), tolerance)
    return None if outcome is Outcome.UNREADABLE_GOLD else float(outcome is Outcome.SAME)
