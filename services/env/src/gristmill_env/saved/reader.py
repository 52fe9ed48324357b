"""Reads groups from our JSONL, Atropos' JSONL, and the rollouts that a run archived."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gristmill import TrajectoryGroup, read_archive
from gristmill_env.errors import SavedError
from gristmill_env.saved.atropos import AtroposGroup, from_atropos
from gristmill_env.saved.group import FORMAT, SavedGroup
from gristmill_env.saved.last_line import is_whole
from gristmill_env.saved.tokens import Decode, from_trajectory, no_tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OURS = msgspec.json.Decoder(SavedGroup)
_THEIRS = msgspec.json.Decoder(AtroposGroup | list[AtroposGroup])


class _Kind(msgspec.Struct):
    """The keys that distinguish the kinds of lines."""

    format: int | None = None
    completions: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()
    scores: msgspec.Raw = msgspec.Raw()


_KIND = msgspec.json.Decoder(_Kind | list[Any])


def read_groups(source: Path, decode: Decode = no_tokenizer) -> Iterator[SavedGroup]:
    """Yields the groups of a file or of a run's folder (`runs/quickstart`, or its rollouts/), one in memory at a time.

    `decode`: converts token ids to text; called only for groups without text. A torn last line after a kill is
    skipped with a warning. Raises SavedError naming the line, and ArchiveError.
    """
    if source.is_dir():
        for archived in read_archive(source):
            if archived.schema == "group":
                yield from_trajectory(TrajectoryGroup.decode(archived.body), decode)
            else:
                yield from _line(archived.body, f"group {archived.group_id} of {source}", source.name, decode)
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise SavedError(
            "saved_groups_unreadable", f"cannot read saved groups from {source}: {error.strerror}", path=source
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if not line.endswith(b"\n") and not is_whole(line):
                logger.warning("line %d of %s, the last, was torn; it is left out", number, source)
            else:
                yield from _line(line, f"line {number} of {source}", source.stem, decode)


def _line(line: bytes, where: str, name: str, decode: Decode) -> Iterator[SavedGroup]:
    kind = _decoded(_KIND.decode, line, where)
    if isinstance(kind, list) or (bytes(kind.tokens) and bytes(kind.scores)):
        theirs = _decoded(_THEIRS.decode, line, where)
        for group in theirs if isinstance(theirs, list) else [theirs]:
            yield from_atropos(group, name, where, decode)
    elif not bytes(kind.completions):
        raise SavedError(
            "not_a_saved_group",
            f"{where} is no saved group: it has neither completions nor tokens and scores",
            where=where,
        )
    elif kind.format != FORMAT:
        raise SavedError(
            "group_format",
            f"{where} has format {kind.format}; this gristmill reads format {FORMAT}",
            where=where,
            format=kind.format,
        )
    else:
        yield _decoded(_OURS.decode, line, where)


def _decoded(decoder: Callable[[bytes], T], line: bytes, where: str) -> T:
    try:
        return decoder(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SavedError("not_a_saved_group", f"{where} is no saved group: {error}", where=where) from error
