"""The console script `gristmill`: look at runs of any stack, from its API or from the files of a run.

gristmill status            what the run does now (--watch, --json)
gristmill tail              completions as they come
gristmill runs              all runs, of the API and in the folders
gristmill rollouts RUN      single completions, by filters
gristmill view [RUN]        the page, from the files of runs
gristmill report RUN        one HTML file about a run
gristmill sql "SELECT ..."  a query over a run's completions and steps
gristmill pack RUN          one file with a run, to view, query and retrain on another machine
gristmill unpack FILE       the run of such a file, as a folder
gristmill doctor [RUN]      checks of this machine, of a configuration (--config), or of a run's files
gristmill retrain RUN       trains a run again from its archive (needs the trainer's package)
gristmill bisect RUN        finds the sequence that causes the value of a metric
gristmill fork RUN          continues a run live from one of its steps, as a new run
gristmill slurm CONFIG      trains on the nodes of a Slurm cluster
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import ipaddress
import itertools
import json
import math
import os
import re
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.archive.pack import SUFFIX, named_run, write_pack
from gristmill.archive.pack import unpack as unpack_run
from gristmill.archive.secrets import secrets_of, short_secrets
from gristmill.check import Check
from gristmill.deployment import API_URL, MODEL_URL, Deployment, env_file
from gristmill.errors import ApiUnreachable, ConfigError, FileError, GristmillError
from gristmill.folders import REPORT_FILE, RunFolder, default_roots, list_runs
from gristmill.slurm import Job, Nodes, submit
from gristmill.view import doctor
from gristmill.view.facts import read_files
from gristmill.view.overview import overview
from gristmill.view.samples import one_line
from gristmill.view.status import Place, status, tail

TRAIN_AGAIN = {
    "retrain": "train a run again from its archive",
    "bisect": "find the sequence that causes the value of a metric",
    "fork": "continue a run from one of its steps, as a new run",
}
"""Commands of the package gristmill_trainer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command is not train_again:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    run: Callable[[argparse.Namespace, Place, Console], int] = options.command
    try:
        return run(options, _place(options), console)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GristmillError, OSError) as error:
        shown = FileError.of(error) if isinstance(error, OSError) else error
        print(f"error [{shown.code}]: {shown}", file=sys.stderr)  # noqa: T201 - the one clear line
        return 1


def _place(options: argparse.Namespace) -> Place:
    environ = dict(os.environ)
    if options.token_file:
        environ["GRISTMILL_API_TOKEN_FILE"] = str(options.token_file)
    deployment = Deployment.read(environ)
    return Place(
        api=options.api or deployment.api_url or API_URL,
        token=deployment.api_token,
        roots=tuple(options.runs or default_roots()),
        models_dir=deployment.models_dir,
        model_url=deployment.model_url or MODEL_URL,
        model_named=deployment.model_url is not None,
    )


# --- runs ------------------------------------------------------------------------------------------------------
def runs(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Lists the runs of the API and of the folders."""
    found: dict[str, dict[str, Any]] = {}
    client = place.client()
    try:
        for record in client.runs():
            progress = client.progress(record.run_id)
            found[record.run_id] = {
                "run": record.run_id, "state": str(record.state), "step": progress.step, "steps": progress.total,
                "reward": progress.reward, "live": True,
            }  # fmt: skip
    except ApiUnreachable:
        console.print(Text(f"no API answers at {place.api}; runs in folders:", style="dim"), soft_wrap=True)
    for folder in list_runs(place.roots):
        if folder.run_id not in found:
            found[folder.run_id] = _run_of_files(folder.run_id, place)
    if options.json:
        print(json.dumps(list(found.values())))  # noqa: T201
        return 0
    rows = [
        {**row, "step": row["step"] if row["steps"] is None else f"{row['step']}/{row['steps']}"}
        for row in found.values()
    ]
    _say_table(console, ["run", "state", "step", "reward", "live"], rows)
    return 0


def _run_of_files(run_id: str, place: Place) -> dict[str, Any]:
    """Returns the line of a run. A damaged run does not hide the others."""
    line: dict[str, Any] = {"run": run_id, "state": "unreadable", "step": None, "steps": None, "reward": None}
    try:
        found = overview(read_files(run_id, place.roots))
        line |= {"state": found.state, "step": found.step, "steps": found.steps, "reward": found.reward}
    except Exception as error:  # noqa: BLE001  whatever is in a run's files, the other runs are listed
        text = f"warning: the files of run {run_id} cannot be read: {type(error).__name__}: {error}"
        print(text, file=sys.stderr)  # noqa: T201
    return {**line, "live": False}


# --- rollouts and sql ------------------------------------------------------------------------------------------
_COLUMNS = (
    "step", "group_id", "sequence", "rollout", "branch", "env_id", "row", "index", "reward", "finish_reason", "outcome",
    "outcome_reason", "error", "completion",
)  # fmt: skip
_ORDERS = ("step", "reward", "completion_tokens", "advantage", "staleness", "seconds", "row")


def where(options: argparse.Namespace) -> str:
    """Returns the SQL condition of the filters of `rollouts`."""
    conditions = []
    if options.step:
        steps = re.fullmatch(r"(\d+)(?:-(\d+))?", options.step, re.ASCII)
        if steps is None:
            raise _invalid("--step", options.step, "a step, or two steps such as 10-20")
        conditions.append(f"step BETWEEN {steps[1]} AND {steps[2] or steps[1]}")
    equal = {"group_id": options.group, "env_id": options.env, "finish_reason": options.finish_reason}
    equal |= {"outcome": options.outcome}
    conditions += [f"{column} = {_quoted(value)}" for column, value in equal.items() if value is not None]
    if options.reward_min is not None:
        conditions.append(f"reward >= {options.reward_min!r}")
    if options.reward_max is not None:
        conditions.append(f"reward <= {options.reward_max!r}")
    if options.text is not None:
        text = _quoted(options.text)
        conditions.append(f"(contains(lower(prompt), lower({text})) OR contains(lower(completion), lower({text})))")
    for part in options.part or ():
        name, _, text = part.rpartition("=")
        try:
            value = float(text)
        except ValueError as error:
            raise _invalid("--part", part, "NAME=NUMBER") from error
        if not name or not math.isfinite(value):
            raise _invalid("--part", part, "NAME=NUMBER")
        conditions.append(f"reward_parts[{_quoted(name)}] = {value!r}")
    return " AND ".join(conditions) or "true"


def _invalid(flag: str, value: str, wanted: str) -> ConfigError:
    return ConfigError("invalid_flag", f"command line: {flag} {value!r} is not {wanted}", flag=flag, value=value)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def rollouts(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Prints single completions."""
    columns = "*" if options.json else ", ".join(_COLUMNS)
    order = f"{options.order} {'ASC' if options.ascending else 'DESC'} NULLS LAST, group_id, sequence"
    query = f"SELECT {columns} FROM rollouts WHERE {where(options)} ORDER BY {order} LIMIT {options.limit:d}"
    _say_rows(options, console, _query(_run_folder(options.run, place), query))
    return 0


def sql(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Prints the answer to a query over the tables `rollouts` and `steps` of a run."""
    _say_rows(options, console, _query(_run_folder(options.run, place), options.query))
    return 0


def _query(folder: RunFolder, query: str) -> list[dict[str, Any]]:
    table = _imported("gristmill.view.rollouts").sql(folder, query)
    return [{name: _unpaired(value) for name, value in row.items()} for row in table.to_pylist()]


def _unpaired(value: Any) -> Any:
    """Returns the dict of a map column, which Arrow returns as a list of pairs."""
    pairs = isinstance(value, list) and value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return dict(value) if pairs else value


def _say_rows(options: argparse.Namespace, console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    if options.json:
        for row in rows:
            print(json.dumps(row, default=str))  # noqa: T201
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
    first = f"/view/{runs_named[0].run_id}" if runs_named else "/view"
    _serve_page(roots, first, console, options.host, options.port)
    return 0


def _serve_page(
    roots: Sequence[Path], path: str, console: Console, host: str = "127.0.0.1", port: int = 0, *, opens: bool = False
) -> None:
    """Serves the page until Ctrl-C. `path`: where a reader begins. `port`: 0 for a free one. `opens`: opens the page in
    the user's browser too."""
    uvicorn, app = _imported("uvicorn"), _imported("gristmill.view.app")
    source = _imported("gristmill.view.run_source").RunSource(roots)
    with contextlib.closing(source), _listening(host, port) as listener:
        url = f"http://{host}:{listener.getsockname()[1]}{path}"
        console.print(Text(f"the page: {url}   Ctrl-C ends it"), soft_wrap=True)
        if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
            warning = (
                f"THE PAGE IS OPEN TO THE NETWORK: it listens at {host} without tokens, so any client that reaches "
                "that port can read all prompts and completions. Leave out --host, or use ssh -L."
            )
            console.print(Text(warning, "bold red"), soft_wrap=True)
        if opens:  # A browser in the terminal returns when its user leaves it.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        server = uvicorn.Server(uvicorn.Config(app.create_app(source), log_level="warning"))
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise GristmillError(
            "address_unusable", f"cannot listen on {host}:{port}: {error}; name another --host or --port", port=port
        ) from error


def report(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Writes a self-contained HTML file about a run."""
    run = _run_folder(options.run, place)
    path: Path = options.out or run.folders[0] / REPORT_FILE
    source = _imported("gristmill.view.run_source").RunSource(run.roots)
    try:
        asyncio.run(_imported("gristmill.view.report").write_report(source, run.run_id, path))
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
        print(msgspec.json.encode({"path": str(path), **msgspec.to_builtins(contents)}).decode())  # noqa: T201
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
        found = doctor.after_run(_run_folder(options.run, place), options.config, environ)
    else:
        found = iter(doctor.checks(doctor.examine(environ, place.roots[0])))
        if options.config is not None:
            found = itertools.chain(found, doctor.before_run(options.config, environ))
    checks = []
    for check in found:  # One at a time, because some checks take seconds.
        checks.append(check)
        if not options.json:
            _say_check(console, check)
    failed = any(check.state == "failed" for check in checks)
    if options.json:
        print(msgspec.json.encode({"ok": not failed, "checks": checks}).decode())  # noqa: T201
    elif lines := list(dict.fromkeys(line for check in checks for line in check.env)):
        console.print("\nlines for .env:", style="dim")
        for line in lines:
            console.print(Text(line), soft_wrap=True)
    return 1 if failed else 0


def _say_check(console: Console, check: Check) -> None:
    style = {"ok": "green", "warning": "yellow", "failed": "red"}[check.state]
    name = (f"{check.name:<17} ", "bold")
    console.print(Text.assemble((f"{check.state:<8}", style), name, check.text), soft_wrap=True)


def slurm(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Writes the batch script of a training, and submits it. --dry-run prints the script only."""
    nodes = Nodes(
        model=options.model_nodes,
        trainer=options.trainer_nodes,
        gpus=options.gpus_per_node,
        servers=options.servers_per_node,
        env_workers=options.env_workers,
    )
    job = Job.read(
        options.config,
        nodes,
        options.model or os.environ.get("MODEL") or "tiny",
        os.environ,
        time=options.time,
        partition=options.partition,
        api_port=options.api_port,
        image=options.image,
    )
    if options.dry_run:
        print(job.script(), end="")  # noqa: T201
        return 0
    number = submit(job)
    console.print(Text(f"job {number}; its script, output and tokens are in {job.state}"), soft_wrap=True)
    return 0


def train_again(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Runs a command of the trainer's package, which needs torch."""
    try:
        commands = importlib.import_module("gristmill_trainer.replay.commands")
    except ImportError as error:
        raise GristmillError(
            "trainer_missing",
            f"`gristmill {options.name}` needs the trainer's package and torch ({error.name} is not installed): run it "
            "in the environment of `make setup` or in the trainer's container, or pip install ./services/trainer",
            package=error.name or "",
        ) from error

    def show(roots: Sequence[Path], path: str) -> None:
        _serve_page(roots, path, console, opens=True)

    page = show if sys.stdout.isatty() and _can_open_page() else None
    here = commands.Here(
        place.roots, place.models_dir, place.api, place.token, lambda run: named_run(run, place.roots), page
    )
    return int(commands.main(options.name, options.rest, here))


def _can_open_page() -> bool:
    """Whether there is a browser, and the packages of the page are installed. A container has no browser."""
    try:
        webbrowser.get()
        _imported("uvicorn"), _imported("gristmill.view.run_source")
    except (webbrowser.Error, GristmillError):
        return False
    return True


def _imported(name: str) -> Any:
    """Imports a module that needs the extra `view` of the SDK."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise GristmillError(
            "extra_missing",
            f"this command needs a package that is not installed ({error.name}): pip install './sdk[view]'",
            package=error.name or "",
        ) from error


def _say_table(console: Console, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    names = list(columns)
    if not console.is_terminal:  # for other programs: one line per row, tabs between the columns
        print("\t".join(names))  # noqa: T201
        for row in rows:
            print("\t".join(_cell(row.get(name)) for name in names))  # noqa: T201
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


def _parser() -> argparse.ArgumentParser:
    text = "Looks at runs of any stack, from its API or from the files of a run."
    parser = argparse.ArgumentParser(prog="gristmill", description=text)
    parser.add_argument("--api", help=f"address of the trajectory API (GRISTMILL_API_URL, default {API_URL})")
    parser.add_argument("--token-file", type=Path, help="file with a token for it (GRISTMILL_API_TOKEN_FILE)")
    parser.add_argument(
        "--runs", type=Path, action="append", help="folder of runs; may be repeated (GRISTMILL_RUNS_DIR, default runs)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable[..., int], text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=function.__doc__ or text)
        found.set_defaults(command=function)
        return found

    show = command("status", status, "what a run does now")
    show.add_argument("run", nargs="?", help="id of a run (default: the open run, else the newest)")
    show.add_argument("--watch", action="store_true", help="show it until the run is finished")
    show.add_argument("--json", action="store_true", help="one JSON object; with --watch one per second")
    follow = command("tail", tail, "completions as they come")
    follow.add_argument("run", nargs="?", help="id of a run (default: the open run)")
    follow.add_argument("--completions", type=int, default=1, metavar="N", help="completions per group; 0: all (1)")
    follow.add_argument("--last", type=int, default=4, metavar="N", help="groups so far to begin with, at most 8 (4)")
    listed = command("runs", runs, "all runs")
    listed.add_argument("--json", action="store_true", help="as JSON")
    rows = command("rollouts", rollouts, "single completions of a run")
    rows.add_argument("run", nargs="?", help="id, folder or pack of a run (default: the one that was written last)")
    rows.add_argument("--step", help="a step or a range: 12, 10-20")
    rows.add_argument("--group", help="id of a group")
    rows.add_argument("--env", help="id of an environment")
    rows.add_argument("--outcome", help="trained, ready, leased, dropped, dead, lost, evaluation")
    rows.add_argument("--reward-min", type=float)
    rows.add_argument("--reward-max", type=float)
    rows.add_argument("--finish-reason", help="stop, length, ...")
    rows.add_argument("--text", help="part of the prompt or the completion")
    rows.add_argument("--part", action="append", metavar="NAME=VALUE", help="value of one reward; may be repeated")
    rows.add_argument("--order", choices=_ORDERS, default="step", help="the largest values come first")
    rows.add_argument("--ascending", action="store_true", help="the smallest values come first")
    rows.add_argument("--limit", type=int, default=20)
    rows.add_argument("--json", action="store_true", help="one JSON object per line, with all columns")
    page = command("view", view, "the page, from the files of runs")
    page.add_argument("run", nargs="*", help="folders or packs of runs (default: all runs)")
    page.add_argument("--host", default="127.0.0.1", help="address to listen on; the page asks for no token")
    page.add_argument("--port", type=int, default=8080)
    written = command("report", report, "one HTML file about a run")
    written.add_argument("run", nargs="?", help="id, folder or pack of a run (default: the one that was written last)")
    written.add_argument("--out", type=Path, help="the file (default: report.html in the run's folder)")
    asked = command("sql", sql, "a query over a run's completions")
    asked.add_argument("query", help="DuckDB's SQL over the tables rollouts and steps")
    asked.add_argument("--run", help="id, folder or pack of a run (default: the one that was written last)")
    asked.add_argument("--json", action="store_true", help="one JSON object per line")
    packed = command("pack", pack, "one file with a run, for another machine")
    packed.add_argument("run", nargs="?", help="id or folder of a run (default: the one that was written last)")
    packed.add_argument("--out", type=Path, help=f"the file (default: RUN{SUFFIX} in this folder)")
    packed.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="pack files of other names too: 'notes/*.md'"
    )
    packed.add_argument("--json", action="store_true", help="the pack's contents as one JSON object")
    taken = command("unpack", unpack, "the run of a packed file, as a folder below --runs")
    taken.add_argument("file", type=Path, help=f"a file that `gristmill pack` wrote, such as quickstart{SUFFIX}")
    taken.add_argument("--max-size", type=int, metavar="BYTES", help="most bytes that the run may have")
    health = command("doctor", examine, "checks of this machine, of a configuration, or of a run")
    health.add_argument("run", nargs="?", help="id, folder or pack of a run whose files are checked")
    health.add_argument("--config", metavar="NAME", help="name or path of a run's YAML")
    health.add_argument("--json", action="store_true", help="one JSON object")
    placed = command("slurm", slurm, "a training on the nodes of a Slurm cluster")
    placed.add_argument("config", help="name or path of a run's YAML")
    placed.add_argument("--model-nodes", type=int, required=True, metavar="N", help="nodes that run model servers")
    placed.add_argument("--trainer-nodes", type=int, required=True, metavar="N", help="nodes that train")
    placed.add_argument(
        "--env-workers", type=int, required=True, metavar="N", help="environments, on all nodes in turn"
    )
    placed.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of each node; 0: CPUs only (0)")
    placed.add_argument("--servers-per-node", type=int, default=1, metavar="N", help="model servers per node (1)")
    placed.add_argument(
        "--model", help="the model that the servers load: tiny, smollm2, a path, a hub id (MODEL, tiny)"
    )
    placed.add_argument("--time", help="time limit, after which the job returns to the queue: 4:00:00")
    placed.add_argument("--partition", help="partition of all nodes")
    placed.add_argument("--api-port", type=int, default=8000, metavar="PORT", help="port on the first node (8000)")
    placed.add_argument("--image", help="image of containers, such as /shared/gristmill-{service}.sqsh")
    placed.add_argument("--dry-run", action="store_true", help="print the script, and do not submit it")
    for name, text in TRAIN_AGAIN.items():
        # The trainer's package parses the other arguments, and --help.
        commands.add_parser(name, help=text, add_help=False).set_defaults(command=train_again, name=name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
