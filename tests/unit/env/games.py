"""The environments that the processes of test_environment_runner.py play.

The column `log` of a row names a file, which receives a line for each environment that is made and closed. All rollouts
of a process share its classes, so environments have numbers in the order of their making.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill_env.data import Item, Message, user
from gristmill_env.environments import Environment, Model, Reply, StepResult
from gristmill_env.errors import DatasetError, RewardError

LOG = Path(os.environ.get("GAMES_LOG", os.devnull))
FIRST = LOG.with_name("first")
SECOND = FIRST.exists()
"""Whether an environment of an earlier process has hung or died."""
MANY = threading.Barrier(256)


def note(what: str, number: int) -> None:
    """Adds a line to the log."""
    with LOG.open("a") as log:
        log.write(f"{what} {number}\n")


class Recorded(Environment):
    """Notes when it is made, stepped and closed. Environment 1 of a process is the one that misbehaves."""

    made: list[Recorded] = []

    def __init__(self) -> None:
        self.number = len(self.made)
        self.made.append(self)
        note("made", self.number)

    def reset(self, item: Item) -> Sequence[Message]:
        return [user(f"{item.prompt} {self.number}")]

    def step(self, reply: Reply) -> StepResult:
        note("step", os.getpid())
        return StepResult.end(1.0)

    def close(self) -> None:
        note("closed", self.number)


class ClosesAsync(Recorded):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()


class FailsToReset(Recorded):
    def reset(self, item: Item) -> Sequence[Message]:
        if self.number == 1:
            raise KeyError("no board")
        return super().reset(item)


class FailsToStep(Recorded):
    def step(self, reply: Reply) -> StepResult:
        if self.number == 1:
            raise KeyError("no board")
        return super().step(reply)


class Exits(Recorded):
    def step(self, reply: Reply) -> StepResult:
        if self.number == 1:
            raise SystemExit(3)
        return super().step(reply)


class FailsToClose(Recorded):
    def close(self) -> None:
        super().close()
        raise KeyError("the sandbox is gone")


class HangsToClose(Recorded):
    def close(self) -> None:
        super().close()
        if self.number == 1:
            threading.Event().wait()


class HangsToOpen(Recorded):
    """Environment 1 is made when the log's folder has the file `let_go`."""

    def __init__(self) -> None:
        super().__init__()
        while self.number == 1 and not LOG.with_name("let_go").exists():
            time.sleep(0.01)


class HangsToOpenOrFailsToReset(HangsToOpen):
    def reset(self, item: Item) -> Sequence[Message]:
        if self.number == 2:
            raise KeyError("no board")
        return super().reset(item)


class Hangs(Recorded):
    def step(self, reply: Reply) -> StepResult:
        if self.number == 1:
            note("hangs", self.number)
            threading.Event().wait()
        return super().step(reply)


class HangsAsync(Recorded):
    async def step(self, reply: Reply) -> StepResult:  # type: ignore[override]
        if self.number == 1:
            note("hangs", self.number)
            await asyncio.get_running_loop().create_future()
        return StepResult.end(1.0)


class BlocksItsLoop(Recorded):
    async def step(self, reply: Reply) -> StepResult:  # type: ignore[override]
        if self.number == 1:
            threading.Event().wait()  # in place of an await
        return StepResult.end(1.0)


class HangsInFirstProcess(Recorded):
    """In the first process, environment 1 hangs and the others talk without end."""

    max_turns = 10**6

    async def play(self, item: Item, model: Model) -> float:
        while not SECOND:
            await model.fresh().say("?")
            await asyncio.sleep(0.05)
            if self.number == 1:
                FIRST.touch()
                await asyncio.to_thread(threading.Event().wait)
        await model.say("?")
        return float(os.getpid())


class DiesInFirstProcess(Recorded):
    def step(self, reply: Reply) -> StepResult:
        if self.number == 1 and not SECOND:
            FIRST.touch()
            os._exit(3)
        return super().step(reply)


class FailsForAWhile(Recorded):
    def step(self, reply: Reply) -> StepResult:
        if self.number < 4:
            raise ConnectionRefusedError("no sandbox")
        return super().step(reply)


class RefusesRow(Recorded):
    def reset(self, item: Item) -> Sequence[Message]:
        raise DatasetError("row_unplayable", "not this row", row=item.row)


class RefusesReply(Recorded):
    def step(self, reply: Reply) -> StepResult:
        raise RewardError("unknown_reward", "not of this row")


class Meets(Environment):
    """Its step ends when the steps of 256 rollouts run at the same time."""

    def reset(self, item: Item) -> Sequence[Message]:
        return [user("?")]

    def step(self, reply: Reply) -> StepResult:
        MANY.wait(120)
        return StepResult.end(1.0)


class Sleeps(Meets):
    def step(self, reply: Reply) -> StepResult:
        time.sleep(1)
        return StepResult.end(1.0)


class Reads(Environment):
    """Returns what `reset` found in the row."""

    def __init__(self, *, column: str) -> None:
        self.column = column

    def reset(self, item: Item) -> Sequence[Message]:
        value: Any = item.columns[self.column]
        return [user(f"{type(value).__name__} {value}")]

    def step(self, reply: Reply) -> StepResult:
        return StepResult.end(float(os.getpid()))
