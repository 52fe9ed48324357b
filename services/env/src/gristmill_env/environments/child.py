"""The process of an environment: each call plays one rollout (`running.host`)."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from gristmill_env.data import Item
from gristmill_env.environments.functions import schemas
from gristmill_env.environments.model import Answer, Asked
from gristmill_env.environments.playing import Episode
from gristmill_env.environments.registry import create_environment
from gristmill_env.environments.tools import ToolLoop
from gristmill_env.running.host import Asking, Failed, Handler

TARGET = f"{__name__}:handler"


answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
closed: msgspec.msgpack.Decoder[Failed | None] = msgspec.msgpack.Decoder(Failed | None)
encode = msgspec.msgpack.encode


def handler(settings: bytes) -> Handler:
    """Loads the environment. `settings`: its `Source` and the seconds that a method may take, as a pickle.

    The body of a call is an `Item` as a pickle, because a column may hold anything.
    """
    source, limit = pickle.loads(settings)
    factory = create_environment(*source)
    if issubclass(factory.kind, ToolLoop):
        schemas()  # now, and not in the time of the first rollout

    async def play(body: bytes, ask: Asking) -> bytes:
        async def answered(question: Asked) -> Any:
            return answers.decode(await ask(encode(question)))

        item: Item = pickle.loads(body)
        return encode(await Episode(factory, item, answered, limit).play())

    return play
