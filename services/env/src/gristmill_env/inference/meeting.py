"""The start of a run: waits for the servers, and checks that they all serve the same model."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence

from gristmill import Manifest
from gristmill_env.errors import InferenceError
from gristmill_env.inference.balance import Lane, Pauses
from gristmill_env.inference.http import ServerTroubleError
from gristmill_env.inference.request import ServedModel

_LONGEST_PAUSE = 0.5
"""Seconds. Short, because the run waits for the server's first answer and the server has no other requests yet."""
_GRACE = 10.0
"""Seconds that the other servers have after the first server's answer. Servers that run answer immediately."""


class Meeting:
    """Queries all servers until they answer."""

    def __init__(self, lanes: Sequence[Lane], manifest: Manifest | None, patience: float) -> None:
        """`patience`: seconds within which the first server must answer."""
        self._lanes = lanes
        self._manifest = manifest
        self._began = time.monotonic()
        self._until = self._began + patience
        self._met: dict[Lane, ServedModel] = {}
        self._late: dict[Lane, ServerTroubleError] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the start of the meeting."""
        return time.monotonic() - self._began

    async def hold(self) -> tuple[dict[Lane, ServedModel], dict[Lane, ServerTroubleError]]:
        """Returns the model of each server that answered, and the error of each server that did not answer in time.

        Raises InferenceError when a server serves another model than its `model_name`.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for lane in self._lanes:
                    tasks.create_task(self._meet(lane))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        return {lane: self._met[lane] for lane in self._lanes if lane in self._met}, self._late

    def agree(self, met: Mapping[Lane, ServedModel]) -> ServedModel:
        """Returns the model that all servers serve, with the smallest `max_model_len`. Raises InferenceError if the
        servers differ."""
        (first, agreed), *others = met.items()
        for lane, served in others:
            check_same(agreed, first.server.url, dataclasses.replace(served, max_model_len=None), lane.server.url)
        lengths = [served.max_model_len for served in met.values() if served.max_model_len is not None]
        return dataclasses.replace(agreed, max_model_len=min(lengths, default=None))

    async def _meet(self, lane: Lane) -> None:
        pauses = Pauses(0.25, _LONGEST_PAUSE)
        while True:
            try:
                self._met[lane] = await lane.server.meet(self._manifest)
            except ServerTroubleError as trouble:
                left = self._until - time.monotonic()
                if left <= 0:
                    self._late[lane] = trouble
                    return
                await asyncio.sleep(min(max(pauses.next(), trouble.wait), left))
            else:
                self._until = min(self._until, time.monotonic() + _GRACE)
                return


def check_same(agreed: ServedModel, there: str, served: ServedModel, here: str) -> None:
    """Checks that `served` can replace `agreed`. Raises InferenceError that names both servers."""
    if served.name != agreed.name and (served.root is None or served.root != agreed.root):
        raise InferenceError(
            "models_differ",
            f"the model servers serve different models: '{agreed.name}' at {there}, '{served.name}' at {here}; "
            "all of server_configs must serve the same",
            models=[agreed.name, served.name],
            urls=[there, here],
        )
    if served.text_only != agreed.text_only:
        plain, ids = (here, there) if served.text_only else (there, here)
        raise InferenceError(
            "server_kinds_differ",
            f"the model server at {plain} gives text only, the one at {ids} token ids; "
            "server_configs must be of one kind",
            text_only=plain,
            token_ids=ids,
        )
    wanted, found = agreed.max_model_len, served.max_model_len
    if wanted is not None and found is not None and found < wanted:
        raise InferenceError(
            "context_too_short",
            f"the model server at {here} takes {found} tokens, less than the {wanted} at {there}; "
            "start it with the same --max-model-len",
            url=here,
            found=found,
            wanted=wanted,
        )
