"""The canonical text of an answer. With canonical texts, answers are counted without pairwise comparison."""

from __future__ import annotations

from gristmill_env.rewards.answers.answer import Answer, read_answer
from gristmill_env.rewards.answers.dress import plain_words
from gristmill_env.rewards.answers.radicals import Radical


def one_form(text: str) -> str:
    """Returns the canonical form of an extracted answer: "72" for `$72.00`, `\\sqrt{2}` for `\\sqrt2`, "paris" for
    `**Paris.**`.

    Answers that `compare` finds equal without algebra have the same form, except percents and rounded decimals.
    Answers that are equal only by algebra may have different forms, for example `x + 1` and `1 + x`.
    """
    return _form(read_answer(text)) or " ".join(text.split())


def _form(answer: Answer) -> str:
    if answer.number is not None:
        return str(answer.number.value) + "%" * answer.number.percent
    if answer.words is not None:
        return answer.words
    if answer.latex is None or (answer.bare.isalpha() and len(answer.bare) > 1):  # "No" is a word, "N" a variable
        return plain_words(answer.bare)
    if answer.named is not None:
        return _form(answer.named[1])
    if answer.radical is not None:
        return _radical(answer.radical)
    if answer.elements is None:
        return answer.tight
    items = [one_form(item) for item in answer.elements.items]
    if not answer.elements.ordered:
        items = sorted(set(items))
    opening, closing = _split(answer.elements.brackets)
    return f"{opening}{', '.join(items)}{closing}"


def _radical(radical: Radical) -> str:
    root = f"\\sqrt{{{radical.square}}}" if radical.square != 1 or not radical.pi else ""
    pi = f"\\pi^{{{radical.pi}}}" if radical.pi else ""
    return "-" * (radical.sign < 0) + root + pi


def _split(brackets: str) -> tuple[str, str]:
    """Splits a pair of brackets such as "[)" or "\\{\\}" in two."""
    half = len(brackets) // 2
    return brackets[:half], brackets[half:]
