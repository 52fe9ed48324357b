"""An HTTP server on loopback whose answers a test chooses."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self


class Request(NamedTuple):
    method: str
    path: str
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        """The body read as JSON; None without a body."""
        return json.loads(self.body) if self.body else None


class Answer(NamedTuple):
    status: int
    body: Any = b""
    """Bytes, or a value that is sent as JSON."""
    headers: Mapping[str, str] = {}


class HttpServer:
    """Answers each request with `answer(request)`, on a separate thread."""

    def __init__(self, answer: Callable[[Request], Answer], address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """`address`: host and port; port 0 chooses a free port."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, content, headers = answer(Request(self.command, self.path, self.headers, body))
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # A test's client may have stopped waiting.
                    self.wfile.write(raw)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *arguments: object) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(address, Handler)
        self.port = self._server.server_port
        self.url = f"http://{address[0]}:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
