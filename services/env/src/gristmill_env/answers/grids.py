"""Parses LaTeX environments of rows: matrices, determinants, and systems such as `cases` and `aligned`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["matrix", "determinant", "norm", "system"]

_MATRICES = frozenset({"matrix", "smallmatrix", "pmatrix", "psmallmatrix", "bmatrix", "bsmallmatrix", "Bmatrix"})
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(_MATRICES, "matrix"),
    **dict.fromkeys(("vmatrix", "vsmallmatrix"), "determinant"),
    **dict.fromkeys(("Vmatrix", "Vsmallmatrix"), "norm"),
    **dict.fromkeys(("cases", "dcases", "rcases", "drcases"), "system"),
}
_ALIGNED = frozenset(
    {"align", "aligned", "alignat", "alignedat", "gather", "gathered", "split", "eqnarray", "multline"}
)
_BRACKETS: dict[str, Kind] = {"()": "matrix", "[]": "matrix", "||": "determinant", r"\|\|": "norm", r"\{": "system"}

_ENVIRONMENT = re.compile(
    r"(?P<name>[^=\\]{1,20}= ?)?(?P<opened>\(|\[|\\?\||\\\{)? ?\\begin ?\{(?P<kind>[A-Za-z]+)\*?\} ?(?:\[[a-z]\])? ?"
    r"(?P<body>.*?)\\end ?\{(?P=kind)\*?\} ?(?P<closed>\)|\]|\\?\|)?"
    r"(?: ?_ ?\{ ?[0-9A-Za-z]+ ?\\times ?[0-9A-Za-z]+ ?\})?"
)
_COLUMNS = re.compile(r"(?:\[[a-z]\] ?)?\{[^{}]*\}")
_BEGIN = re.compile(r"\\begin ?\{([A-Za-z]+)\*?\}")
_CELL = re.compile(r"(?<!\\)&")
_CONDITION = re.compile(r"(?:\\(?:text|mbox|textrm|mathrm) ?\{ ?(?:if|for|when|where|and)? ?:? ?\}|if|for|when) ?")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne)")


@dataclass(frozen=True)
class Grid:
    """The cells of one environment."""

    kind: Kind
    name: str
    """The text before the equals sign of `A = \\begin{pmatrix} ...`; empty without an equals sign."""
    rows: tuple[tuple[str, ...], ...]
    """The cells as LaTeX, row by row. The last row is missing if it is empty."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of cells in each row."""
        return tuple(len(row) for row in self.rows)


def read_grid(bare: str) -> Grid | None:
    """Parses an answer, normalized by `normalize_latex`, that is one environment and nothing else except `A =` and the
    size, as in `_{2\\times 2}`."""
    if "\\begin" not in bare:
        return None
    match = _ENVIRONMENT.fullmatch(bare)
    if match is None or "\\begin" in match["body"]:
        return None
    kind = _kind(match["kind"], (match["opened"] or "") + (match["closed"] or ""), match["body"])
    if kind is None:
        return None
    body = match["body"]
    if match["kind"] in ("array", "alignat", "alignedat"):
        body = _COLUMNS.sub("", body.strip(), count=1)
    if match["kind"] in _ALIGNED:  # in these, & only aligns
        body = _CELL.sub("", body)
    rows = [tuple(_cell(cell, kind) for cell in _CELL.split(row)) for row in body.split(r"\\")]
    if len(rows) > 1 and rows[-1] == ("",):
        rows.pop()
    return Grid(kind, "".join((match["name"] or "").split()).removesuffix("="), tuple(rows))


def has_system(latex: str) -> bool:
    """Whether `latex` has an environment other than a matrix. Math-Verify reads only a part of such an environment."""
    return any(name not in _MATRICES and name != "array" for name in _BEGIN.findall(latex))


def _kind(environment: str, brackets: str, body: str) -> Kind | None:
    if environment in _ALIGNED:
        return "system" if brackets in ("", r"\{") else None
    if environment in ("array", "matrix", "smallmatrix"):
        if not brackets:
            return "system" if _RELATION.search(body) else "matrix"
        return _BRACKETS.get(brackets)
    return None if brackets else _KINDS.get(environment)


def _cell(text: str, kind: Kind) -> str:
    bare = " ".join(text.replace(r"\hline", " ").split())
    if kind == "system":
        bare = _CONDITION.sub("", bare.rstrip(",;. "), count=1) if _CONDITION.match(bare) else bare.rstrip(",;. ")
    return bare
