"""Reads enough of Lua 5.1 to change it: the positions of its conditions, operands, statements, calls and numbers.

A recursive descent over the tokens, which returns spans of the text, not trees. It raises SyntaxError for constructs
that the store's scripts do not use (goto, long strings, method calls).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|\A\#![^\n]*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>\d+(?:\.\d+)?)
    |(?P<string>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
    |(?P<operator>\.\.\.|\.\.|==|~=|<=|>=|[-+*/%^\#<>=(){}\[\];:,.])""",
    re.VERBOSE,
)
_KEYWORDS = frozenset(
    [
        *("and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in"),
        *("local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while"),
    ]
)
_BINARY = {
    **{"or": 1, "and": 2, "<": 3, ">": 3, "<=": 3, ">=": 3, "~=": 3, "==": 3},
    **{"..": 4, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6},
}
"""Operators by how tightly they bind."""
_UNARY_LEVEL = 7


class Span(NamedTuple):
    start: int
    end: int


class Token(NamedTuple):
    kind: str
    text: str
    span: Span


@dataclass(frozen=True)
class Call:
    """`function(arguments...)`."""

    function: str
    arguments: list[Span]
    span: Span


@dataclass(frozen=True)
class Logical:
    """`left and right` or `left or right`."""

    operator: str
    left: Span
    right: Span
    span: Span
    guards: bool
    """Whether the operand belongs to the condition of an if, while or until, and not to an argument in it."""


@dataclass
class Places:
    conditions: list[Span] = field(default_factory=list)
    logicals: list[Logical] = field(default_factory=list)
    comparisons: list[Token] = field(default_factory=list)
    numbers: list[Token] = field(default_factory=list)
    """The numbers that are not an index in brackets."""
    calls: list[Call] = field(default_factory=list)
    statements: list[Span] = field(default_factory=list)
    """Calls and assignments that are statements, without `local`."""


def places(text: str) -> Places:
    """Returns the places of the text. Raises SyntaxError for constructs that this parser does not read."""
    return _Reader(text).read()


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise SyntaxError(f"line {text.count(chr(10), 0, position) + 1}: {text[position : position + 20]!r}")
        kind = str(match.lastgroup)
        if kind != "skip":
            word = "keyword" if kind == "name" and match[0] in _KEYWORDS else kind
            found.append(Token(word, match[0], Span(*match.span())))
        position = match.end()
    return [*found, Token("end", "", Span(position, position))]


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0
        self._indexes = 0
        self._guards = False
        self._found = Places()

    def read(self) -> Places:
        self._block()
        if self._next.kind != "end":
            raise self._unread()
        return self._found

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _is(self, *texts: str) -> bool:
        return self._next.kind in ("keyword", "operator") and self._next.text in texts

    def _take(self, *texts: str) -> Token:
        if texts and not self._is(*texts):
            raise self._unread()
        self._at += 1
        return self._tokens[self._at - 1]

    def _unread(self) -> SyntaxError:
        line = self._text.count("\n", 0, self._next.span.start) + 1
        return SyntaxError(f"line {line}: {self._next.text!r} is not read here")

    def _since(self, start: int) -> Span:
        return Span(start, self._tokens[self._at - 1].span.end)

    # Statements

    def _block(self) -> None:
        while not (self._is("end", "else", "elseif", "until") or self._next.kind == "end"):
            self._statement()

    def _statement(self) -> None:
        if self._is("if"):
            self._if()
        elif self._is("while"):
            self._take()
            self._condition()
            self._body("do")
        elif self._is("for"):
            self._take()
            self._names()
            self._take("=", "in")
            self._expressions()
            self._body("do")
        elif self._is("repeat"):
            self._take()
            self._block()
            self._take("until")
            self._condition()
        elif self._is("return"):
            self._take()
            if not self._is("end", "else", "elseif", "until") and self._next.kind != "end":
                self._expressions()
        elif self._is("break"):
            self._take()
        elif self._is("do"):
            self._body("do")
        elif self._is("function"):
            self._take()
            self._suffixed_name()
            self._function()
        elif self._is("local"):
            self._local()
        else:
            self._alone()

    def _if(self) -> None:
        self._take("if")
        self._condition()
        self._take("then")
        self._block()
        while self._is("elseif"):
            self._take()
            self._condition()
            self._take("then")
            self._block()
        if self._is("else"):
            self._take()
            self._block()
        self._take("end")

    def _body(self, opening: str) -> None:
        self._take(opening)
        self._block()
        self._take("end")

    def _local(self) -> None:
        self._take("local")
        if self._is("function"):
            self._take()
            self._take()
            self._function()
            return
        self._names()
        if self._is("="):
            self._take()
            self._expressions()

    def _alone(self) -> None:
        start = self._next.span.start
        self._suffixed()
        while self._is(","):
            self._take()
            self._suffixed()
        if self._is("="):
            self._take()
            self._expressions()
        elif not (self._found.calls and self._found.calls[-1].span == self._since(start)):
            raise self._unread()
        self._found.statements.append(self._since(start))

    def _suffixed_name(self) -> None:
        self._take()
        while self._is("."):
            self._take()
            self._take()

    def _names(self) -> None:
        self._take()
        while self._is(","):
            self._take()
            self._take()

    def _function(self) -> None:
        self._take("(")
        while not self._is(")"):
            self._take()
        self._take(")")
        guards, self._guards = self._guards, False
        self._block()
        self._guards = guards
        self._take("end")

    def _condition(self) -> None:
        self._guards = True
        self._found.conditions.append(self._expression())
        self._guards = False

    # Expressions

    def _expressions(self) -> list[Span]:
        found = [self._expression()]
        while self._is(","):
            self._take()
            found.append(self._expression())
        return found

    def _expression(self, level: int = 0) -> Span:
        start = self._next.span.start
        if self._is("not", "-", "#"):
            self._take()
            self._expression(_UNARY_LEVEL)
        else:
            self._simple()
        left = self._since(start)
        while self._next.text in _BINARY and _BINARY[self._next.text] > level and self._next.kind != "string":
            operator = self._take()
            right = self._expression(_BINARY[operator.text])
            whole = Span(start, right.end)
            if operator.text in ("and", "or"):
                self._found.logicals.append(Logical(operator.text, left, right, whole, self._guards))
            elif operator.text in ("<", "<=", ">", ">="):
                self._found.comparisons.append(operator)
            left = whole
        return left

    def _simple(self) -> None:
        if self._next.kind == "number":
            number = self._take()
            if not self._indexes:
                self._found.numbers.append(number)
        elif self._next.kind == "string" or self._is("nil", "true", "false", "..."):
            self._take()
        elif self._is("function"):
            self._take()
            self._function()
        elif self._is("{"):
            self._table()
        else:
            self._suffixed()

    def _table(self) -> None:
        self._take("{")
        while not self._is("}"):
            if self._is("["):
                self._index()
                self._take("=")
            elif self._next.kind == "name" and self._tokens[self._at + 1].text == "=":
                self._take()
                self._take("=")
            self._inner()
            if self._is(","):
                self._take()
        self._take("}")

    def _index(self) -> None:
        self._take("[")
        self._indexes += 1
        self._inner()
        self._indexes -= 1
        self._take("]")

    def _inner(self) -> Span:
        """An expression whose value is not the condition of a guard."""
        guards, self._guards = self._guards, False
        span = self._expression()
        self._guards = guards
        return span

    def _suffixed(self) -> None:
        start = self._next.span.start
        if self._is("("):
            self._take()
            self._expression()
            self._take(")")
        elif self._next.kind == "name":
            self._take()
        else:
            raise self._unread()
        while self._is(".", "[", "("):
            if self._is("."):
                self._take()
                self._take()
            elif self._is("["):
                self._index()
            else:
                function = self._text[start : self._next.span.start]
                self._take()
                arguments = []
                while not self._is(")"):
                    arguments.append(self._inner())
                    if self._is(","):
                        self._take()
                self._take(")")
                self._found.calls.append(Call(function, arguments, self._since(start)))
