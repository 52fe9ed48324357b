"""Serves the page over the files of runs, for `gristmill view` and for a retraining."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import socket
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import gristmill_view
from gristmill.errors import GristmillError
from gristmill_view.run_source import RunSource


def serve_page(
    roots: Sequence[Path], path: str, console: Console, host: str = "127.0.0.1", port: int = 0, *, opens: bool = False
) -> None:
    """Serves the page until Ctrl-C. `path`: where a reader begins. `port`: 0 for a free one. `opens`: opens the page in
    the user's browser too."""
    with gristmill_view.needs_page():
        import uvicorn

        from gristmill_view.app import create_app
    source = RunSource(roots)
    with contextlib.closing(source), _listening(host, port) as listener:
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}{path}"
        console.print(Text(f"the page: {url}   Ctrl-C ends it"), soft_wrap=True)
        if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
            warning = (
                f"THE PAGE IS OPEN TO THE NETWORK: it listens at {host} without tokens, so any client that reaches "
                "that port can read all prompts and completions. Leave out --host, or use ssh -L."
            )
            console.print(Text(warning, "bold red"), soft_wrap=True)
        if opens:  # A browser in the terminal returns when its user leaves it.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        server = uvicorn.Server(uvicorn.Config(create_app(source), log_level="warning"))
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise GristmillError(
            "address_unusable", f"cannot listen on {host}:{port}: {error}; name another --host or --port", port=port
        ) from error


def can_open_page() -> bool:
    """Whether there is a browser, and the packages of the page are installed. A container has no browser."""
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return all(importlib.util.find_spec(name) is not None for name in ("starlette", "uvicorn"))
