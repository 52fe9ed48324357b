"""Finds the final answer in a text.

The order of the search matches common tools. First, the text after the last `</think>` is taken, and within it the last
`<answer>...</answer>` block if there is one. The answer is the text after the last `####` there. Otherwise it is the
last box that closes (`\\boxed{...}`, `\\fbox{...}`), and otherwise the text after the last "answer is" or "answer:".
"""

from __future__ import annotations

import re

ANSWER_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
ANSWER_IS = re.compile(r"\banswer\**(?:\s+is\b\s*:?|\s*:)", re.IGNORECASE)
_EMPHASIS_ENDS = re.compile(r"^\*\*\s+")
_TITLES = "".join(rf"(?<!\b{title})" for title in ("Dr", "Mr", "Ms", "Mrs", "St", "Mt", "Prof"))
_SENTENCE_END = re.compile(rf"{_TITLES}(?<!\.[A-Z])\.(?=\s|$)|[!?](?=\s|$)|\n")
"""A full stop after a title ("Dr.") or within initials ("U.S.") ends no sentence."""
_DISPLAYS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"))
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_FORMULA_OR_NUMBER = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)|" + _NUMBER.pattern, re.DOTALL
)
"""A formula contains no other opening mark of its kind, so that the search takes one pass."""
_HEADING = re.compile(r"(?:^|[^\\A-Za-z])[A-Za-z]{4,}")
_PIECES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_DECORATION = re.compile(
    r"\$|\\[()\[\],;:! ]|\\q?quad(?![A-Za-z])|[*~]|(?<![A-Za-z])[A-Za-z](?:_(?:\w|\{\w+\}))?\s*=\s*(?:\\[(\[]|\$|\s)*$"
)
_TEXT = re.compile(r"\\(?:text|mbox|textrm)\s*\{([^{}]*)\}")
_BETWEEN = re.compile(r"\s*(?:[,;&]|[,;]?\s*(?:and|or))\s*", re.IGNORECASE)
_MOST_BETWEEN = 80


def final_answer(text: str, *, last_number: bool = False, split_on_think_tag: bool = True) -> str | None:
    """Returns the final answer in `text`, as written, or None if `text` marks no final answer.

    A bare "25" is not a final answer, because the model must mark its answer. `last_number` accepts the last number of
    a text without a mark. If `split_on_think_tag` is false, the reasoning is searched, too.
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
    """Returns the last formula or number of `text`, whichever ends last; None if `text` has neither."""
    *_, last = [None, *_FORMULA_OR_NUMBER.finditer(text)]
    return None if last is None else next(filter(None, last.groups()), last[0]).strip()


def after_thinking(text: str) -> str:
    """Returns the text after the reasoning, that is, after the last `</think>`. An open think block is cut off."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def gold_answer(text: str) -> str:
    """Returns the reference answer of a row: the marked answer as in a completion, or the text itself."""
    return _after_hashes(text) or last_boxed(text) or text.strip().removesuffix("####").strip()


def _last_block(text: str) -> str | None:
    blocks = ANSWER_BLOCK.findall(text)
    return str(blocks[-1]) if blocks else None


def _marked(scope: str) -> str | None:
    hashes = _after_hashes(scope)
    if hashes is None:
        return last_boxed(scope) or _after_answer_is(scope)
    if _HEADING.search(hashes):  # "#### Step 4: add them up" is a Markdown heading: a later mark has priority
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
    at_least = next((_display_end(said, *marks) for marks in _DISPLAYS if said.startswith(marks[0])), 0)
    end = _SENTENCE_END.search(said, at_least)
    return said[: end.start() if end else len(said)].strip() or None


def _display_end(said: str, opening: str, closing: str) -> int:
    """Returns the end of displayed mathematics at the start of `said`. It may span lines and contain full stops."""
    return max(0, said.find(closing, len(opening)))


def boxes(text: str) -> list[tuple[int, int]]:
    """Returns the start and end of the inside of each box that closes, in the order of their starts.

    Takes one pass. Escaped braces (`\\{`) count as letters, and a box that never closes is skipped.
    """
    return [(inside, end) for _, inside, end in _closed_boxes(text)]


def last_boxed(text: str) -> str | None:
    """Returns the answer in the last boxes; None when no box closes, or the last box is empty.

    Usually this is the inside of the last box that closes; of nested boxes, the innermost. If the last boxes are a list
    (`\\boxed{1} and \\boxed{2}`, `x = \\boxed{1}, x = \\boxed{2}`), the answer is their insides, joined by commas.
    """
    insides: list[str] = []
    follows = 0
    for command, start, end in reversed(_closed_boxes(text)):
        inside = text[start:end].strip()
        if not inside or (insides and (end >= follows or not _is_list(text[end + 1 : follows]))):
            break
        insides.append(inside)
        follows = command
    return ", ".join(dict.fromkeys(reversed(insides))) or None


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """Returns for each box that closes the start of its command, and the start and end of its inside."""
    boxes: list[tuple[int, int, int]] = []
    opened: list[tuple[int | None, int]] = []  # start of a box's command, and start of the inside
    for piece in _PIECES.finditer(text):
        if piece["box"] or piece["open"]:
            opened.append((piece.start() if piece["box"] else None, piece.end()))
        elif piece["close"] and opened:
            command, inside = opened.pop()
            if command is not None:
                boxes.append((command, inside, piece.start()))
    return sorted(boxes)


def _is_list(between: str) -> bool:
    """Whether the text between two boxes only separates the items of a list.

    A separator is "and", "or" or a comma, possibly with delimiters of mathematics and `x =` around it. Any other word
    ("no, \\boxed{72}") and an empty line begin another statement.
    """
    if len(between) > _MOST_BETWEEN or "\n\n" in between:
        return False
    return _BETWEEN.fullmatch(_DECORATION.sub(" ", _TEXT.sub(r" \1 ", between))) is not None


def count_boxes(text: str) -> int:
    """Returns the number of boxes that `text` opens."""
    return sum(1 for _ in _BOX.finditer(text))
