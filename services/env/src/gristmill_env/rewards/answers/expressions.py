"""Distinguishes mathematics from prose, and converts mathematics to LaTeX for the symbolic checker."""

from __future__ import annotations

import re
from itertools import pairwise

from gristmill_env.rewards.answers.dress import TEXT

MAX_CHARS = 1000
_MAX_DEPTH = 40

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_COMMAND = re.compile(r"\\(?:begin|end|operatorname) ?\{[A-Za-z*]+\}|\\[A-Za-z]+")
_OPENING, _CLOSING = frozenset("({["), frozenset(")}]")
_TWO_NUMBERS = re.compile(r"(?<!frac )(?<!binom )(?<![0-9A-Za-z.])[0-9.]+ [0-9]")
_EXPONENT = re.compile(r"(?<![A-Za-z])[0-9.]+[eE][+-]?[0-9]")
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]+(?![A-Za-z])")
_SMALL_WORDS = re.compile(
    r"(?<![A-Za-z])(?:all|an|any|are|as|at|be|but|by|can|for|has|if|is|it|no|not|of|so|the|to|yes)(?![A-Za-z])",
    re.IGNORECASE,
)
_NAMES = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|log|ln|exp|min|max|gcd|lcm|det"
    "|alpha|beta|gamma|delta|theta|lambda|omega|sigma|phi|pi|infty"
)
_FUNCTION = re.compile(rf"(?<![A-Za-z\\])({_NAMES})(?![A-Za-z])")
_KEPT_WORD = re.compile(rf"sqrt|and|or|infinity|mod|{_NAMES}")
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt) ?(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[A-Za-z]))")
_POWER = re.compile(r"\*\*|\^ ?\*")
_LONG_EXPONENT = re.compile(r"\^ ?(-?[0-9]{2,}|-[0-9])")


def mathematics(bare: str) -> str | None:
    """Returns `bare` (normalized by `undressed`) as LaTeX, or None if it is not a single mathematical expression.

    Returns None in these cases:

    - prose ("Paris", "not 72"), which Math-Verify would read as a product of letters that equals its anagrams;
    - adjacent numbers ("1 000") and "1e999", which Math-Verify would multiply;
    - braces that do not match;
    - a box, whose inside is the answer;
    - text that is too long or too deeply nested to be an answer.
    """
    if not bare or len(bare) > MAX_CHARS or not _nests_well(bare):
        return None
    bare = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", bare)
    if not bare.isascii() or not any(char.isalnum() for char in bare):
        return None
    if _TWO_NUMBERS.search(bare) or _EXPONENT.search(bare) or _BOX.search(bare) or _is_prose(bare):
        return None
    latex = _LONG_EXPONENT.sub(r"^{\1}", _POWER.sub("^", bare))
    return _FUNCTION.sub(r"\\\1 ", latex).replace("infinity", r"\infty ")


def _nests_well(text: str) -> bool:
    """Whether curly brackets match, and no bracket nests too deeply for an answer."""
    depth = curly = 0
    for char in text:
        depth += (char in _OPENING) - (char in _CLOSING)
        curly += (char == "{") - (char == "}")
        if curly < 0 or depth > _MAX_DEPTH:
            return False
    return curly == 0


def _is_prose(bare: str) -> bool:
    plain = _COMMAND.sub(" ", TEXT.sub(" ", bare.replace("_", " ")))
    if _SMALL_WORDS.search(plain):
        return True
    only_letters = not re.search(r"[^A-Za-z ]", bare)
    longest = 2 if only_letters else 3  # maximum length of a word that counts as a product of variables
    words = [word for word in _WORD.findall(plain) if not _KEPT_WORD.fullmatch(word)]
    return any(len(word) > longest and not _run(word) for word in words)


def _run(word: str) -> bool:
    """Whether the letters are consecutive, like names of variables and corners: "abc", "XYZ", "ABCD"."""
    return all(ord(b) - ord(a) == 1 for a, b in pairwise(word))
