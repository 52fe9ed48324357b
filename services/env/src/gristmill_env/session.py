"""Opens what a command needs of other services: the model server and the task, and the API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gristmill import Client
from gristmill_env.inference import ModelServers, ServedModel, Thinking
from gristmill_env.launch import Launch
from gristmill_env.prepare import AT_A_TERMINAL, Task, meet_model
from gristmill_env.roller import Roller


@dataclass(frozen=True)
class Session:
    """A task with a connected model server."""

    task: Task
    server: ModelServers
    served: ServedModel
    roller: Roller


@contextlib.asynccontextmanager
async def open_session(
    launch: Launch, task: Task, *, wait: float = AT_A_TERMINAL, patience: float | None = None
) -> AsyncIterator[Session]:
    """Connects to the model server, and closes the connection and the task at the end.

    `wait`: seconds to wait for the server at the start, unless startup_patience is set. `patience`: seconds for which
    all servers may fail later; None: the run's. Raises InferenceError, PromptError.
    """
    config = launch.config
    servers = ModelServers(config.server_configs, patience=patience or config.patience, thinking=Thinking.of(config))
    async with task, servers as server:
        served, roller = await meet_model(launch, task, server, config.startup_patience or wait)
        yield Session(task, server, served, roller)


def connect_api(launch: Launch, patience: float) -> Client:
    """Returns a client of the run's API, to be used as a context. `patience`: seconds for which the API may be away."""
    return Client(launch.config.rollout_server_url, patience=patience, token=launch.deployment.api_token)
