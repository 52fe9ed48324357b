"""Rollouts of an OpenEnv server: recorded exchanges of the real package, and (long) the real package itself."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.openenv_reference import KINDS, OpenEnvServer, RealServers
from tests.unit.env.environments.conftest import ITEM, Roll, trained
from tests.unit.env.gateway.conftest import ScriptedModel, until
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from gristmill_env.adapters.openenv import OpenEnv
from gristmill_env.environments import EnvironmentFactory, EnvironmentRunner, Reply, create_environment
from gristmill_env.environments.model import LeaveOut, Say
from gristmill_env.errors import EnvError, EpisodeError, InferenceError

pytestmark = pytest.mark.slow

Games = Callable[..., AbstractAsyncContextManager[OpenEnvServer]]


@pytest.fixture(scope="module")
def real() -> Iterator[RealServers]:
    with RealServers() as servers:
        yield servers


@pytest.fixture(params=KINDS)
def games(request: pytest.FixtureRequest, real: RealServers) -> Games:
    """Returns a function that serves a game."""
    return real.serve if request.param == "real" else OpenEnvServer


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def made(url: str, **options: Any) -> EnvironmentFactory:
    """Returns the environment in this process. A run has it in a separate process."""
    checked = create_environment("openenv", {"base_url": url, **options})
    return EnvironmentFactory(OpenEnv, checked.options)


async def test_text_is_the_action_and_rewards_are_added(games: Games, roll: Roll, model: ScriptedModel) -> None:
    model.says = ["cake", "3-pie"]
    async with games("word") as server:
        factory = create_environment("openenv", {"base_url": server.url, "reset": ["prize"]})
        assert factory.needs_process
        rollout = await roll(factory, columns={"prize": "pie"})
        assert len(server.connections) == 1
    assert (rollout.reward, rollout.replies, rollout.finish_reason) == (0.75, 2, "stop")
    assert trained(model, rollout) == ["cake<|im_end|>3-pie<|im_end|>"]
    shown = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert shown == ["2 + 2?\n\nSay 3-pie.", "cake is wrong."]
    [said] = server.connections
    assert said[0] == {"type": "reset", "data": {"seed": 3, "prize": "pie"}}


async def test_action_of_several_fields_is_a_tool(games: Games, roll: Roll, model: ScriptedModel) -> None:
    model.says = [call("act", column=1) + call("jump"), call("act", column="left"), call("act", column=7)]
    async with games("move") as server:
        rollout = await roll(made(server.url), tools=True)
    assert (rollout.reward, rollout.replies) == (0.75, 3)
    results = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert results[:2] == ["1 is wrong.", "Error: there is only the tool act"]
    assert results[2].startswith("Error: Invalid message; ['column']: ")
    assert '"column"' in model.prompts[0]
    assert "metadata" not in model.prompts[0].partition("Tools")[2].partition("\n")[0]


async def test_action_may_be_json_text(games: Games, roll: Roll, model: ScriptedModel) -> None:
    model.says = ["left", '```json\n{"column": 7, "why": "luck"}\n```']
    async with games("move") as server:
        rollout = await roll(made(server.url, action="json", observation="text"))
    assert (rollout.reward, rollout.replies) == (1.0, 2)


async def test_tools_of_an_mcp_environment(games: Games, roll: Roll, model: ScriptedModel) -> None:
    model.says = [call("price", thing="cake") + call("price", thing="pie"), call("buy", thing="cake")]
    async with games("shop") as server:
        rollout = await roll(made(server.url), tools=True)
    assert (rollout.reward, rollout.replies) == (1.0, 2)
    prices = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert prices[0] == "3 coins"
    assert "no pie here" in prices[1]
    assert "Returns the price of a thing." in model.prompts[0]


async def test_reply_without_a_call_ends_the_rollout_without_reward(
    games: Games, roll: Roll, model: ScriptedModel
) -> None:
    model.says = ["No."]
    async with games("shop") as server:
        rollout = await roll(made(server.url), tools=True)
    assert (rollout.reward, rollout.replies) == (0.0, 1)


async def test_opening_is_shown_and_its_connection_closed(games: Games) -> None:
    async with games("word") as server, EnvironmentRunner(made(server.url), 60) as runner:
        opening = await runner.opening(ITEM)
        assert opening.messages == [{"role": "user", "content": "2 + 2?\n\nSay 3-cake."}]
        await until(lambda: server.open == 0)


async def test_rollout_of_all_turns_keeps_its_rewards(games: Games, roll: Roll, model: ScriptedModel) -> None:
    async with games("word") as server:
        rollout = await roll(made(server.url, max_turns=2))
    assert (rollout.reward, rollout.finish_reason) == (-0.5, "turns")


@pytest.mark.parametrize(
    ("said", "code", "values", "passes"),
    [
        ("fail", "openenv_error", {"error": "EXECUTION_ERROR", "row": 3}, False),
        ("crash", "openenv_closed", {"close_code": 1006}, True),
        ("big", "openenv_closed", {"close_code": 1009}, False),
    ],
)
async def test_failing_server_fails_the_rollout(
    games: Games, said: str, code: str, values: dict[str, Any], passes: bool
) -> None:
    async def answer(asked: Say | LeaveOut) -> Reply:
        return Reply(said, "stop", 1, answer=said, turn=0)

    async with games("word") as server, EnvironmentRunner(made(server.url), 60) as runner:
        with raises(EpisodeError, code, method="OpenEnv.step", **values) as failed:
            await runner.play(ITEM, answer)
    assert failed.value.may_pass == passes


async def test_reset_that_is_over_and_columns_that_are_missing_are_named(games: Games, roll: Roll) -> None:
    async with games("word") as server:
        with raises(EpisodeError, "environment_value", method="OpenEnv.reset", value="True"):
            await roll(made(server.url, reset=["prize"]), columns={"prize": "done"})
        with raises(EpisodeError, "environment_value", method="OpenEnv.reset", value="None"):
            await roll(made(server.url, reset=["price"]), columns={"prize": "pie"})
        with raises(EpisodeError, "environment_value", method="OpenEnv.reset"):
            await roll(made(server.url, observation="board"))


@pytest.mark.parametrize("kind", KINDS)
async def test_full_server_is_waited_for(kind: str, real: RealServers, roll: Roll, model: ScriptedModel) -> None:
    """The second rollout continues as soon as the first rollout has ended."""
    async with real.serve("word", 1) if kind == "real" else OneAtATime("word") as server:
        refused, release = asyncio.Event(), asyncio.Event()

        async def watch() -> None:
            while not any("CAPACITY_REACHED" in json.dumps(said) for said in server.connections):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            refused.set()

        async def hold() -> None:
            async with connect(f"ws{server.url.removeprefix('http')}/ws") as held:
                await held.send(json.dumps({"type": "reset", "data": {"seed": 3}}))
                await held.recv()
                holding.set()
                await release.wait()

        holding = asyncio.Event()
        model.says = ["3-cake"]
        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            group.create_task(hold())
            await holding.wait()
            rolled = group.create_task(roll(made(server.url), patience=60))
            await refused.wait()
            release.set()
            rollout = await rolled
    assert rollout.reward == 1.0


class OneAtATime(OpenEnvServer):
    """Refuses a second connection, as the real server of one environment does."""

    async def _replay(self, client: ServerConnection, said: list[Any]) -> None:
        if self.open == 1:
            await super()._replay(client, said)
            return
        full = [one[1] for one in self._recorded["connections"] if "CAPACITY_REACHED" in json.dumps(one)]
        said += [None, full[0]]
        await client.send(json.dumps(full[0]))


@pytest.mark.parametrize(
    ("schema", "answer", "method"),
    [
        ("no json", "", "schema"), ({"action": {}}, "", "schema"), ({"action": {"properties": {"a": 1}}}, "", "schema"),
        (None, "no json", "reset"), (None, {"type": "state", "data": {}}, "reset"), (None, [1], "reset"),
        (None, {"type": "observation", "data": {"observation": "text"}}, "reset"),
        (None, {"type": "observation", "data": {"observation": {"a": 1}, "done": "yes"}}, "reset"),
        (None, {"type": "observation", "data": {"observation": {"a": 1}, "reward": "much"}}, "step"),
        (None, {"type": "error", "data": {"message": 1}}, "reset"),
    ],
)  # fmt: skip
async def test_wrong_answers_are_named(roll: Roll, schema: Any, answer: Any, method: str) -> None:
    given = {"action": {"properties": {"a": {"type": "string"}}}} if schema is None else schema

    def http(here: ServerConnection, request: Any) -> Any:
        body = given if isinstance(given, str) else json.dumps(given)
        return here.respond(HTTPStatus.OK, body) if request.path == "/schema" else None

    async def talk(client: ServerConnection) -> None:
        async for _ in client:
            await client.send(answer if isinstance(answer, str) else json.dumps(answer))

    async with serve(talk, "127.0.0.1", 0, process_request=http) as server:
        url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        with raises(EpisodeError, "environment_value", method=f"OpenEnv.{method}", row=3):
            await roll(made(url))


async def test_server_that_is_away_may_come_back_and_another_site_does_not(roll: Roll) -> None:
    with raises(EnvError, "service_unavailable"):
        await roll(made("http://127.0.0.1:9"), patience=0.01)

    def http(here: ServerConnection, request: Any) -> Any:
        return here.respond(HTTPStatus.NOT_FOUND, "not here")

    async with serve(lambda client: client.wait_closed(), "127.0.0.1", 0, process_request=http) as server:
        with raises(EpisodeError, "openenv_unreachable"):
            await roll(made(f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"), patience=60)


async def test_action_of_text_needs_one_text(roll: Roll) -> None:
    async with OpenEnvServer("move") as server:
        with raises(EpisodeError, "environment_value", method="OpenEnv.action"):
            await roll(made(server.url, action="text"))


async def test_tools_need_a_parser(roll: Roll) -> None:
    async with OpenEnvServer("shop") as server:
        with raises(InferenceError, "no_tool_parser"):
            await roll(made(server.url), tools=False)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "websockets" else find(name, *a))
    with raises(EpisodeError, "package_missing", package="websockets", extra="openenv"):
        create_environment("openenv", {"base_url": "http://127.0.0.1:9"})
    with raises(EpisodeError, "unknown_environment") as unknown:
        create_environment("openenf")
    assert "openenv" in str(unknown.value.values["known"])
