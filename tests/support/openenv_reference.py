"""OpenEnv's server: a replay of recorded exchanges with the real one, and the real one behind a relay.

`openenv_exchanges.json` has for each game of `openenv_server.py` its schema and the conversations of its connections.
The long tests compare it with the real server. RECORD=1 writes it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.ports import free_port
from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-openenv" / "bin" / "python"
RECORDED = HERE / "openenv_exchanges.json"
_MOST = 16 << 20
_SHOWN = 1000
"""Longer messages of the real server are recorded by their size."""


class OpenEnvServer:
    """A game at `url`, recorded or real."""

    def __init__(self, game: str, upstream: int | None = None) -> None:
        """`upstream`: the port of the real server, to which everything is relayed."""
        self.game, self._upstream = game, upstream
        self.connections: list[list[Any]] = []
        """Of each connection: the messages of the client and of the server in turn. A number is a close code."""
        self.open = 0
        self._recorded = json.loads(RECORDED.read_text())[game] if upstream is None else {}
        self._server: Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    async def __aenter__(self) -> OpenEnvServer:
        self._server = await serve(self._talk, "127.0.0.1", 0, process_request=self._http, max_size=_MOST)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _http(self, here: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        if self._upstream is not None:
            async with httpx.AsyncClient() as http:
                self.schema = (await http.get(f"http://127.0.0.1:{self._upstream}/schema")).json()
        else:
            self.schema = self._recorded["schema"]
        return here.respond(HTTPStatus.OK, json.dumps(self.schema))

    async def _talk(self, client: ServerConnection) -> None:
        said: list[Any] = []
        self.connections.append(said)
        self.open += 1
        try:
            with contextlib.suppress(ConnectionClosed):
                await (self._replay(client, said) if self._upstream is None else self._relay(client, said))
        finally:
            self.open -= 1

    async def _replay(self, client: ServerConnection, said: list[Any]) -> None:
        async for message in client:
            said.append(json.loads(message))
            begun = [one for one in self._recorded["connections"] if one[: len(said)] == said and len(one) > len(said)]
            assert begun, f"the real server was never asked {said}"
            answer = begun[0][len(said)]
            said.append(answer)
            if isinstance(answer, int):
                await client.close() if answer != 1006 else client.transport.abort()
                return
            if "bytes" in answer:
                answer = {"type": "observation", "data": {"observation": {"text": "x" * answer["bytes"]}}}
            await client.send(json.dumps(answer))

    async def _relay(self, client: ServerConnection, said: list[Any]) -> None:
        async with connect(f"ws://127.0.0.1:{self._upstream}/ws", max_size=_MOST) as real:
            async for message in client:
                said.append(json.loads(message))
                try:
                    with contextlib.suppress(ConnectionClosed):
                        await real.send(message)
                    answer = str(await real.recv())
                except ConnectionClosed as closed:
                    said.append(1006 if closed.rcvd is None else closed.rcvd.code)
                    client.transport.abort()
                    return
                said.append({"bytes": len(answer)} if len(answer) > _SHOWN else json.loads(answer))
                await client.send(answer)


class RealServers:
    """OpenEnv's own servers from `.venv-openenv`. The end of the context (`with`) ends them all."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def __enter__(self) -> RealServers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @contextlib.asynccontextmanager
    async def serve(self, game: str, environments: int = 8) -> AsyncIterator[OpenEnvServer]:
        """Serves a game. At the end compares what was said with the recorded."""
        port = free_port()
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(f"{game} {port} {environments}\n")
        process.stdin.flush()
        async with asyncio.timeout(120), httpx.AsyncClient() as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    (await http.get(f"http://127.0.0.1:{port}/health")).raise_for_status()
                    break
                assert process.poll() is None, self._text()
                await asyncio.sleep(0.1)
        async with OpenEnvServer(game, port) as server:
            yield server
        _compare(server)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            assert PYTHON.exists(), f"no {PYTHON}: run `scripts/make_venv.sh openenv`"
            command = [str(PYTHON), "-P", str(HERE / "openenv_server.py")]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, text=True, start_new_session=True
            )
        return self._process

    def _text(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]


def _compare(server: OpenEnvServer) -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    known = recorded.setdefault(server.game, {"schema": None, "connections": []})
    if os.environ.get("RECORD"):
        known["schema"] = server.schema
        known["connections"] += [one for one in server.connections if one not in known["connections"]]
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    assert server.schema == known["schema"]
    for said in server.connections:
        assert any(one[: len(said)] == said for one in known["connections"]), f"this is not recorded: {said}"


KINDS = ["recorded", pytest.param("real", marks=pytest.mark.long)]
"""Parameters of a test that runs against both."""
