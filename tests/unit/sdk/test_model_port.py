"""One port for several model servers. The servers are plain TCP servers, because the port reads no request."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from tests.support.ports import free_port

from gristmill.internal.model_port import ModelPort


async def _server(name: str) -> asyncio.Server:
    """Starts a server that answers each connection with its name and the bytes of the client, at the client's end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(name.encode() + await reader.read())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def _port(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _ask(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_connections_go_to_the_servers_in_turn_and_skip_a_dead_server() -> None:
    one, two = await _server("one"), await _server("two")
    urls = ",".join(f"http://127.0.0.1:{_port(server)}" for server in (one, two))
    front = await ModelPort(urls).serve("127.0.0.1", 0)
    assert sorted([await _ask(_port(front), b"-a") for _ in range(4)]) == [b"one-a", b"one-a", b"two-a", b"two-a"]
    long = b"x" * 1_000_000
    assert (await _ask(_port(front), long))[3:] == long
    one.close()
    assert [await _ask(_port(front), b"") for _ in range(4)] == [b"two"] * 4
    two.close()
    assert await _ask(_port(front), b"") == b""
    front.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_program_ends_with_a_signal_to_stop(number: signal.Signals) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gristmill.internal.model_port", address, "http://127.0.0.1:9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        assert address in program.stderr.readline()
        os.kill(program.pid, number)
        assert program.wait(timeout=30) == 0


@pytest.mark.slow
def test_program_under_nohup_ignores_sighup() -> None:
    address = f"127.0.0.1:{free_port()}"
    command = ["nohup", sys.executable, "-m", "gristmill.internal.model_port", address, "http://127.0.0.1:9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        while address not in program.stderr.readline():
            pass
        os.kill(program.pid, signal.SIGHUP)
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(timeout=30) == 0, "SIGINT stopped it, and SIGHUP did not"


@pytest.mark.parametrize(("address", "urls", "code"), [("9001", "http://m:1", "listen_address"), (":1", "m", "listen")])
@pytest.mark.slow
def test_program_refuses_a_wrong_address(address: str, urls: str, code: str) -> None:
    command = [sys.executable, "-m", "gristmill.internal.model_port", address, urls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, f"[{code}" in done.stderr) == (2, True)
