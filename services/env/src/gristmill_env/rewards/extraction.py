"""Finds the final answer in a text.

The order is that of the tools people compare with: what follows the last `</think>`; in it the
last `<answer>...</answer>` if there is one; in that the text after the last `####`, else the last
box that closes (`\\boxed{...}`, `\\fbox{...}`), else what follows the last "answer is" or "answer:".
"""

from __future__ import annotations

import re

from gristmill_env.rewards.boxes import last_boxed

ANSWER_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
ANSWER_IS = re.compile(r"\banswer\**(?:\s+is\b\s*:?|\s*:)", re.IGNORECASE)
_EMPHASIS_ENDS = re.compile(r"^\*\*\s+")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_DISPLAYS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"))
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_FORMULA_OR_NUMBER = re.compile(
    rf"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|{_NUMBER.pattern}", re.DOTALL
)
_HEADING = re.compile(r"(?:^|[^\\A-Za-z])[A-Za-z]{4,}")


def final_answer(text: str, *, last_number: bool = False, split_on_think_tag: bool = True) -> str | None:
    """The final answer that `text` states, as written, or None when it states none.

    A bare "25" states none: a model is asked to mark its answer. `last_number` accepts the last
    number of the text where no mark is found. `split_on_think_tag` false looks for marks in the
    reasoning too.
    """
    if split_on_think_tag:
        text = after_thinking(text)
    block = _last_block(text)
    scope = text if block is None else block
    marked = _marked(scope)
    if marked is not None:
        return marked
    if block is not None and block.strip():
        return block.strip()
    if last_number and (numbers := _NUMBER.findall(scope)):
        return str(numbers[-1])
    return None


def last_mathematics(text: str) -> str | None:
    """The last formula or number of `text`, whichever ends last; None if there is neither."""
    *_, last = [None, *_FORMULA_OR_NUMBER.finditer(text)]
    return None if last is None else next(filter(None, last.groups()), last[0]).strip()


def after_thinking(text: str) -> str:
    """What `text` says once it has thought: after the last `</think>`. A think block left open says nothing yet."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def gold_answer(text: str) -> str:
    """The reference answer of a data set's row: marked as in a completion, or the text itself."""
    return _after_hashes(text) or last_boxed(text) or text.strip().removesuffix("####").strip()


def _last_block(text: str) -> str | None:
    blocks = ANSWER_BLOCK.findall(text)
    return str(blocks[-1]) if blocks else None


def _marked(scope: str) -> str | None:
    hashes = _after_hashes(scope)
    if hashes is None:
        return last_boxed(scope) or _after_answer_is(scope)
    if _HEADING.search(hashes):  # "#### Step 4: add them up" is Markdown: a mark further down goes first
        below = scope.rpartition("####")[2]
        return _after_answer_is(hashes) or last_boxed(below) or _after_answer_is(below) or hashes
    return hashes


def _after_hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    if not mark:
        return None
    line = after.strip().partition("\n")[0].strip()
    bare = line.strip("$*. ")
    only_a_box = bare.startswith(("\\boxed", "\\fbox")) and bare.endswith("}")
    return (last_boxed(bare) if only_a_box else line) or None


def _after_answer_is(text: str) -> str | None:
    *_, last = [None, *ANSWER_IS.finditer(text)]
    if last is None:
        return None
    said = _EMPHASIS_ENDS.sub("", text[last.end() :].strip())
    at_least = next((_closed(said, *marks) for marks in _DISPLAYS if said.startswith(marks[0])), 0)
    end = _SENTENCE_END.search(said, at_least)
    return said[: end.start() if end else len(said)].strip() or None


def _closed(said: str, opening: str, closing: str) -> int:
    """Where displayed mathematics that `said` begins with ends; it may span lines, and hold full stops."""
    return max(0, said.find(closing, len(opening)))
