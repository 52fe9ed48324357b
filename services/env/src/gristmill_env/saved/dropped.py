"""Saves the content of dropped groups: `<run>/dropped/<reason>.jsonl`, in the format of saved groups.

The table of rollouts shows this content (docs/look-at-a-run.md), and `replay` can score it again with corrected
rewards. Each reason has its own file, so that a frequent reason does not replace the groups of a rare one. A full file
becomes `<reason>.1.jsonl`, which replaces an older file of this name.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gristmill import Permit, RunRecord, SamplingParams
from gristmill.archive.dropped import dropped_files
from gristmill.lines import LineFile
from gristmill.redaction import redact_text
from gristmill_env.data import Item
from gristmill_env.errors import DropReason, EnvError
from gristmill_env.rewards import Score
from gristmill_env.rollouts.groups import Rollout, failures
from gristmill_env.saved.group import SavedCompletion, SavedGroup, json_columns, settings_of
from gristmill_env.settings.run import EnvConfig
from gristmill_env.values import is_storable, whole

MAX_BYTES = 16 << 20
"""Largest size of each of a reason's two files."""


@dataclass
class Attempt:
    """What exists of a row's group so far. The content of a dropped group."""

    index: int
    """Index into the data set."""
    item: Item | None = None
    sampling: SamplingParams | None = None
    rollouts: Sequence[Rollout] = ()
    scores: Sequence[Score] = ()
    """One per rollout, or none."""
    failed: Sequence[EnvError] = ()
    """The errors of the rollouts that failed and were left out."""
    seconds: float | None = None


class DroppedGroup(SavedGroup, frozen=True, kw_only=True):
    """A saved group that was dropped. A group without completions is a row that failed before it had any."""

    group_id: str
    creation_ms: int
    """Time of the run's creation, ms of Unix time."""
    env_id: str
    reason: str
    error: str | None = None
    prompt_tokens: int | None = None
    seconds: float | None = None
    """From the first request to the last score."""
    completions_left_out: int = 0
    """Completions that are not here, because they made the line too long."""


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

    def _group(self, permit: Permit, reason: DropReason, error: str, attempt: Attempt) -> DroppedGroup:
        item = attempt.item
        prompt = attempt.rollouts[0].prompt if attempt.rollouts else None
        messages = prompt.messages if prompt is not None else () if item is None else item.messages
        scores = attempt.scores or [_UNSCORED] * len(attempt.rollouts)
        columns, left_out = ({}, []) if item is None else json_columns(item.columns)
        return DroppedGroup(
            group_id=permit.group_id,
            creation_ms=round(self._record.created_at * 1000),
            env_id=self._env_id,
            reason=reason.value,
            error=error or None,
            prompt_tokens=len(prompt.token_ids) or None if prompt is not None else None,
            seconds=attempt.seconds,
            run=self._record.run_id,
            creation=self._record.creation or None,
            model=self._model,
            row=permit.row,
            index=attempt.index,
            prompt="" if item is None else item.prompt,
            prompt_text=None if prompt is None else prompt.text,
            messages=[dict(message) for message in messages] or None,
            conversational=item is not None and item.conversation is not None,
            answer=None if item is None else item.answer,
            columns=columns,
            columns_left_out=left_out,
            sampling=attempt.sampling,
            settings=self._settings,
            completions=[
                SavedCompletion.of(rollout, score, tokens=False)
                for rollout, score in zip(attempt.rollouts, scores, strict=True)
            ],
            failed=failures(attempt.failed),
            versions=list(dict.fromkeys(span.version for rollout in attempt.rollouts for span in rollout.labels)),
            time=datetime.now(UTC),
        )  # fmt: skip

    def _line(self, group: DroppedGroup) -> bytes:
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


def _encoded(group: DroppedGroup) -> bytes:
    return msgspec.json.encode(_writable(msgspec.to_builtins(group, enc_hook=repr)))


_UNSCORED = Score(None, {})


def _writable(value: Any) -> Any:
    """Returns the value without secrets and without what JSON cannot hold, such as half characters."""
    if isinstance(value, str):
        return whole(redact_text(value))
    if isinstance(value, dict):
        return {str(_writable(str(key))): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value if is_storable(value) else None
