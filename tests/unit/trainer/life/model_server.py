"""Stands in for a vLLM that dies, comes back with its first weights, or is slow: no real one fails on command."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class ModelServerStandIn:
    """The developer endpoints of one server, by their names alone. It may be stopped and started on its port."""

    def __init__(self) -> None:
        self.version = "default"
        self.paused = False
        self.load_seconds = 0.0
        self.broken = False
        """Answers with what is no JSON."""
        self.loads: list[str] = []
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
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()
        self.version, self.paused = "default", False

    def _answer(self, request: BaseHTTPRequestHandler, body: str) -> None:
        path = urlsplit(request.path).path
        answer: dict[str, object] = {}
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/collective_rpc":
            time.sleep(self.load_seconds)
            self.loads.append(json.loads(body)["kwargs"]["weights_path"])
        elif path == "/update_weight_version":
            self.version = json.loads(body)["new_version"]
        answer = {"success": True, "is_paused": self.paused, "weight_version": self.version}
        told = b"<html>" if self.broken else json.dumps(answer).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(told)))
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(told)
