"""The environment's commands: the purpose, the flags and the entry point of each.

A command's flags are the fields of a settings model and are checked together with the run's settings. The flags set
how the command works and are not recorded. Settings that define the run belong in EnvConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import Field
from rich.console import Console

from gristmill.internal.check import Check
from gristmill.internal.settings import Settings
from gristmill_env.run_settings import NoOptions, RunSettings

Options = TypeVar("Options", bound=Settings)


class ProcessOptions(Settings):
    """Flags of `process`."""

    groups: int = Field(default=20, ge=1)
    """Rows to process, from the first of the run's order on; a group each."""

    out: Path | None = None
    """The output: a .jsonl file, or a folder for groups.jsonl. The page has the same name, with .html. Groups that the
    file already contains are kept and not made again. Unset: runs/<run id>/groups.jsonl."""


class EvaluateOptions(Settings):
    """Flags of `evaluate`. The run's settings (dataset.eval_*) define the evaluation: serve measures the same."""

    out: Path | None = None
    """Folder for the results. Unset: a new one, named by the time, in the run's evaluations/."""

    only: str | None = None
    """Name of one evaluation, of a run with several. Unset: all, one after the other."""

    resume: bool = False
    """Go on with the unfinished evaluation in --out, or else the latest of the run: only what is missing is done."""

    compare: list[Path] = Field(default_factory=list, max_length=2)
    """Folders of evaluations. One: evaluate, then compare with it. Two: compare them, and evaluate nothing."""


class CompareOptions(Settings):
    """Flags of `compare`, which does the same as `evaluate --compare A B`."""

    evaluations: list[Path] = Field(min_length=2, max_length=2)
    """Folders of the two evaluations."""

    out: Path | None = None
    """Folder for comparison.json. Unset: the comparison is only shown."""


class CloseOptions(Settings):
    """Flags of `close`."""

    run: str
    """Id of the run to end."""


class ProxyOptions(Settings):
    """Flags of `proxy`."""

    listen: str | None = None
    """HOST:PORT. Whoever reaches the port can use the model, without a token. Unset: GRISTMILL_GATEWAY_ADDRESS, which
    Compose sets, or 127.0.0.1:9100."""


class SavedOptions(Settings):
    """The flag that names saved groups."""

    saved: Path
    """Groups: a file of process or serve, one of Atropos, an evaluation's folder, or a run's folder
    (runs/quickstart)."""


class ReplayOptions(SavedOptions):
    """Flags of `replay`."""

    out: Path | None = None
    """Where the groups with their new scores go, as .jsonl. Unset: nowhere, the comparison is only shown."""


class SftOptions(SavedOptions):
    """Flags of `sft`."""

    out: Path
    """File to write, .jsonl."""

    top_n: int = Field(default=1, ge=1)
    """Most completions to take of a group, the best first."""

    min_score: float | None = None
    """Completions that score less are left out. Unset: those that score 0 or less."""


class DpoOptions(SavedOptions):
    """Flags of `dpo`."""

    out: Path
    """File to write, .jsonl."""

    min_difference: float = Field(default=0.0, ge=0)
    """Pairs whose scores differ by less are left out; so are ties, always."""

    pairs: int = Field(default=1, ge=1)
    """Most pairs to take of a group, those that differ most first."""


@dataclass(frozen=True)
class Invocation(Generic[Options]):
    """The task of one process, from the command line."""

    run: RunSettings
    """The run's settings."""
    options: Options
    """The command's flags."""
    environ: Mapping[str, str]
    console: Console
    """Standard output, for the results that the user asked to see. Events are logged instead."""
    more: Iterable[Check] = ()
    """Checks of other services, for `check`. Iterating makes them, and must not block an event loop."""


@dataclass(frozen=True)
class Command(Generic[Options]):
    """One word of the command line."""

    summary: str
    """For --help."""
    options: type[Options]
    work: Callable[[Invocation[Options]], Coroutine[Any, Any, None]]
    """Imports its dependencies when it is called, so that --help and mistyped flags do not wait for transformers."""
    takes: str = ""
    """The flag that a first word without dashes sets: `replay groups.jsonl` means `replay --saved groups.jsonl`."""
    tells_all: bool = False
    """Whether the log has every event, and not only problems."""


def _serve(call: Invocation[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.serve import serve

    return serve(call.run, call.environ)


def _try(call: Invocation[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.try_items import try_items

    return try_items(call.run, call.console)


def _process(call: Invocation[ProcessOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.process import process

    return process(call.run, call.options, call.console)


def _check(call: Invocation[NoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.check import check

    return check(call.run, call.console, call.more)


def _evaluate(call: Invocation[EvaluateOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.evaluate import run_evaluate

    return run_evaluate(call.run, call.options, call.console)


def _compare(call: Invocation[CompareOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.evaluate import run_evaluate

    options = EvaluateOptions(compare=call.options.evaluations, out=call.options.out)
    return run_evaluate(call.run, options, call.console)


def _replay(call: Invocation[ReplayOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.replay import replay

    return replay(call.run, call.options, call.console)


def _sft(call: Invocation[SftOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.export import sft

    return sft(call.run, call.options, call.console)


def _dpo(call: Invocation[DpoOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.export import dpo

    return dpo(call.run, call.options, call.console)


def _close(call: Invocation[CloseOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.close import close

    return close(call.run, call.options, call.console)


def _proxy(call: Invocation[ProxyOptions]) -> Coroutine[Any, Any, None]:
    from gristmill_env.commands.proxy import proxy

    return proxy(call.run, call.options, call.environ)


COMMANDS: Mapping[str, Command[Any]] = {
    "serve": Command("feeds a training run (the default)", NoOptions, _serve, takes="config", tells_all=True),
    "try": Command(
        "shows five items, from prompt to score; needs only a model server", NoOptions, _try, takes="config"
    ),
    "check": Command("looks at prompts, answers and rewards; needs no model", NoOptions, _check, takes="config"),
    "process": Command(
        "writes groups to JSONL and a page to read; needs no API", ProcessOptions, _process, takes="config"
    ),
    "evaluate": Command(
        "measures a model on a fixed set of prompts; needs no API", EvaluateOptions, _evaluate, takes="config"
    ),
    "compare": Command("compares two evaluations", CompareOptions, _compare, takes="evaluations"),
    "replay": Command("scores saved groups again, with other rewards", ReplayOptions, _replay, takes="saved"),
    "sft": Command("writes the best completions of saved groups for SFT", SftOptions, _sft, takes="saved"),
    "close": Command("ends a run that is not to be continued", CloseOptions, _close, takes="run"),
    "dpo": Command("writes pairs of saved completions for DPO", DpoOptions, _dpo, takes="saved"),
    "proxy": Command(
        "serves Atropos' proxy of managed servers; needs a model server", ProxyOptions, _proxy, tells_all=True
    ),
}
