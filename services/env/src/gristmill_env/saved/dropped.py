"""Saves the content of dropped groups: `<run>/dropped/<reason>.jsonl`, in the format of saved groups.

The table of rollouts shows this content (docs/look-at-a-run.md), and `replay` can score it again with corrected
rewards. Each reason has its own file, so that a frequent reason does not replace the groups of a rare one. A full file
becomes `<reason>.1.jsonl`, which replaces an older file of this name.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec

from gristmill import Permit, RunRecord
from gristmill.archive.dropped import dropped_files
from gristmill.internal.lines import LineFile
from gristmill.internal.redaction import redact_text
from gristmill.internal.saved import SavedGroup
from gristmill_env.errors import DropReason
from gristmill_env.saved.group import Attempt, saved_group, settings_of
from gristmill_env.settings.run import EnvConfig
from gristmill_env.values import is_storable, whole

MAX_BYTES = 16 << 20
"""Largest size of each of a reason's two files."""


class DroppedSaver:
    """Saves the groups that a run drops. Several processes may share the run's folder."""

    def __init__(
        self, folder: Path, record: RunRecord, env_id: str, *, model: str, config: EnvConfig, max_bytes: int = MAX_BYTES
    ) -> None:
        """`folder`: the run's folder. `model`: the model's name at the server."""
        self._folder, self._record, self._env_id = folder, record, env_id
        self._model, self._settings, self._max_bytes = model, settings_of(config, model), max_bytes

    async def save(self, permit: Permit, reason: DropReason, error: str, attempt: Attempt) -> None:
        """Saves what exists of a group. Does not block the event loop. Raises OSError."""
        await asyncio.to_thread(self._append, permit, reason, error, attempt)

    def _append(self, permit: Permit, reason: DropReason, error: str, attempt: Attempt) -> None:
        line = self._line(self._group(permit, reason, error, attempt))
        older, newer = (self._folder / name for name in dropped_files(reason.value))
        newer.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(newer.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if newer.exists() and newer.stat().st_size + len(line) >= self._max_bytes:
                newer.replace(older)
            file = LineFile(newer)
            try:
                file.append(line, sync=False)
            finally:
                file.close()
        finally:
            os.close(lock)

    def _group(self, permit: Permit, reason: DropReason, error: str, attempt: Attempt) -> SavedGroup:
        content = saved_group(
            attempt, run=self._record.run_id, creation=self._record.creation or None, model=self._model,
            settings=self._settings[attempt.source], tokens=False,
        )  # fmt: skip
        return msgspec.structs.replace(
            content, row=permit.row, group_id=permit.group_id, creation_ms=round(self._record.created_at * 1000),
            env_id=self._env_id, reason=reason.value, error=error or None,
        )  # fmt: skip

    def _line(self, group: SavedGroup) -> bytes:
        """Returns the group as a line of at most a quarter of a file, with fewer completions if necessary."""
        line, most = _encoded(group), self._max_bytes // 4
        while len(line) > most and group.completions:
            kept = len(group.completions) // 2
            left_out = group.completions_left_out + len(group.completions) - kept
            group = msgspec.structs.replace(group, completions=group.completions[:kept], completions_left_out=left_out)
            line = _encoded(group)
        if len(line) > most:
            group = msgspec.structs.replace(
                group, prompt="", prompt_text=None, messages=None, columns={}, columns_left_out=[], answer=None,
                settings=None, error=(group.error or "")[:1000],
            )  # fmt: skip
            line = _encoded(group)
        return line


def _encoded(group: SavedGroup) -> bytes:
    return msgspec.json.encode(_writable(msgspec.to_builtins(group, enc_hook=repr)))


def _writable(value: Any) -> Any:
    """Returns the value without secrets and without what JSON cannot hold, such as half characters."""
    if isinstance(value, str):
        return whole(redact_text(value))
    if isinstance(value, dict):
        return {str(_writable(str(key))): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value if is_storable(value) else None
