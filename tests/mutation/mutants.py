"""Every mutant of the store's Lua scripts, in one fixed order.

negated   a condition of if or while, or an operand of and/or in such a condition, is inverted
never     the condition is false
one side  an and/or outside of conditions becomes its left or its right operand
bound     < becomes <=, and so on
number    a number is one more
deleted   a statement (a call or an assignment) is removed; a write whose answer is used only answers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutation.lua import Call, Span, places

import gristmill_api.store

LUA: Final = Path(gristmill_api.store.__file__).parent / "lua"

_BOUNDS: Final = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_ANSWERS: Final = {
    "HINCRBY": "((tonumber(redis.call('HGET', {0}, {1})) or 0) + {2})",
    "ZREM": "(redis.call('ZSCORE', {0}, {1}) and 1 or 0)",
    "SREM": "redis.call('SISMEMBER', {0}, {1})",
    "HDEL": "redis.call('HEXISTS', {0}, {1})",
    "LREM": "(redis.call('LPOS', {0}, {2}) and 1 or 0)",
    "LPOP": "redis.call('LINDEX', {0}, 0)",
    "LPUSH": "(redis.call('LLEN', {0}) + 1)",
    "RPOP": "redis.call('LINDEX', {0}, -1)",
    "ZPOPMIN": "redis.call('ZRANGE', {0}, 0, 0)",
    "SPOP": "redis.call('SRANDMEMBER', {0}, {1})",
}
"""The answer that a write would have given, computed by a read."""
_READS: Final = frozenset(
    [
        *("EXISTS", "GET", "TIME", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HRANDFIELD", "HVALS"),
        *("BITPOS", "LLEN", "LPOS", "LRANGE", "STRLEN", "SCARD", "SISMEMBER", "SMEMBERS"),
        *("ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE", "ZREVRANGEBYSCORE", "ZSCORE"),
    ]
)


@dataclass(frozen=True)
class Mutant:
    script: str
    """File name."""
    line: str
    """The line in which the change begins."""
    change: str
    """"before -> after"."""
    nth: int
    """Counts the same change of the same line in one script, from 1."""
    kind: str
    text: str
    """The whole mutated file."""

    def __str__(self) -> str:
        nth = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.script}{nth}: {self.change}   [{self.line}]"

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.script, self.line, self.change, self.nth


def all_mutants(folder: Path = LUA) -> list[Mutant]:
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.lua")):
        text = path.read_text(encoding="utf-8")
        seen: Counter[tuple[str, str]] = Counter()
        for kind, span, after in sorted(set(_changes(text)), key=lambda change: (change[1], change[0], change[2])):
            line = text[text.rfind("\n", 0, span.start) + 1 :].partition("\n")[0].strip()
            change = f"{_one_line(text[slice(*span)])} -> {_one_line(after) or 'nothing'}"
            seen[line, change] += 1
            mutated = text[: span.start] + after + text[span.end :]
            found.append(Mutant(path.name, line, change, seen[line, change], kind, mutated))
    return found


def _changes(text: str) -> Iterator[tuple[str, Span, str]]:
    """Yields (kind, replaced span, replacement)."""
    there = places(text)
    logicals = {logical.span for logical in there.logicals}
    for condition in there.conditions:
        yield "never", condition, "false"
        if condition not in logicals:
            yield "negated", condition, f"not ({text[slice(*condition)]})"
    for logical in there.logicals:
        left, right = text[slice(*logical.left)], text[slice(*logical.right)]
        if logical.guards:
            for operand in {logical.left, logical.right} - logicals:
                yield "negated", operand, f"not ({text[slice(*operand)]})"
        else:
            yield "one side", logical.span, f"({left})"
            yield "one side", logical.span, f"({right})"
    for operator in there.comparisons:
        yield "bound", operator.span, _BOUNDS[operator.text]
    for number in there.numbers:
        yield "number", number.span, str(int(number.text) + 1)
    for statement in there.statements:
        yield "deleted", statement, ""
    for call in there.calls:
        if call.function == "redis.call" and call.span not in there.statements:
            yield from _without_writing(text, call)


def _without_writing(text: str, call: Call) -> Iterator[tuple[str, Span, str]]:
    command, *arguments = (text[slice(*argument)] for argument in call.arguments)
    name = command.strip("'")
    if name not in _READS:
        yield "deleted", call.span, _ANSWERS[name].format(*arguments)


def _one_line(text: str) -> str:
    return " ".join(text.split())
