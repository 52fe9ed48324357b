"""A reward for a correct final answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gristmill_env.answers.comparison import canonical_answer, compare, read_answer
from gristmill_env.answers.extraction import after_thinking, count_boxes, final_answer, gold_answer, last_mathematics
from gristmill_env.answers.symbolic_pool import Verdict, symbolic_pool
from gristmill_env.rewards.registry import reward

Extract = Literal["marked", "anywhere"]
"""The answers that count: only answers that the completion marks as final, or all answers that Math-Verify finds."""

_DELIMITED = re.compile(r"\$|\\[(\[]|\\boxed")
_NO_MATHEMATICS = re.compile(r"[^0-9$\\\[]*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,11})")
_BOXED_INTEGER = re.compile(rf"\\boxed\{{({_INTEGER.pattern})\}}")
_ANY_BOX = re.compile(r"\\(?:boxed|fbox)")
"""Math-Verify also reads boxes without braces, such as `\\boxed 5`."""
_MATH_VERIFY_READS = 6_000
"""Characters at the end of a completion. Math-Verify's time grows with the square of the length."""
_OTHER_READING = re.compile(r"(?i:final answer)|%|(?i:percent|pct)")


def _extracted(
    completion: str,
    row: Mapping[str, Any],
    *,
    extract: Extract = "marked",
    last_number: bool = False,
    split_on_think_tag: bool = True,
    **_: Any,
) -> str | None:
    answer = final_answer(completion, last_number=last_number, split_on_think_tag=split_on_think_tag)
    if answer is None and extract == "anywhere":
        answer = last_mathematics(after_thinking(completion) if split_on_think_tag else completion)
    return None if answer is None else canonical_answer(answer)


@reward("accuracy", extract_answer=_extracted)
async def accuracy(
    completion: str,
    answer: str,
    *,
    extract: Extract = "marked",
    last_number: bool = False,
    tolerance: Annotated[float, Field(ge=0)] = 0.0,
    split_on_think_tag: bool = True,
    max_boxed_threshold: Annotated[int, Field(ge=0)] | None = None,
) -> float | None:
    """1 when the completion's final answer is the row's; 0 when it is not, or none is stated.

    Numbers are compared exactly. Algebra, in separate processes, compares other answers that are not
    written alike. None (no score) if the row's own answer is not mathematics, because then no completion
    can be judged. Raises JobError if algebra does not finish.

    Options: `extract: anywhere` gives 1 to the completions that Math-Verify's own `parse` and `verify`
    accept, whether they mark an answer or not, unless Math-Verify omits a part of an answer;
    `last_number` takes the last number of a completion that marks no answer, and has no effect with
    `anywhere`; `tolerance`, relative, for numbers; `split_on_think_tag` false looks for answers in the
    reasoning too; `max_boxed_threshold` gives 0 to a completion with more boxes than that.
    """
    reference = gold_answer(answer)
    gold = read_answer(reference)
    if not gold.readable and (extract == "marked" or not any(char.isdigit() for char in reference)):
        return None
    said = after_thinking(completion) if split_on_think_tag else completion
    if max_boxed_threshold is not None and count_boxes(said) > max_boxed_threshold:
        return 0.0
    extracted = final_answer(completion, last_number=last_number, split_on_think_tag=split_on_think_tag)
    if extract == "anywhere":
        if extracted is None:
            extracted = last_mathematics(said)
        ours = gold.read_in_part or gold.misread
        if not ours and not (extracted is not None and read_answer(extracted).read_in_part):
            end = said[-_MATH_VERIFY_READS:]
            same = surely_same(reference, end)
            if same is not None and not tolerance:
                return float(same)
            readable = reference if reference.isascii() else gold.bare  # Math-Verify does not read "2¹⁰"
            return _score(await symbolic_pool().check([(as_latex(readable), end)], tolerance, extract=True))
        if not gold.readable:
            return None
    if extracted is None:
        return 0.0
    decision = compare(gold, read_answer(extracted), tolerance)
    if isinstance(decision, bool):
        return float(decision)
    return _score(await symbolic_pool().check(((pair.gold, pair.extracted) for pair in decision), tolerance))


def _score(outcome: Verdict) -> float | None:
    return None if outcome is Verdict.UNREADABLE_GOLD else float(outcome is Verdict.SAME)


def as_latex(answer: str) -> str:
    """Returns a row's answer as text in which Math-Verify finds the answer: `\\frac{1}{2}` becomes `$\\frac{1}{2}$`."""
    return answer if _DELIMITED.search(answer) else f"${answer}$"


def surely_same(answer: str, text: str) -> bool | None:
    """Whether Math-Verify accepts `text` for the row's `answer`; None if only Math-Verify itself can decide.

    Decides only integer answers, for texts without mathematics and for texts with a single box that holds an integer.
    Math-Verify prefers such a box to every other expression except an expression after "final answer is".
    """
    if not _INTEGER.fullmatch(answer):
        return None
    if _NO_MATHEMATICS.fullmatch(text):
        return False
    boxed = _BOXED_INTEGER.search(text)
    if boxed is None or len(_ANY_BOX.findall(text)) != 1 or _OTHER_READING.search(text):
        return None
    return int(boxed[1]) == int(answer)
