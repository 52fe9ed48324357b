"""The commands of the environment: what each is for, the flags of its own, and where its work begins.

A command's own flags are the fields of a settings model and are checked together with the run's. They
say how the command works and are recorded nowhere; what makes a run the run it is belongs into EnvConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console

from gristmill.settings import Settings
from gristmill_env.evaluation.options import EvaluateOptions
from gristmill_env.launch import Launch, NoOptions

Options = TypeVar("Options", bound=Settings)


@dataclass(frozen=True)
class Order(Generic[Options]):
    """What one process was told to do."""

    launch: Launch
    """The run's settings."""
    options: Options
    """The command's own."""
    environ: Mapping[str, str]
    console: Console
    """Standard output, for what the user asked to see. What happens on the way goes to the log."""


@dataclass(frozen=True)
class Command(Generic[Options]):
    """One word of the command line."""

    summary: str
    """For --help."""
    options: type[Options]
    work: Callable[[Order[Options]], Coroutine[Any, Any, None]]
    """Imports what it needs when it is called: --help and mistyped flags need not wait for transformers."""
    tells_all: bool = False
    """Whether the log has every event, and not only what is wrong."""


def _serve(order: Order[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.serve import serve

    return serve(order.launch, order.environ)


def _evaluate(order: Order[EvaluateOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.evaluation.command import run_evaluate

    return run_evaluate(order.launch, order.options, order.console)


def _try(order: Order[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.try_items import try_items

    return try_items(order.launch, order.console)


COMMANDS: Mapping[str, Command[Any]] = {
    "serve": Command("feeds a training run (the default)", NoOptions, _serve, tells_all=True),
    "evaluate": Command("measures a model on a fixed set of prompts, or compares two", EvaluateOptions, _evaluate),
    "try": Command("shows five items, from prompt to score; needs only a model server", NoOptions, _try),
}
