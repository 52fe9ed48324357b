"""The commands of `gristmill`. Each gets the parsed command line and returns the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gristmill_view
from gristmill.deployment import env_file
from gristmill.errors import ApiUnreachable, ConfigError, GristmillError
from gristmill.folders import REPORT_FILE, RunFolder, list_runs
from gristmill.internal.check import Check
from gristmill_cli import doctor
from gristmill_cli.local.options import is_clone, parse_port, read_dotenv, read_options
from gristmill_cli.page import can_open_page, serve_page
from gristmill_cli.slurm import Job, Nodes, submit
from gristmill_cli.status import Place
from gristmill_view.facts import read_files
from gristmill_view.overview import overview
from gristmill_view.pack import SUFFIX, named_run, write_pack
from gristmill_view.pack import unpack as unpack_run
from gristmill_view.queries import conditions
from gristmill_view.report import write_report
from gristmill_view.run_source import RunSource
from gristmill_view.samples import one_line
from gristmill_view.secrets import secrets_of, short_secrets
from gristmill_view.source import RolloutQuery

ENVIRONMENT = {
    "check": "look at prompts, answers and rewards; needs no model",
    "try": "show five items, from prompt to score",
    "process": "write groups to JSONL and a page; needs a model server",
    "evaluate": "measure a model on a fixed set of prompts",
    "compare": "compare two evaluations",
    "replay": "score saved groups again, with other rewards",
    "sft": "write the best completions of saved groups for SFT",
    "dpo": "write pairs of saved completions for DPO",
    "close": "end a run that is not to be continued",
}
"""Commands of the package gristmill_env, except `serve` and `proxy`, which are services."""
USES_MODEL = ("check", "try", "process", "evaluate")
"""Commands of the environment that use a model server which `gristmill model start` has started."""
TRAIN_AGAIN = {
    "retrain": "train a run again from its archive",
    "bisect": "find the sequence that causes the value of a metric",
    "fork": "continue a run from one of its steps, as a new run",
}
"""Commands of the package gristmill_trainer."""


# --- runs ------------------------------------------------------------------------------------------------------
def runs(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Lists the runs of the API and of the folders."""
    listed: dict[str, dict[str, Any]] = {}
    client = place.client()
    try:
        for record in client.runs():
            progress = client.progress(record.run_id)
            listed[record.run_id] = {
                "run": record.run_id, "state": str(record.state), "step": progress.step, "steps": progress.total,
                "reward": progress.reward, "live": True,
            }  # fmt: skip
    except ApiUnreachable:
        print(f"no API answers at {place.api}; runs in folders:", file=sys.stderr)
    for folder in list_runs(place.roots):
        if folder.run_id not in listed:
            listed[folder.run_id] = _run_of_files(folder.run_id, place)
    if options.json:
        print(json.dumps(list(listed.values())))
        return 0
    rows = [
        {**row, "step": row["step"] if row["steps"] is None else f"{row['step']}/{row['steps']}"}
        for row in listed.values()
    ]
    _say_table(console, ["run", "state", "step", "reward", "live"], rows)
    return 0


def _run_of_files(run_id: str, place: Place) -> dict[str, Any]:
    """Returns the line of a run. A damaged run does not hide the others."""
    line: dict[str, Any] = {"run": run_id, "state": "unreadable", "step": None, "steps": None, "reward": None}
    try:
        summary = overview(read_files(run_id, place.roots))
        line |= {"state": summary.state, "step": summary.step, "steps": summary.steps, "reward": summary.reward}
    except Exception as error:  # noqa: BLE001  whatever is in a run's files, the other runs are listed
        text = f"warning: the files of run {run_id} cannot be read: {type(error).__name__}: {error}"
        print(text, file=sys.stderr)
    return {**line, "live": False}


# --- rollouts and sql ------------------------------------------------------------------------------------------
_COLUMNS = (
    "step", "group_id", "sequence", "rollout", "branch", "env_id", "row", "index", "reward", "finish_reason", "outcome",
    "outcome_reason", "error", "completion",
)  # fmt: skip


def selected(options: argparse.Namespace) -> str:
    """Returns the SQL condition of the filters of `rollouts`, which are those of the page. Raises ConfigError."""
    first: str | None = None
    last: str | None = None
    if options.step:
        steps = re.fullmatch(r"(\d+)(?:-(\d+))?", options.step, re.ASCII)
        if steps is None:
            raise _invalid("--step", options.step, "a step, or two steps such as 10-20")
        first, last = steps[1], steps[2] or steps[1]
        if int(first) > int(last):
            raise _invalid("--step", options.step, "a range from the lower to the higher step")
    for flag, bound in (("--reward-min", options.reward_min), ("--reward-max", options.reward_max)):
        if bound is not None and not math.isfinite(bound):
            raise _invalid(flag, str(bound), "a finite number")
    queries = [
        RolloutQuery(
            step_from=None if first is None else int(first), step_to=None if last is None else int(last),
            group=options.group, env=options.env, outcome=options.outcome, finish_reason=options.finish_reason,
            reward_min=options.reward_min, reward_max=options.reward_max, text=options.text,
        )
    ]  # fmt: skip
    for part in options.part or ():
        name, _, text = part.rpartition("=")
        try:
            value = float(text)
        except ValueError as error:
            raise _invalid("--part", part, "NAME=NUMBER") from error
        if not name or not math.isfinite(value):
            raise _invalid("--part", part, "NAME=NUMBER")
        queries.append(RolloutQuery(part=name, part_min=value, part_max=value))
    return " AND ".join(map(conditions, queries))


def _invalid(flag: str, value: str, wanted: str) -> ConfigError:
    return ConfigError("invalid_flag", f"command line: {flag} {value!r} is not {wanted}", flag=flag, value=value)


def rollouts(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Prints single completions."""
    if options.limit < 1:
        raise _invalid("--limit", str(options.limit), "a number of rows, at least 1")
    columns = "*" if options.json else ", ".join(_COLUMNS)
    order = f"{options.order} {'ASC' if options.ascending else 'DESC'} NULLS LAST, group_id, sequence"
    query = f"SELECT {columns} FROM rollouts WHERE {selected(options)} ORDER BY {order} LIMIT {options.limit + 1:d}"
    found = _query(_run_folder(options.run, place), query)
    _say_rows(options, console, found[: options.limit])
    if len(found) > options.limit:
        print(f"these are the first {options.limit} rows; --limit N shows more", file=sys.stderr)
    return 0


def sql(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Prints the answer to a query over the tables `rollouts` and `steps` of a run."""
    _say_rows(options, console, _query(_run_folder(options.run, place), options.query))
    return 0


def _query(folder: RunFolder, query: str) -> list[dict[str, Any]]:
    table = gristmill_view.sql(folder, query)
    return [{name: _unpaired(value) for name, value in row.items()} for row in table.to_pylist()]


def _unpaired(value: Any) -> Any:
    """Returns the dict of a map column, which Arrow returns as a list of pairs. Maps with lists as keys stay pairs."""
    pairs = isinstance(value, list) and value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return dict(value) if pairs and all(isinstance(key, Hashable) for key, _ in value) else value


def _say_rows(options: argparse.Namespace, console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    if options.json:
        for row in rows:  # NaN and infinity become null, because JSON has no words for them.
            print(msgspec.json.encode(row, enc_hook=str).decode())
    elif not rows:
        console.print("no rows")
    else:
        _say_table(console, list(rows[0]), rows)


def _run_folder(run: str | None, place: Place) -> RunFolder:
    """Returns a run by its folder, its pack or its id, or the run that was written last."""
    if run is not None:
        return named_run(run, place.roots)
    newest = next(iter(list_runs(place.roots)), None)
    if newest is None:
        raise GristmillError("no_run", f"no folder of a run is in {', '.join(map(str, place.roots))}")
    return newest


# --- view, report, pack, doctor --------------------------------------------------------------------------------------
def view(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Serves the page over the files of runs, without an API."""
    runs_named = [named_run(run, place.roots) for run in options.run]
    roots = tuple(dict.fromkeys(root for run in runs_named for root in run.roots)) or place.roots
    for run in runs_named:
        folders = set(RunFolder(run.run_id, roots).folders)
        if folders != set(run.folders):
            raise GristmillError(
                "run_ambiguous",
                f"the folders {', '.join(sorted(map(str, folders)))} have the same run id, and the page would mix "
                "their files; give one of them another name, or serve each by its own `gristmill view`",
                run=run.run_id,
            )
    first = f"/view/{runs_named[0].run_id}" if runs_named else "/view"
    serve_page(roots, first, console, options.host, options.port)
    return 0


def report(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Writes a self-contained HTML file about a run."""
    run = _run_folder(options.run, place)
    path: Path = options.out or run.folders[0] / REPORT_FILE
    source = RunSource(run.roots)
    try:
        asyncio.run(write_report(source, run.run_id, path))
    except OSError as error:
        raise GristmillError("report_not_written", f"{path}: {error.strerror}; name another file with --out") from error
    finally:
        source.close()
    console.print(Text(str(path)), soft_wrap=True)
    return 0


def pack(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Writes one file with a run: settings, rollouts, metrics, evaluations and logs. Secrets are masked."""
    run = _run_folder(options.run, place)
    path: Path = options.out or Path(f"{run.run_id}{SUFFIX}")
    contents = write_pack(
        path, run.run_id, run.folders, secrets=secrets_of(os.environ, Path.cwd()), tokenizer=run.tokenizer(),
        include=options.include,
    )  # fmt: skip
    if options.json:
        print(msgspec.json.encode({"path": str(path), **msgspec.to_builtins(contents)}).decode())
        return 0
    redacted = sum(file.redacted for file in contents.files)
    console.print(Text(f"{path}: {len(contents.files)} files, {_megabytes(path.stat().st_size)}"), soft_wrap=True)
    if redacted:
        console.print(Text(f"secrets were masked in {redacted} files"), soft_wrap=True)
    if contents.left_out:
        parts = ", ".join(f"{name} ({_megabytes(size)})" for name, size in contents.left_out.items())
        console.print(Text(f"left out: {parts}"), soft_wrap=True)
    if short := short_secrets(os.environ, Path.cwd()):
        text = f"not searched, because they have fewer than 8 characters: {', '.join(short)}"
        console.print(Text(text), soft_wrap=True)
    return 0


def unpack(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Checks the hashes of a packed run, and writes its folder."""
    console.print(Text(str(unpack_run(options.file, place.roots[0], options.max_size))), soft_wrap=True)
    return 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def examine(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Checks this machine; with --config also what a run needs before it starts; with RUN the files of a run."""
    environ = {**os.environ, **env_file(Path.cwd(), os.environ)}
    if options.run is not None:
        results = doctor.after_run(_run_folder(options.run, place), options.config, environ)
    else:
        results = iter(doctor.checks(doctor.examine(environ, place.roots[0])))
        if options.config is not None:
            results = itertools.chain(results, doctor.before_run(options.config, environ))
    checks = []
    for check in results:  # One at a time, because some checks take seconds.
        checks.append(check)
        if not options.json:
            _say_check(console, check)
    failed = any(check.state == "failed" for check in checks)
    if options.json:
        print(msgspec.json.encode({"ok": not failed, "checks": checks}).decode())
    elif lines := list(dict.fromkeys(line for check in checks for line in check.env)):
        console.print("\nlines for .env:", style="dim")
        for line in lines:
            console.print(Text(line), soft_wrap=True)
    return 1 if failed else 0


def _say_check(console: Console, check: Check) -> None:
    style = {"ok": "green", "warning": "yellow", "failed": "red"}[check.state]
    name = (f"{check.name:<17} ", "bold")
    code = (f" [{check.code}]" if check.code else "", "dim")
    console.print(Text.assemble((f"{check.state:<8}", style), name, check.text, code), soft_wrap=True)


def slurm(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Writes the batch script of a training, and submits it. --dry-run prints the script only."""
    nodes = Nodes(
        model=options.model_nodes,
        trainer=options.trainer_nodes,
        gpus=options.gpus_per_node,
        servers=options.servers_per_node,
        env_workers=options.env_workers,
    )
    environ = {**os.environ, **({"GRISTMILL_RUNS_DIR": str(options.runs[0])} if options.runs else {})}
    with _needs_packages("slurm"):
        job = Job.read(
            options.config, nodes, options.model or environ.get("MODEL") or "tiny", environ,
            assignments=options.set, time=options.time, partition=options.partition,
            api_port=parse_port("api_port", "--api-port ", options.api_port), image=options.image,
        )  # fmt: skip
    if options.dry_run:
        print(job.script(), end="")
        return 0
    number = submit(job)
    console.print(Text(f"job {number}; its script, output and tokens are in {job.state}"), soft_wrap=True)
    return 0


@contextlib.contextmanager
def _needs_packages(name: str) -> Iterator[None]:
    """Converts the error of an import within the block. `name`: of the command."""
    try:
        yield
    except ImportError as error:
        raise GristmillError(
            "package_missing",
            f"`gristmill {name}` needs the package {error.name}, which is not installed in this Python: run it in the "
            "environment of `make setup`, as .venv/bin/gristmill in a clone",
            package=error.name or "",
        ) from error


def run(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Trains on this machine. Needs the packages of all services and .venv-model, as `make setup` installs them."""
    rest = [*(word for folder in options.runs or () for word in ("--runs_dir", str(folder))), *options.rest]
    read_dotenv()
    read_options(rest, "gristmill run")  # A wrong flag ends here, before imports that take a second.
    with _needs_packages(options.name):
        from gristmill_cli.local import launcher
    return launcher.main(rest)


def model(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Starts or stops a model server that stays: `run`, `try`, `process` and `evaluate` then begin at once, from the
    weights of its model. `try` needs none, because it starts one for itself."""
    with _needs_packages(options.name):
        from gristmill_cli.local import model_command
    return model_command.main(options)


def environment(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Runs a command of the environment's package."""
    with _needs_packages(options.name):
        from gristmill_env.cli import run_command
    given = {
        "GRISTMILL_API_URL": options.api,
        "GRISTMILL_API_TOKEN_FILE": options.token_file,
        "GRISTMILL_RUNS_DIR": options.runs[0] if options.runs else None,
    }
    environ = {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}
    if options.name not in USES_MODEL or not is_clone():
        return run_command([options.name, *options.rest], environ, "gristmill")
    with _needs_packages(options.name):
        from gristmill_cli.local import model_command
    if not environ.get("GRISTMILL_MODELS_DIR") and not Path(".gristmill/models").is_dir():
        environ["GRISTMILL_MODELS_DIR"] = str(model_command.STATE / "models")
    return run_command([options.name, *options.rest], environ, "gristmill", model_command.for_command)


def train_again(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Runs a command of the trainer's package, which needs torch."""
    with _needs_packages(options.name):
        from gristmill_trainer.replay import commands

    def show(roots: Sequence[Path], path: str) -> None:
        serve_page(roots, path, console, opens=True)

    page = show if sys.stdout.isatty() and can_open_page() else None
    here = commands.Here(
        place.roots, place.models_dir, place.api, place.token, lambda run: named_run(run, place.roots), page
    )
    return commands.main(options.name, options.rest, here)


def _say_table(console: Console, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    names = list(columns)
    if not console.is_terminal:  # for other programs: one line per row, tabs between the columns
        print("\t".join(names))
        for row in rows:
            print("\t".join(_cell(row.get(name)) for name in names))
        return
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(Text(one_line(name, 40)))
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name), 80)) for name in names))
    console.print(table)


def _cell(value: Any, longest: int = 4000) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return one_line(str(value), longest).replace("\t", " ")
