"""Finds the final answer in a text, and reads it as an exact number.

The order is that of the tools people compare with: what follows the last `</think>`; in it the
last `<answer>...</answer>` if there is one; in that the text after the last `####`, else the
last `\\boxed{...}` (braces matched), else what follows the last "answer is".
"""

from __future__ import annotations

import re
from decimal import Decimal

_ANSWER_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_ANSWER_IS = re.compile(r"answer\s+is\b\s*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_BOXED = ("\\boxed", "\\fbox")
_PLAIN = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]*)?")
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_MAX_DIGITS = 100  # longer "numbers" are noise, and exact arithmetic on them is not free


def final_answer(text: str, *, last_number: bool = False) -> str | None:
    """The final answer that `text` states, as written, or None when it states none.

    A bare "25" states none: a model is asked to mark its answer. `last_number` accepts the last
    number of the text where no mark is found.
    """
    text = text.rpartition("</think>")[2]
    block = _last_block(text)
    scope = text if block is None else block
    marked = _after_hashes(scope) or _last_boxed(scope) or _after_answer_is(scope)
    if marked is not None:
        return marked
    if block is not None and block.strip():
        return block.strip()
    if last_number and (numbers := _NUMBER.findall(scope)):
        return str(numbers[-1])
    return None


def gold_answer(text: str) -> str:
    """The reference answer of a data set's row: marked as in a completion, or the text itself."""
    return _after_hashes(text) or _last_boxed(text) or text.strip()


def as_number(text: str) -> Decimal | None:
    """`text` as an exact number, or None when it is not one number and nothing else.

    A currency sign, thousands separators that are where they belong, emphasis, and a trailing
    period are dropped: `$1,234.50.` is 1234.5. "72 or 73", "72,73" and "1 234" are no number.
    """
    bare = text.strip().strip("*` \t\n").removeprefix("\\(").removesuffix("\\)")
    bare = bare.replace("\\$", "").replace("$", "").replace("{,}", ",").replace("\u2212", "-")
    bare = bare.strip().rstrip(".!;,").strip().strip("*")
    bare = re.sub(r"^([+-])\s+", r"\1", bare)
    if len(bare) > _MAX_DIGITS or not _PLAIN.fullmatch(bare) or not any(c.isdigit() for c in bare):
        return None
    return Decimal(bare.replace(",", ""))


def _last_block(text: str) -> str | None:
    blocks = _ANSWER_BLOCK.findall(text)
    return str(blocks[-1]) if blocks else None


def _after_hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    if not mark:
        return None
    return after.strip().partition("\n")[0].strip() or None


def _last_boxed(text: str) -> str | None:
    """Inside of the last boxed expression whose braces match: `\\boxed{\\frac{1}{2}}`."""
    for start in sorted((text.rfind(mark) + len(mark) for mark in _BOXED if mark in text), reverse=True):
        rest = text[start:].lstrip()
        if not rest.startswith("{"):
            continue
        depth = 0
        for at, char in enumerate(rest):
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return rest[1:at].strip() or None
    return None


def _after_answer_is(text: str) -> str | None:
    *_, last = [None, *_ANSWER_IS.finditer(text)]
    if last is None:
        return None
    return _SENTENCE_END.split(text[last.end() :].strip(), maxsplit=1)[0].strip() or None
