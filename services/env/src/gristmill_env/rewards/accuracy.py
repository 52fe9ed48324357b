"""Is the final answer the right one?"""

from __future__ import annotations

from gristmill_env.rewards.extraction import as_number, final_answer, gold_answer
from gristmill_env.rewards.registry import reward


@reward("accuracy")
def accuracy(completion: str, answer: str, *, last_number: bool = False) -> float | None:
    """1 when the completion's final answer is the row's, as exact numbers; 0 when it is not, or none is stated.

    None (no score) when the row's own answer is not a number: nothing can be said of the completion then.

    Options: `last_number` takes the last number of a completion that marks no answer.
    """
    gold = as_number(gold_answer(answer))
    if gold is None:
        return None
    stated = final_answer(completion, last_number=last_number)
    return float(stated is not None and as_number(stated) == gold)
