"""The command line: `python -m gristmill_env [COMMAND] [--config NAME|PATH] [flags]`; see `commands`.

Exit code 0: the run is finished, or the command is done. Exit code 1: an error, reported in one line. Exit codes 130
and 143: stopped by Ctrl-C or SIGTERM before the run's end, with all permits given back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console

from gristmill import ConfigError, GristmillError
from gristmill.errors import FileError
from gristmill.internal.check import Check
from gristmill.internal.logs import setup as set_up_logging
from gristmill.internal.settings import did_you_mean
from gristmill.internal.signals import stop_on_hangup
from gristmill_env.commands import COMMANDS, Invocation
from gristmill_env.run_settings import RunSettings
from gristmill_env.running.daemon import DaemonExecutor

logger = logging.getLogger("gristmill_env")


def main() -> int:
    """Entry point of `python -m gristmill_env` and `gristmill-env`."""
    return run_command(sys.argv[1:], dict(os.environ))


def run_command(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    prog: str = "gristmill-env",
    around: Callable[[str, RunSettings], AbstractContextManager[Iterable[Check]]] = lambda name, run: nullcontext(()),
) -> int:
    """Runs one command and returns its exit code. `prog`: the name of the program in --help.

    `around`: returns the context of the work of a command, by its name and settings. Its value has further checks for
    the command `check`, which are made when `check` iterates over them.
    """
    name, flags = "serve", list(arguments)
    if flags and not flags[0].startswith("-"):
        name = flags.pop(0)
    command = COMMANDS.get(name)
    set_up_logging("env", logging.INFO if command is None or command.tells_all else logging.WARNING)
    try:
        if command is None:
            raise ConfigError(
                "unknown_command",
                f"no command '{name}'; there are {', '.join(COMMANDS)}.{did_you_mean(name, COMMANDS)}",
                name=name,
                known=list(COMMANDS),
            )
        if command.takes and flags and not flags[0].startswith("-"):
            flags = [f"--{command.takes}", *flags]
        run, options = RunSettings.read_with(command.options, flags, environ, f"{prog} {name}", _about())
        with around(name, run) as more:
            return asyncio.run(until_signal(command.work(Invocation(run, options, environ, Console(), more))))
    except (GristmillError, OSError) as error:
        reported = FileError.of(error) if isinstance(error, OSError) else error
        for text in reported.report().splitlines():
            logger.error("%s", text)
        return 1


def _about() -> str:
    commands = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return (
        f"commands:\n{commands}\n\n--config NAME|PATH is the run's YAML. Flags override it, and so does "
        "--set KEY=VALUE,\nwhich takes each key of the YAML: --set trainer.learning_rate=1e-5. --model is --model_name."
    )


async def until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Runs `work`. SIGTERM, SIGINT and SIGHUP cancel it, so that it can stop cleanly. A second one ends the process."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(DaemonExecutor())
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()
        for known in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(known)
            signal.signal(known, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    stop_on_hangup()
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        logger.info("stopped by %s before the run's end; start again to continue", received[0].name)
        return 128 + received[0]
    return 0
