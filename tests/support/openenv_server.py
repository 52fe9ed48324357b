"""Servers of OpenEnv's real package, for `.venv-openenv`. A line GAME PORT ENVIRONMENTS on stdin forks a server.

`word`: an action of one text. `move`: an action of two fields. `shop`: tools over MCP.
"""

# mypy: disable-error-code="misc, untyped-decorator"
import os
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    message: str


class Move(Action):
    """Moves the piece."""

    column: int
    why: str | None = None


class Seen(Observation):
    text: str


class Game(Environment):
    """Ends at the word `seed`-`prize`, and does what the words crash, fail and big name."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, prize: str = "cake", **_: Any) -> Seen:
        self.right, self._steps = f"{seed}-{prize}", 0
        return Seen(text=f"Say {self.right}.", done=prize == "done")

    def step(self, action: Any, **_: Any) -> Seen:
        said = action.message if isinstance(action, Word) else str(action.column)
        self._steps += 1
        if said == "crash":
            os._exit(1)
        if said == "fail":
            raise RuntimeError("the board is broken")
        if said == "big":
            return Seen(text="x" * (5 << 20))
        right = said in (self.right, "7")
        return Seen(text="Right." if right else f"{said} is wrong.", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("shop")

        @tools.tool
        def price(thing: str) -> str:
            """Returns the price of a thing."""
            if thing != "cake":
                raise ValueError(f"no {thing} here")
            return "3 coins"

        @tools.tool
        def buy(thing: str) -> str:
            """Buys a thing."""
            return f"You have a {thing}."

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        seen = await super().step_async(action, timeout_s, **options)
        if isinstance(action, CallToolAction) and action.tool_name == "buy":
            seen.reward, seen.done = 1.0, True
        return seen

    @property
    def state(self) -> State:
        return State()


GAMES: dict[str, Any] = {
    "word": (Game, Word, Seen),
    "move": (Game, Move, Seen),
    "shop": (Shop, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    for line in sys.stdin:  # the import of OpenEnv takes 10 s, and a fork of it none
        if os.fork() == 0:
            game, port, most = line.split()
            app = create_app(*GAMES[game], max_concurrent_envs=int(most))
            uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
