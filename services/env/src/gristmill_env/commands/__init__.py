"""The environment's commands: the purpose, the flags and the entry point of each.

A command's flags are the fields of a settings model and are checked together with the run's settings. The flags set
how the command works and are not recorded. Settings that define the run belong in EnvConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console

from gristmill.settings import Settings
from gristmill_env.commands.options import CloseOptions, DpoOptions, ProcessOptions, ReplayOptions, SftOptions
from gristmill_env.evaluation.options import EvaluateOptions
from gristmill_env.launch import Launch, NoOptions

Options = TypeVar("Options", bound=Settings)


@dataclass(frozen=True)
class Order(Generic[Options]):
    """The task of one process, from the command line."""

    launch: Launch
    """The run's settings."""
    options: Options
    """The command's flags."""
    environ: Mapping[str, str]
    console: Console
    """Standard output, for the results that the user asked to see. Events are logged instead."""


@dataclass(frozen=True)
class Command(Generic[Options]):
    """One word of the command line."""

    summary: str
    """For --help."""
    options: type[Options]
    work: Callable[[Order[Options]], Coroutine[Any, Any, None]]
    """Imports its dependencies when it is called, so that --help and mistyped flags do not wait for transformers."""
    takes: str = ""
    """The flag that a first word without dashes sets: `replay groups.jsonl` means `replay --saved groups.jsonl`."""
    tells_all: bool = False
    """Whether the log has every event, and not only problems."""


def _serve(order: Order[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.serve import serve

    return serve(order.launch, order.environ)


def _try(order: Order[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.try_items import try_items

    return try_items(order.launch, order.console)


def _process(order: Order[ProcessOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.process import process

    return process(order.launch, order.options, order.console)


def _check(order: Order[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.check import check

    return check(order.launch, order.console)


def _evaluate(order: Order[EvaluateOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.evaluation.command import run_evaluate

    return run_evaluate(order.launch, order.options, order.console)


def _replay(order: Order[ReplayOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.replay import replay

    return replay(order.launch, order.options, order.console)


def _sft(order: Order[SftOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.sft import sft

    return sft(order.launch, order.options, order.console)


def _dpo(order: Order[DpoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.dpo import dpo

    return dpo(order.launch, order.options, order.console)


def _close(order: Order[CloseOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.close import close

    return close(order.launch, order.options, order.console)


COMMANDS: Mapping[str, Command[Any]] = {
    "serve": Command("feeds a training run (the default)", NoOptions, _serve, tells_all=True),
    "try": Command("shows five items, from prompt to score; needs only a model server", NoOptions, _try),
    "check": Command("looks at prompts, answers and rewards; needs no model", NoOptions, _check),
    "process": Command("writes groups to JSONL and a page to read; needs no API", ProcessOptions, _process),
    "evaluate": Command("measures a model on a fixed set of prompts; needs no API", EvaluateOptions, _evaluate),
    "replay": Command("scores saved groups again, with other rewards", ReplayOptions, _replay, takes="saved"),
    "sft": Command("writes the best completions of saved groups for SFT", SftOptions, _sft, takes="saved"),
    "close": Command("ends a run that is not to be continued", CloseOptions, _close, takes="run"),
    "dpo": Command("writes pairs of saved completions for DPO", DpoOptions, _dpo, takes="saved"),
}
