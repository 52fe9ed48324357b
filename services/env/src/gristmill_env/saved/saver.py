"""Saves rollouts as they finish."""

from __future__ import annotations

import asyncio

from gristmill_env.rollout import Rollout
from gristmill_env.saved.group import SavedGroup
from gristmill_env.saved.writer import GroupWriter
from gristmill_env.settings import EnvConfig


class GroupSaver:
    """Saves the groups of `process`, and of a run with `data_path_to_save_groups`."""

    def __init__(self, writer: GroupWriter, *, run: str, model: str, config: EnvConfig) -> None:
        """`run`: its id; `model`: the model's name at the server."""
        self._writer = writer
        self._run, self._model, self._config = run, model, config

    async def save(self, rollout: Rollout) -> SavedGroup:
        """Saves a rollout, which is on disk when this returns. The event loop is not blocked. Raises SavedError."""
        group = SavedGroup.of(rollout, run=self._run, model=self._model, config=self._config)
        await asyncio.to_thread(self._writer.append, group)
        return group

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
