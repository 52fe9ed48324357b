"""Saves rollouts as they come."""

from __future__ import annotations

import asyncio

from gristmill_env.rollout import Rollout
from gristmill_env.saved.group import SavedGroup
from gristmill_env.saved.writer import GroupWriter
from gristmill_env.settings import EnvConfig


class GroupSaver:
    """What `process` and a run with `data_path_to_save_groups` write by."""

    def __init__(self, writer: GroupWriter, *, run: str, model: str, config: EnvConfig) -> None:
        """`run`: its id; `model`: as the server calls it."""
        self._writer = writer
        self._run, self._model, self._config = run, model, config

    async def save(self, rollout: Rollout) -> SavedGroup:
        """On disk when it returns; the loop goes on meanwhile. Raises SavedError."""
        group = SavedGroup.of(rollout, run=self._run, model=self._model, config=self._config)
        await asyncio.to_thread(self._writer.append, group)
        return group

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
