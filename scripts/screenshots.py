#!/usr/bin/env python3
"""Makes the screenshots in docs/images.

    PYTHONPATH=. .venv/bin/python scripts/screenshots.py --runs runs     the pictures of a real run, after `make local`
    PYTHONPATH=. .venv/bin/python scripts/screenshots.py                 the pictures of synthetic runs in the docs
    PYTHONPATH=. .venv/bin/python scripts/screenshots.py phone group     some of the pictures of synthetic runs

Needs Debian's package chromium (or CHROMIUM) and playwright from PyPI.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import sync_playwright
from tests.support.demo_runs import DemoSource

from gristmill_view.app import create_app
from gristmill_view.run_source import RunSource

ROOT = Path(__file__).parent.parent
PORT = 8497
ELAPSED_S = 180.0
"""Seconds for which the live run has trained."""
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 400, "height": 860}
SHOTS: dict[str, tuple[str, dict[str, int], str]] = {
    "training": ("/view/training", WIDE, "light"),
    "phone": ("/view/training", PHONE, "light"),
    "trouble": ("/view/crashed", WIDE, "light"),
    "step": ("/view/quickstart/step/24", WIDE, "light"),
    "group": ("/view/quickstart/group/g00000377?shade=sampler#s2t2", WIDE, "light"),
    "group-dark": ("/view/quickstart/group/g00000377?shade=sampler#s2t2", WIDE, "dark"),
    "group-phone": ("/view/quickstart/group/g00000377", PHONE, "dark"),
    "hostile": ("/view/hostile/group/g00000000", WIDE, "light"),
    "rollouts": ("/view/long/rollouts?reward_max=0.3&order=-completion_tokens", WIDE, "light"),
    "rollouts-phone": ("/view/quickstart/rollouts", PHONE, "light"),
    "compare": ("/view/compare?runs=quickstart,quickstart-lr3", WIDE, "light"),
    "long": ("/view/long", WIDE, "dark"),
    "runs": ("/view", WIDE, "light"),
}
"""Name of a file to path, size and theme."""
IN_DOCS = ("group", "compare")
OF_A_RUN = {"overview": ("/view/quickstart", WIDE, "light"), "overview-dark": ("/view/quickstart", WIDE, "dark")}
"""The pictures of a real quickstart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHOTS)}; default: the docs' pictures")
    parser.add_argument("--runs", type=Path, help="folder of the run `quickstart`, whose pictures are made")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ticks = itertools.chain([0.0], itertools.repeat(ELAPSED_S))
    # The live run of the synthetic runs does not advance, so that two screenshots are the same.
    source = RunSource([options.runs]) if options.runs else DemoSource(lambda: next(ticks))
    shots = OF_A_RUN if options.runs else {name: SHOTS[name] for name in options.names or IN_DOCS}
    server = uvicorn.Server(
        uvicorn.Config(create_app(source), port=PORT, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, shot in shots.items():
            _shoot(browser, name, shot, options.out / f"{name}.png")
        browser.close()
    server.should_exit = True
    thread.join(5)


def _shoot(browser: Any, name: str, shot: tuple[str, dict[str, int], str], path: Path) -> None:
    address, size, theme = shot
    context = browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce")
    page = context.new_page()
    page.on("console", lambda message: print(f"{name}: {message.type}: {message.text}"))
    page.on("pageerror", lambda error: print(f"{name}: {error}"))
    page.goto(f"http://127.0.0.1:{PORT}{address}")
    page.wait_for_selector("main:not([aria-busy])")
    page.wait_for_timeout(1500)
    page.screenshot(path=path)
    context.close()
    print(path)


if __name__ == "__main__":
    main()
