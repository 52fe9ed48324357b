"""Rewards that misbehave if the completion asks for it, and are right on all other completions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from gristmill_env.rewards import Sample, Scorer

BAD = Sample("bad")

GOOD = Sample("good")

GROUP = [GOOD, BAD, GOOD, GOOD]


Make = Callable[..., Scorer]


def fine(completion: str) -> float:
    return 1.0


async def fine_async(completion: str) -> float:
    await asyncio.sleep(0)
    return 1.0


class Waiting:
    """Rewards that hang on a bad completion until the test lets them go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.begun = threading.Semaphore(0)

    def hangs(self, completion: str) -> float:
        if completion == "bad":
            self.begun.release()
            self.let_go.wait()
        return 1.0

    async def hangs_async(self, completion: str) -> float:
        if completion == "bad":
            self.begun.release()
            await asyncio.get_running_loop().create_future()
        return 1.0

    async def blocks(self, completion: str) -> float:
        if completion == "bad":
            self.begun.release()
            self.let_go.wait()  # in place of an await
        return 1.0

    async def blocks_in_a_task(self, completion: str) -> float:
        return await asyncio.create_task(self.blocks(completion))
