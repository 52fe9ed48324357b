"""The code that the processes of test_code_process.py run."""

from __future__ import annotations

import _thread
import asyncio
import os
import subprocess
import sys
import threading
import time

from gristmill_env.errors import EpisodeError
from gristmill_env.running.host import Asking, Handler, run

_TOGETHER = threading.Barrier(64)


def handler(settings: bytes) -> Handler:
    if settings == b"broken":
        raise EpisodeError("tests_broken", "this code cannot be loaded", name="broken")

    async def handle(body: bytes, ask: Asking) -> bytes:
        name, _, argument = body.partition(b" ")
        if name == b"echo":
            return settings + argument
        if name == b"pid":
            return str(os.getpid()).encode()
        if name == b"ask":
            return b"answered " + await ask(argument)
        if name == b"raise":
            raise KeyError("missing")
        if name == b"next":
            await run(next, iter(()))
        if name == b"half":
            raise ValueError(f"half {chr(0xD83D)}")
        if name == b"refuse":
            raise EpisodeError("tests_refused", "refused", row=3)
        if name == b"exit":
            sys.exit(4)
        if name == b"interrupt":  # As time-outs of some rewards do.
            _thread.interrupt_main()
            await asyncio.sleep(0)
            return b"goes on"
        if name == b"die":
            os._exit(3)
        if name == b"print":
            print("not a report", flush=True)  # noqa: T201
            return b"printed"
        if name == b"stdin":
            child = [sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"]
            return str(len(sys.stdin.read()) + await run(subprocess.call, child)).encode()
        if name == b"wait":
            await ask(b"begun")
            await asyncio.Event().wait()
        if name == b"block":
            told = asyncio.ensure_future(ask(b"begun"))
            await asyncio.sleep(0)
            time.sleep(3600)  # noqa: ASYNC251  what the test is about
        if name == b"hang":
            told = asyncio.ensure_future(ask(b"begun"))
            await run(time.sleep, 3600)
            await told
        if name == b"meet":
            await run(_TOGETHER.wait, 60)
        return b""

    return handle
