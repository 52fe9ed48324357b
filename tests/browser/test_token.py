"""With tokens on, the page asks for one, and keeps it out of addresses and of storage that outlives the tab."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.browser.conftest import Server
from tests.support.chromium import Seen
from tests.support.demo_runs import DemoSource

from gristmill_view.app import create_app

TOKEN = "a-token-of-the-role-env-with-many-letters"


class Guarded:
    """Answers 401 to data without the token, with the challenges of the API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/view/api/"):
            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            if given != f"Bearer {TOKEN}":
                challenge = {"WWW-Authenticate": 'Bearer realm="gristmill", Basic realm="gristmill"'}
                body = {"error": {"code": "unauthorized", "message": "A token is needed.", "remedy": "Send one."}}
                await JSONResponse(body, 401, challenge)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@pytest.fixture
def url() -> Iterator[str]:
    server = Server(Guarded(create_app(DemoSource())))
    yield server.url
    server.stop()


def test_page_asks_for_a_token_and_keeps_it_in_the_tab(page: Any, url: str, seen: Seen) -> None:
    page.goto(url + "/view/training")
    field = page.locator("dialog.token input")
    field.wait_for()
    field.fill("wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog.token:has-text('does not know')")
    page.locator("dialog.token input").fill(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector(".connection.live")
    assert page.locator("dialog").count() == 0
    assert TOKEN not in page.url
    assert not [asked for asked in seen.asked if TOKEN in asked]
    assert page.evaluate("() => JSON.stringify(localStorage)") == "{}"
    assert page.evaluate("() => document.cookie") == ""
    page.reload()
    page.wait_for_selector(".connection.live")
    other = page.context.new_page()
    other.goto(url + "/view/training")
    other.wait_for_selector("dialog.token")
    page.locator("text=Forget token").click()
    page.wait_for_selector("dialog.token")
    assert page.evaluate("() => sessionStorage.length") == 0
    page.wait_for_load_state("networkidle")
    seen.problems.clear()  # Chromium logs each status 401
