"""Writes saved groups, each to disk before the next, and new files of groups completely or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from gristmill.internal.disk import complete_file
from gristmill.internal.lines import LineFile
from gristmill.internal.saved import SavedGroup
from gristmill_env.errors import SavedError
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.saved.group import Attempt, saved_group, settings_of
from gristmill_env.settings.run import EnvConfig

logger = logging.getLogger(__name__)


class GroupWriter:
    """Appends groups to a file. Several processes and threads may share the file.

    `append` waits for the disk, so call it on a thread if an event loop is running:
    `await asyncio.to_thread(writer.append, group)`.
    """

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending, and creates its folders. Raises SavedError."""
        self.path = path
        self._encoder = msgspec.json.Encoder()
        with _write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = LineFile(path)

    def append(self, group: SavedGroup) -> None:
        """Writes one line. Raises SavedError when the disk refuses it."""
        with _write_errors(self.path):
            self._file.append(self._encoder.encode(group))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class GroupSaver(GroupWriter):
    """Saves the groups of `process`, and of a run with `data_path_to_save_groups`, as they finish."""

    def __init__(self, path: Path, *, run: str, model: str, config: EnvConfig, creation: str | None = None) -> None:
        """`run`: its id; `model`: the model's name at the server; `creation`: `RunRecord.creation` of a training."""
        super().__init__(path)
        self._run, self._model, self._creation = run, model, creation
        self._settings = settings_of(config, model)

    async def save(self, scored: RolloutGroup) -> SavedGroup:
        """Saves a scored group. It is on disk when this returns, also if the caller is cancelled meanwhile: the API has
        the group then. Does not block the event loop. Raises SavedError."""
        group = saved_group(
            Attempt.of(scored), run=self._run, model=self._model, settings=self._settings[scored.item.source],
            creation=self._creation,
        )  # fmt: skip
        writing = asyncio.ensure_future(asyncio.to_thread(self.append, group))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise
        return group


class _Creation(msgspec.Struct):
    """The field of a saved group that says to which training it belongs."""

    creation: str | None = None


def set_other_groups_aside(path: Path, creation: str) -> None:
    """Renames the file at `path` if its groups are not of the training `creation`, so that a new file can begin.

    A device or a FIFO at `path` stays, because it keeps no groups. Another process may do the same at the same time.
    Raises SavedError.
    """
    with _write_errors(path), contextlib.ExitStack() as opened:
        if path.exists() and not path.is_file():
            return
        try:
            file = opened.enter_context(path.open("rb"))
        except FileNotFoundError:
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists() or not os.path.sameopenfile(file.fileno(), opened.enter_context(path.open("rb")).fileno()):
            return  # another process has renamed it meanwhile
        first = file.readline()
        try:
            found = msgspec.json.decode(first, type=_Creation).creation
        except ValueError:
            found = None
        if not first or found == creation:
            return
        aside = path.with_name(f"{path.stem}-of-{(found or 'unknown')[:8]}{path.suffix}")
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.stem}-of-{(found or 'unknown')[:8]}-{number}{path.suffix}")
        path.rename(aside)
        logger.warning("%s held groups of another training; they are now in %s", path, aside)


@contextmanager
def new_file(path: Path, source: Path) -> Iterator[Path]:
    """Yields a temporary path that becomes `path` on success and is removed on failure.

    `source`: the file that is read meanwhile. Raises SavedError when `path` exists, because nothing is overwritten.
    """
    if path.exists():
        if source.exists() and path.samefile(source):
            raise SavedError("output_is_input", f"{path} is the file that is read; choose another --out", path=path)
        raise SavedError("output_exists", f"{path} exists already; choose another --out, or remove it", path=path)
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(path) as temporary:
            yield temporary


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SavedError("output_unwritable", f"cannot write {path}: {error.strerror}", path=path) from error
