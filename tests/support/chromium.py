"""A real Chromium that Playwright drives: Debian's package chromium, or the one that CHROMIUM names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import sync_playwright


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser, Playwright's `Browser`. Skips the test without Chromium; in CI the test fails.

    Playwright's event loop runs in the thread until the block ends, so the thread cannot call asyncio.run meanwhile.
    """
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and os.environ.get("CI") != "true":
        pytest.skip("no Chromium: scripts/prepare_package.sh chromium installs it")
    assert found is not None, "no Chromium: scripts/prepare_package.sh chromium installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


_NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
"""Chromium ends all requests when this machine gets or loses a network interface, as with each of Docker's
containers. The page sends them again."""


@dataclass
class Seen:
    """The problems that a page reported, and every address that it requested."""

    problems: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions."""
    asked: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Requests without an answer, and answers with an error status."""

    def watch(self, page: Any) -> None:
        """Notes what `page` reports from now on."""
        page.on("console", lambda message: self._console(message))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("requestfailed", lambda request: self._lost(request))
        page.on("response", lambda answer: self._answer(answer))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and _NETWORK_CHANGED not in message.text:
            self.problems.append(message.text)

    def _lost(self, request: Any) -> None:
        if request.failure != _NETWORK_CHANGED:
            self.failed.append(f"{request.failure} {request.url}")

    def _answer(self, answer: Any) -> None:
        if answer.status >= 400:
            self.failed.append(f"{answer.status} {answer.url}")


def new_page(browser: Any, seen: Seen) -> Any:
    """Opens a page of 1280 × 900 in a separate context. Close its context."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    seen.watch(page)
    return page


def settled(page: Any) -> None:
    """Waits until the page shows its view and the curves, and loads no more: start.js loads a page again if one of its
    files did not arrive, as while Docker changes the machine's network."""
    page.wait_for_function("() => document.readyState === 'complete' && !sessionStorage.getItem('gristmill-loads')")
    page.wait_for_selector("main:not([aria-busy])")
    page.wait_for_function("() => !document.querySelector('main .waiting .plot, main [aria-busy]')")


def fact(page: Any, name: str) -> str:
    """Returns a figure at the top of the overview, such as "reward"."""
    return str(page.locator(f".facts div:has(dt:text-is('{name}')) b").inner_text())
