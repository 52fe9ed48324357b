"""`gristmill model start|stop|status`, and the model server of `gristmill try`, `process` and `evaluate`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from gristmill import GristmillError
from gristmill.deployment import env_file
from gristmill.internal.check import Check
from gristmill.internal.signals import ending_on_signals
from gristmill_cli import doctor
from gristmill_cli.local.options import ROOT, read_dotenv, read_port, require_clone
from gristmill_cli.local.processes import LocalStackError, listens
from gristmill_cli.local.services import MODEL_COMMAND, MODEL_PYTHON, model_environ
from gristmill_cli.local.warm_server import WarmServer
from gristmill_env.run_settings import RunSettings
from gristmill_model.settings import named

STATE = ROOT / ".gristmill"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(options: argparse.Namespace) -> int:
    """Starts or stops the model server, or shows its state. Returns the exit code. Raises GristmillError."""
    require_clone("model")
    read_dotenv()
    port = read_port("model_port", os.environ, options.model_port)
    state = (options.state_dir or STATE).expanduser().absolute()
    server = WarmServer(state / "models", port)
    if options.action == "stop":
        stopped = server.stop()
        print(f"the model server at {server.url} is stopped" if stopped else f"no model server stays at {server.url}")
        return 0
    record = server.record()
    if options.action == "status":
        print(
            f"no model server stays at {server.url}"
            if record is None
            else f"{server.describe(record)}: {server.state()}"
        )
        return 0 if record is not None else 1
    model = options.model or os.environ.get("MODEL")
    if record is not None:
        with server.use(model, os.environ, _say, alone=False):
            print(f"{server.describe(record)} runs already")
        return 0
    _start(server, state, model or "tiny")
    return 0


def _start(server: WarmServer, state: Path, model: str) -> None:
    named(model)  # Raises ModelError before a process starts.
    if not MODEL_PYTHON.exists():
        raise LocalStackError("setup_missing", f"no {MODEL_PYTHON}: run `make setup` first", path=MODEL_PYTHON)
    _say(f"starting a model server with {model} at {server.url} (log: {server.log})")
    with ending_on_signals():
        record = server.start(MODEL_COMMAND, model_environ(state, model, server.port), model)
    _say(f"{server.describe(record)} answers")


@contextlib.contextmanager
def for_command(name: str, run: RunSettings) -> Iterator[Iterable[Check]]:
    """Uses the model server that stays on the port of the run's server, within the block. `name`: of the command.

    If no server stays and no server answers, `try` starts one and stops it afterwards. Yields the checks that `check`
    adds to its own. Raises GristmillError.
    """
    with contextlib.ExitStack() as using:
        unusable = []
        try:
            using.enter_context(_server(name, run))
        except GristmillError as error:
            if name != "check":
                raise
            unusable.append(Check("model server", "failed", str(error)))
        yield itertools.chain(unusable, doctor.beyond_check(run, os.environ)) if name == "check" else ()


@contextlib.contextmanager
def _server(name: str, run: RunSettings) -> Iterator[None]:
    url = urlsplit(run.config.server.base_url)
    if len(run.config.server_configs) > 1 or url.hostname not in _LOOPBACK or url.port is None:
        yield
        return
    server = WarmServer(run.deployment.models_dir.absolute(), url.port)
    environ = {**env_file(Path.cwd(), os.environ), **os.environ}
    model = run.config.server.model_name or environ.get("MODEL") or None
    started = server.record() is None
    may_start = name == "try" and run.config.startup_patience is None and MODEL_PYTHON.exists()
    if started and (not may_start or listens(url.port)):
        yield
        return
    if started:
        read_dotenv(shown=False)
        _start(server, server.models_dir.parent, model or "tiny")
    try:
        with (
            ending_on_signals() if started else contextlib.nullcontext(),
            server.use(model, environ, _say, alone=False),
        ):
            yield
    finally:
        if started:
            server.stop()
            _say("stopped the model server; `gristmill model start` starts one that stays for the next commands")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
