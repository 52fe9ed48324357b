"""The process of an agent that is a function: each call runs the function for one rollout (`running.host`)."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import msgspec

from gristmill.internal.plugins import load_plugin
from gristmill_env.agents.task import AgentTask, Endpoint
from gristmill_env.errors import EpisodeError
from gristmill_env.options import checked_options, options_of
from gristmill_env.running.host import Asking, Handler, run
from gristmill_env.values import plain


def handler(settings: bytes) -> Handler:
    """Loads the agent. The body of a call is an `AgentTask` and an `Endpoint`, and its result the agent's reward."""
    name, folder, params = pickle.loads(settings)
    agent = load_plugin(name, Path(folder))
    if not callable(agent):
        raise EpisodeError(
            "not_an_agent", f"{name} is {agent!r:.80}; an agent is a function: async def run(task, endpoint)", name=name
        )
    given = inspect.signature(agent).parameters.values()
    needed = any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in given)
    # The types of arguments that nobody sets need not be known here.
    known = options_of(agent, f"agent '{name}'", EpisodeError, name=name) if params or needed else {}
    options = checked_options(params, known, f"agent '{name}'", EpisodeError, name=name)

    async def work(body: bytes, _ask: Asking) -> bytes:
        task, endpoint = msgspec.msgpack.decode(body, type=tuple[msgspec.Raw, Endpoint])
        reward = await run(agent, msgspec.msgpack.decode(task, type=AgentTask), endpoint, **options)
        try:
            return msgspec.msgpack.encode(reward, enc_hook=_sent)
        except OverflowError:  # the owner refuses it as a reward
            return msgspec.msgpack.encode(repr(reward))

    return work


def _sent(value: Any) -> Any:
    """Returns the number of an array or a tensor without dimensions. The owner refuses another value as a reward."""
    number = plain(value)
    return repr(value) if number is value else number
