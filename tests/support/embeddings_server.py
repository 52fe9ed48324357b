"""A small embeddings server whose vectors can be computed by hand, and which fails on request."""

from __future__ import annotations

from typing import Any

from tests.support.http_server import Answer, HttpServer, Request


def letters(text: str) -> list[float]:
    """Returns how often each of a to z is in the text."""
    return [float(text.count(chr(letter))) for letter in range(ord("a"), ord("z") + 1)]


class LettersServer(HttpServer):
    """Answers POST /v1/embeddings: a text's vector is its letters."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.authorization: list[str | None] = []
        self.replies: list[tuple[int, Any]] = []
        """Answers to send instead, one per request, until they are used up."""
        super().__init__(self._answer)

    def _answer(self, request: Request) -> Answer:
        self.asked.append({"path": request.path, **request.json})
        self.authorization.append(request.headers["Authorization"])
        data = [{"index": index, "embedding": letters(text)} for index, text in enumerate(request.json["input"])]
        # In reverse order, because clients sort by the index.
        return Answer(*self.replies.pop(0)) if self.replies else Answer(200, {"data": data[::-1]})
