"""Replaces a vLLM that crashes, restarts with its first weights, or is slow: no real vLLM fails on request."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class ModelServerStandIn:
    """The endpoints of one server that the trainer calls. The server may be stopped and started on its port."""

    def __init__(self) -> None:
        self.version = "default"
        self.paused = False
        """Between the beginning and the end of a publication."""
        self.refusal: tuple[int, str] | None = None
        """Status and code of every answer to a publication."""
        self.load_seconds = 0.0
        self.broken = False
        """Answers with text that is not valid JSON."""
        self.loads: list[str] = []
        self._runs = threading.Event()
        self._runs.set()
        self._http: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self, "")

            def do_POST(self) -> None:
                outer._answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())

            def log_message(self, *args: object) -> None:
                """Logs nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()
        self.version, self.paused = "default", False

    def hang(self) -> None:
        """Accepts connections, but answers no request until `resume`, as a process after SIGSTOP."""
        self._runs.clear()

    def resume(self) -> None:
        """Answers again, also the requests that came in the meantime."""
        self._runs.set()

    def _answer(self, request: BaseHTTPRequestHandler, body: str) -> None:
        self._runs.wait()
        if urlsplit(request.path).path == "/gristmill/publish" and self.refusal is None:
            asked = json.loads(body)
            self.paused = True
            time.sleep(self.load_seconds)
            self.loads.append(asked["path"])
            self.version, self.paused = asked["version"], False
        status, answer = 200, {"is_paused": self.paused, "weight_version": self.version, "data": [{"id": "tiny"}]}
        if request.command == "POST" and self.refusal is not None:
            status, answer = self.refusal[0], {"error": {"code": self.refusal[1], "message": "no", "remedy": ""}}
        told = b"<html>" if self.broken else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(told)))
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(told)
