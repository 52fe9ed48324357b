"""One port for several model servers: `python -m gristmill.internal.model_port 0.0.0.0:9001 dns+http://model:9001`.

A port of a host cannot belong to several containers. So in Compose this program has the published port, and forwards
each connection to one of the containers of `--scale model=2` in turn. It copies bytes and reads no request: the model
servers check hosts and tokens as without it. Trainer and environment connect to the servers directly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from urllib.parse import urlsplit

from gristmill.errors import ConfigError
from gristmill.internal.logs import line, setup
from gristmill.internal.signals import stop_on_hangup
from gristmill.model_servers import ServerAddresses, find_all, split_urls

_LOG = logging.getLogger(__name__)
_CONNECT_TIMEOUT = 2.0
"""Seconds to connect to a server before the next server is tried."""
_CHUNK = 65536


class ModelPort:
    """Forwards connections to the servers of `urls`. A server that does not accept a connection is skipped."""

    def __init__(self, urls: str) -> None:
        """`urls`: as in gristmill.model_servers. Raises ConfigError."""
        self._names = [ServerAddresses(url) for url in split_urls(urls)]
        self._turn = 0

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Starts to listen. Port 0 chooses a free port."""
        return await asyncio.start_server(self._forward, host, port)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = await self._connect()
        if server is not None:
            back, forth = server
            # A client that closes its side only (half-close) still receives the answer.
            await asyncio.gather(_copy(reader, forth), _copy(back, writer))
            forth.close()
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Returns a connection to the next server that accepts one; None if no server does."""
        urls = await asyncio.to_thread(find_all, self._names)
        self._turn += 1
        problems = []
        for number in range(len(urls)):
            parts = urlsplit(urls[(self._turn + number) % len(urls)])
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT):
                    return await asyncio.open_connection(parts.hostname, parts.port)
            except OSError as error:  # includes TimeoutError
                problems.append(f"{parts.netloc} ({error or type(error).__name__})")
        _LOG.warning("%s", line("no model server", problem=", ".join(problems) or "no address"))
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until the sender closes its side, or either side breaks off."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            return
    writer.close()


async def _run(address: str, urls: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("listen_address", f"'{address}' is not HOST:PORT, such as 0.0.0.0:9001", address=address)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stop_on_hangup()
    server = await ModelPort(urls).serve(host, int(port))
    _LOG.info("%s", line("model port", address=address, servers=urls))
    await stop.wait()
    server.close()


def main() -> int:
    """Forwards until SIGTERM. Returns the exit status: 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m gristmill.internal.model_port", description=__doc__)
    parser.add_argument("address", help="HOST:PORT to listen at")
    parser.add_argument("urls", help="URLs of the model servers, with commas between them")
    options = parser.parse_args()
    setup("model-port")
    try:
        asyncio.run(_run(options.address, options.urls))
    except ConfigError as error:
        _LOG.error("%s", error.report())
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
