"""Rewards that misbehave if the completion asks for it, and are right on all other completions."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

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


def where(completion: str) -> float:
    return os.getpid()


def sleeps(completion: str) -> float:
    time.sleep(3600 if completion == "bad" else 0)
    return 1.0


def spins(completion: str) -> float:
    while completion == "bad":
        pass
    return 1.0


def holds_the_lock(completion: str) -> float:
    if completion == "bad":
        ctypes.PyDLL(None).usleep(900_000_000)  # PyDLL: the interpreter's lock is not released
    return 1.0


def dies(completion: str) -> float:
    if completion == "bad":
        os._exit(3)
    return 1.0


async def waits(completion: str) -> float:
    if completion == "bad":
        await asyncio.get_running_loop().create_future()
    return 1.0


async def blocks(completion: str) -> float:
    return sleeps(completion)  # in place of an await


async def blocks_in_a_task(completion: str) -> float:
    return await asyncio.create_task(blocks(completion))


async def waits_for_a_file(completion: str) -> float:
    """Waits if the completion is a path. Returns the process that waited."""
    while "/" in completion and not Path(completion).exists():  # noqa: ASYNC110, ASYNC240  of another process
        await asyncio.sleep(0.02)
    return os.getpid()


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
