"""A server with synthetic runs, and a real Chromium (tests/support/chromium.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp
from tests.support.chromium import Seen, chromium, new_page
from tests.support.demo_runs import DemoSource
from tests.support.ports import free_port

from gristmill_view.app import create_app


class Server:
    """An ASGI application on 127.0.0.1, in a thread."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)

    def stop(self) -> None:
        if stopping := getattr(getattr(self._app, "state", None), "stopping", None):
            stopping.set()
        self._server.should_exit = True
        self._thread.join(10)


@dataclass
class Clock:
    """Seconds that a test moves on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Demo:
    """A server with the runs of `tests.support.demo_runs`."""

    url: str
    source: DemoSource
    clock: Clock


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser. It ends with the file, so that asyncio can run in the tests of other folders."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def demo() -> Iterator[Demo]:
    clock = Clock()
    source = DemoSource(clock)
    server = Server(create_app(source))
    yield Demo(server.url, source, clock)
    server.stop()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Any, seen: Seen, demo: Demo) -> Iterator[Any]:
    """A page, closed before the server of `demo` stops. Fails the test for an error in the console."""
    page = new_page(browser, seen)
    yield page
    page.context.close()
    assert seen.problems == []
