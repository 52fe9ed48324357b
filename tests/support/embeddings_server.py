"""A small embeddings server whose vectors can be computed by hand, and which fails on request."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def letters(text: str) -> list[float]:
    """Returns how often each of a to z is in the text."""
    return [float(text.count(chr(letter))) for letter in range(ord("a"), ord("z") + 1)]


class LettersServer:
    """Answers POST /v1/embeddings: a text's vector is its letters."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.authorization: list[str | None] = []
        self.replies: list[tuple[int, Any]] = []
        """Answers to send instead, one per request, until they are used up."""
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.asked.append({"path": self.path, **body})
                served.authorization.append(self.headers["Authorization"])
                data = [{"index": index, "embedding": letters(text)} for index, text in enumerate(body["input"])]
                # In reverse order, because clients sort by the index.
                status, reply = served.replies.pop(0) if served.replies else (200, {"data": data[::-1]})
                raw = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
