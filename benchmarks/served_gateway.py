"""The gateway for agents in a separate process, with open sessions, for measurements.

    python -m benchmarks.served_gateway MODEL_URL TOKENIZER SESSIONS FOLDER

The process writes the gateway's URL and the sessions' keys to FOLDER/gateway.json, and ends after SIGTERM. It has no
torch, as in the environment's image. transformers would import torch and use three times the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import json
import os
import signal
import sys
from pathlib import Path

from gristmill import SamplingParams
from gristmill.internal.disk import write_file
from gristmill_env.gateway import Policy, Session, Sessions, serving
from gristmill_env.inference import ModelServers
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.settings.servers import ServerConfig

ANSWER = "gateway.json"
_PROFILE = os.environ.get("GATEWAY_PROFILE")
"""A file for the functions' times (pstats). Profiling makes the gateway slower."""


async def _serve(model_url: str, tokenizer: str, count: int, folder: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sampling = SamplingParams(temperature=1.0, max_tokens=1024)
    async with ModelServers([ServerConfig(base_url=model_url)], patience=60) as servers:
        served = await servers.connect(patience=60)
        prompts = PromptBuilder(await asyncio.to_thread(load_tokenizer, tokenizer))
        policy = Policy(served.name, prompts, servers, served.max_model_len or 2**15)
        async with serving(Sessions(), served.name, ("127.0.0.1", 0), {}) as gateway:
            sessions = [Session(policy, sampling, folder=folder / str(number)) for number in range(count)]
            for session in sessions:
                gateway.sessions.add(session)
            keys = [session.key for session in sessions]
            answer = json.dumps({"url": gateway.url, "model": served.name, "keys": keys})
            write_file(folder / ANSWER, answer.encode())
            with cProfile.Profile() if _PROFILE else contextlib.nullcontext() as profile:
                await stop.wait()
            if profile is not None:
                profile.dump_stats(str(_PROFILE))
            for session in sessions:
                await session.close()


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    asyncio.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
