"""Replaces a vLLM that crashes, restarts with its first weights, or is slow: no real vLLM fails on request."""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

from tests.support.http_server import Answer, HttpServer, Request
from tests.support.ports import free_port


class ModelServerStandIn:
    """The endpoints of one server that the trainer calls. The server may be stopped and started on its port."""

    def __init__(self) -> None:
        self.version = "default"
        self.paused = False
        """Between the beginning and the end of a publication."""
        self.asleep = 0
        """Level of its sleep; 0: awake."""
        self.refusal: tuple[int, str] | None = None
        """Status and code of every answer to a publication."""
        self.broken = False
        """Answers with text that is not valid JSON."""
        self.begun: list[str] = []
        """Folders of the loads that have begun. They end in this order."""
        self.loads: list[str] = []
        """Folders of the loads that have ended."""
        self._order = threading.Condition()
        self._holds = False
        self._runs = threading.Event()
        self._runs.set()
        self._http: HttpServer | None = None
        self._port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._http = HttpServer(self._answer, ("127.0.0.1", self._port))

    def stop(self) -> None:
        assert self._http is not None
        self._http.close()
        self.version, self.paused, self.asleep = "default", False, 0

    def hold_loads(self) -> None:
        """Loads that begin do not end until `release_loads`."""
        self._holds = True

    def release_loads(self) -> None:
        with self._order:
            self._holds = False
            self._order.notify_all()

    def hang(self) -> None:
        """Accepts connections, but answers no request until `resume`, as a process after SIGSTOP."""
        self._runs.clear()

    def resume(self) -> None:
        """Answers again, also the requests that came in the meantime."""
        self._runs.set()

    def _answer(self, request: Request) -> Answer:
        self._runs.wait()
        if urlsplit(request.path).path == "/gristmill/publish" and self.refusal is None:
            asked = request.json
            with self._order:
                turn = len(self.begun)
                self.begun.append(asked["path"])
                self.paused = True
                self._order.wait_for(lambda: not self._holds and len(self.loads) == turn)
                self.loads.append(asked["path"])
                self.version, self.paused = asked["version"], len(self.begun) > len(self.loads)
                self.asleep = 0
                self._order.notify_all()
        elif urlsplit(request.path).path == "/gristmill/sleep" and self.refusal is None:
            self.asleep = request.json["level"]
        status, answer = 200, {"is_paused": self.paused, "weight_version": self.version, "data": [{"id": "tiny"}]}
        if request.method == "POST" and self.refusal is not None:
            status, answer = self.refusal[0], {"error": {"code": self.refusal[1], "message": "no", "remedy": ""}}
        return Answer(status, b"<html>" if self.broken else answer, {"Connection": "close"})
