"""The process of an environment: each call plays one rollout (`running.host`)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec

from gristmill_env.data import Item
from gristmill_env.environments.functions import schemas
from gristmill_env.environments.model import Answer, Asked
from gristmill_env.environments.playing import Episode
from gristmill_env.environments.registry import Source, create_environment
from gristmill_env.environments.tools import ToolLoop
from gristmill_env.running.host import Asking, Failed, Handler

TARGET = f"{__name__}:handler"


class Settings(msgspec.Struct, frozen=True):
    """The settings of the process."""

    source: Source
    limit: float
    """Seconds that a method may take between two replies of the model."""


answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
closed: msgspec.msgpack.Decoder[Failed | None] = msgspec.msgpack.Decoder(Failed | None)
encode = msgspec.msgpack.encode


def handler(settings: bytes) -> Handler:
    """Loads the environment. The body of a call is an `Item` as a pickle, because a column may hold anything."""
    given: Settings = pickle.loads(settings)
    folder = None if given.source.folder is None else Path(given.source.folder)
    factory = create_environment(given.source.name, given.source.params, folder)
    if issubclass(factory.kind, ToolLoop):
        schemas()  # now, and not in the time of the first rollout

    async def play(body: bytes, ask: Asking) -> bytes:
        async def answered(question: Asked) -> Any:
            return answers.decode(await ask(encode(question)))

        item: Item = pickle.loads(body)
        return encode(await Episode(factory, item, answered, given.limit).play())

    return play
