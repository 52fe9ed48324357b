"""Reads `.env` files by the rules of Docker Compose.

    NAME=value            # a comment after a space; `export NAME=value` and `NAME: value` are the same
    NAME='a $literal'     no variables
    NAME="a\\nb ${OTHER}"  escapes, several lines
    NAME                  the value of the environment

Unquoted and double-quoted values may contain $OTHER, ${OTHER}, ${OTHER:-default}, ${OTHER:?error} and ${OTHER:+text}.
Without the colon, an empty variable counts as set. `$$` is a dollar sign. The environment overrides the file.

Needs only the standard library: the Makefile runs this file before packages are installed.

    python dotenv.py FILE NAME
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_START = re.compile(r"(?:export[ \t]+)?([\w.-]+)[ \t]*(?:(?P<set>[=:])[ \t]*)?")
_DOLLAR = re.compile(r"\$(?:(?P<escaped>\$)|(?P<name>[A-Za-z_]\w*)|\{(?P<braced>\w*))")
_OPERATOR = re.compile(r":?[-?+]")
_ESCAPES = {"$": "$$", "n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


class DotenvError(ValueError):
    """A line that Compose would refuse too."""


def read_env_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the file sets and `environ` does not; none if the file does not exist.

    Compose's variable COMPOSE_DISABLE_ENV_FILE turns the file off. Raises DotenvError, OSError.
    """
    if not path.is_file() or environ.get("COMPOSE_DISABLE_ENV_FILE", "").lower() in ("1", "true"):
        return {}
    try:
        variables = parse(path.read_text(encoding="utf-8-sig"), environ)
    except UnicodeDecodeError as error:
        raise DotenvError(f"{path} is not UTF-8: {error}") from error
    except DotenvError as error:
        raise DotenvError(f"{path}, {error}") from error
    return {name: value for name, value in variables.items() if name not in environ}


def parse(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that `text` sets, including those that `environ` overrides. Raises DotenvError."""
    return dict(_Parser(text.replace("\r\n", "\n"), environ).variables())


class _Parser:
    def __init__(self, text: str, environ: Mapping[str, str]) -> None:
        self._text = text
        self._at = 0
        self._environ = environ
        self._known: dict[str, str] = {}

    def variables(self) -> Iterator[tuple[str, str]]:
        if "\0" in self._text:  # No process can have such a variable.
            self._at = self._text.index("\0")
            raise self._error("has a null character")
        while self._skip():
            start = _START.match(self._text, self._at)
            if start is None:
                raise self._error("is not NAME=value")
            name, self._at = start[1], start.end()
            if start["set"] is None:
                if rest := self._line().strip():
                    self._at -= 1
                    raise self._error(f"has {rest!r} after the name {name}, and no =")
                if name in self._environ:
                    yield name, self._environ[name]
                continue
            self._known[name] = value = self._value()
            yield name, value

    def _skip(self) -> bool:
        """Goes to the next line with a variable. Returns False at the end."""
        while (rest := self._text[self._at :].lstrip()).startswith("#"):
            self._at = len(self._text) - len(rest)
            self._line()
        self._at = len(self._text) - len(rest)
        return bool(rest)

    def _line(self) -> str:
        """Returns the rest of the line, and goes to the next line."""
        line, _, _ = self._text[self._at :].partition("\n")
        self._at += len(line) + 1
        return line

    def _comment(self, quote: str) -> None:
        """Goes to the next line after a quoted value."""
        rest = self._line().strip()
        if rest and not rest.startswith("#"):
            self._at -= 1
            raise self._error(f"has text after the closing {quote}")

    def _value(self) -> str:
        quote = self._text[self._at : self._at + 1]
        if quote not in ("'", '"') or not quote:
            line = self._line()
            return self._expand(line.partition(" #")[0].strip())
        end = self._at + 1
        while (mark := self._text[end : end + 1]) != quote:
            if not mark:
                raise self._error(f"has no closing {quote}")
            end += 2 if mark == "\\" else 1
        inner, self._at = self._text[self._at + 1 : end], end + 1
        self._comment(quote)
        if quote == "'":
            return inner.replace("\\'", "'")
        return self._expand(re.sub(r"\\([nrtabfv\"\\$])", lambda found: _ESCAPES.get(found[1], found[1]), inner))

    def _expand(self, text: str) -> str:
        """Replaces the variables in a value."""
        parts: list[str] = []
        at = 0
        while (match := _DOLLAR.search(text, at)) is not None:
            parts.append(text[at : match.start()])
            at = match.end()
            if match["escaped"]:
                parts.append("$")
            elif match["name"]:
                parts.append(self._lookup(match["name"]) or "")
            else:
                end = _closing(text, at)
                if end is None:
                    raise self._error(f"has no closing brace after ${{{match['braced']}")
                parts.append(self._braced(match["braced"], text[at:end]))
                at = end + 1
        return "".join([*parts, text[at:]])

    def _braced(self, name: str, rest: str) -> str:
        value = self._lookup(name)
        operator = _OPERATOR.match(rest or "-")
        if operator is None or not name or name[0].isdigit():
            raise self._error(f"has an invalid ${{{name}{rest}}}")
        is_set = value is not None and (bool(value) or not operator[0].startswith(":"))
        other = rest[operator.end() :]
        match operator[0][-1]:
            case "-":
                return value or "" if is_set else self._expand(other)
            case "+":
                return self._expand(other) if is_set else ""
            case _:
                if not is_set:
                    raise self._error(f"needs {name}: {self._expand(other) or 'it is not set'}")
                return value or ""

    def _lookup(self, name: str) -> str | None:
        return self._environ.get(name, self._known.get(name))

    def _error(self, problem: str) -> DotenvError:
        return DotenvError(f"line {self._text.count(chr(10), 0, self._at) + 1} {problem}")


def _closing(text: str, at: int) -> int | None:
    """Returns the position of the brace that closes the one before `at`."""
    depth = 1
    for position in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


if __name__ == "__main__":
    try:
        sys.stdout.write(read_env_file(Path(sys.argv[1]), os.environ).get(sys.argv[2], ""))
    except (DotenvError, OSError) as problem:
        sys.exit(f"error [env_file]: {problem}")
