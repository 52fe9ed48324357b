"""The console script `gristmill`: the command line of all commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from gristmill.deployment import Deployment
from gristmill.errors import FileError, GristmillError
from gristmill.folders import default_roots
from gristmill.internal.calls import check_api_url
from gristmill_cli import commands
from gristmill_cli.status import Place, status, tail
from gristmill_cli.terminal import show_any_text
from gristmill_view.pack import SUFFIX
from gristmill_view.source import ORDERS, OUTCOMES


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C."""
    show_any_text()
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in (commands.run, commands.environment, commands.train_again):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    own_api = options.command in (commands.run, commands.model, commands.slurm)
    if own_api and (options.api or options.token_file):
        parser.error("--api and --token-file are for commands that use an API; this one starts its own, or uses none")
    most_roots = 0 if options.command is commands.model else 1
    if own_api and len(options.runs or ()) > most_roots:
        parser.error("--runs names one folder for `run` and `slurm`, and none for `model`")
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
        reported = FileError.of(error) if isinstance(error, OSError) else error
        print(f"error [{reported.code}]: {reported}", file=sys.stderr)
        return 1


GROUPS = {
    "prepare": ("check", "try", "process"),
    "train": ("run", "model", "fork", "close"),
    "look": ("status", "tail", "runs", "rollouts", "sql", "view"),
    "measure": ("evaluate", "compare", "replay", "sft", "dpo"),
    "prove and share": ("retrain", "bisect", "report", "pack", "unpack"),
    "machines": ("doctor", "slurm"),
}
"""The commands by a user's task, in the order of --help."""


def _overview(texts: Mapping[str, str]) -> str:
    """Returns the list of commands for --help. `texts`: the purpose of each command."""
    lines = []
    for title, names in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<10}{texts[name]}" for name in names)]
    return "\n".join([*lines, "", "`gristmill COMMAND --help` explains a command."])


def _place(options: argparse.Namespace) -> Place:
    environ = dict(os.environ)
    if options.token_file:
        environ["GRISTMILL_API_TOKEN_FILE"] = str(options.token_file)
    deployment = Deployment.read(environ)
    return Place(
        api=check_api_url(options.api or deployment.api_url or deployment.default_api_url),
        token=deployment.api_token,
        roots=tuple(options.runs or default_roots()),
        models_dir=deployment.models_dir,
        model_url=deployment.model_url or deployment.default_model_url,
        model_named=deployment.model_url is not None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gristmill",
        usage="gristmill [--api URL] [--token-file FILE] [--runs FOLDER] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # A separate line for -h is left out, so that the help fits on a screen.
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--api", metavar="URL", help="the trajectory API (GRISTMILL_API_URL)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="its token (GRISTMILL_API_TOKEN_FILE)")
    parser.add_argument(
        "--runs", type=Path, action="append", metavar="FOLDER", help="runs, may be repeated (GRISTMILL_RUNS_DIR)"
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS)

    def command(name: str, function: Callable[..., int], text: str) -> argparse.ArgumentParser:
        added = subparsers.add_parser(name, help=text, description=function.__doc__ or text)
        added.set_defaults(command=function)
        return added

    show = command("status", status, "what a run does now")
    show.add_argument("run", nargs="?", help="id, folder or pack of a run (default: the open run, else the newest)")
    show.add_argument("--watch", action="store_true", help="show it until the run is finished")
    show.add_argument("--json", action="store_true", help="one JSON object; with --watch one per second")
    follow = command("tail", tail, "completions as they come")
    follow.add_argument("run", nargs="?", help="id of a run (default: the open run)")
    follow.add_argument("--completions", type=int, default=1, metavar="N", help="completions per group; 0: all (1)")
    follow.add_argument("--last", type=int, default=4, metavar="N", help="groups so far to begin with, at most 8 (4)")
    listed = command("runs", commands.runs, "all runs")
    listed.add_argument("--json", action="store_true", help="as JSON")
    rows = command("rollouts", commands.rollouts, "single completions of a run")
    rows.add_argument("run", nargs="?", help="id, folder or pack of a run (default: the one that was written last)")
    rows.add_argument("--step", help="a step or a range: 12, 10-20")
    rows.add_argument("--group", help="id of a group")
    rows.add_argument("--env", help="id of an environment")
    rows.add_argument("--outcome", choices=OUTCOMES)
    rows.add_argument("--reward-min", type=float)
    rows.add_argument("--reward-max", type=float)
    rows.add_argument("--finish-reason", help="stop, length, ...")
    rows.add_argument("--text", help="part of the prompt or the completion")
    rows.add_argument("--part", action="append", metavar="NAME=VALUE", help="value of one reward; may be repeated")
    rows.add_argument("--order", choices=ORDERS, default="step", help="the largest values come first")
    rows.add_argument("--ascending", action="store_true", help="the smallest values come first")
    rows.add_argument("--limit", type=int, default=20, metavar="N", help="most rows (20)")
    rows.add_argument("--json", action="store_true", help="one JSON object per line, with all columns")
    page = command("view", commands.view, "the page, from the files of runs")
    page.add_argument("run", nargs="*", help="folders or packs of runs (default: all runs)")
    page.add_argument("--host", default="127.0.0.1", help="address to listen on; the page asks for no token")
    page.add_argument("--port", type=int, default=8080)
    written = command("report", commands.report, "one HTML file about a run")
    written.add_argument("run", nargs="?", help="id, folder or pack of a run (default: the one that was written last)")
    written.add_argument("--out", type=Path, help="the file (default: report.html in the run's folder)")
    asked = command("sql", commands.sql, "a query over a run's completions")
    asked.add_argument("query", help="DuckDB's SQL over the tables rollouts and steps")
    asked.add_argument("--run", help="id, folder or pack of a run (default: the one that was written last)")
    asked.add_argument("--json", action="store_true", help="one JSON object per line")
    packed = command("pack", commands.pack, "one file with a run, for another machine")
    packed.add_argument("run", nargs="?", help="id or folder of a run (default: the one that was written last)")
    packed.add_argument("--out", type=Path, help=f"the file (default: RUN{SUFFIX} in this folder)")
    packed.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="pack files of other names too: 'notes/*.md'"
    )
    packed.add_argument("--json", action="store_true", help="the pack's contents as one JSON object")
    taken = command("unpack", commands.unpack, "the run of a packed file, as a folder below --runs")
    taken.add_argument("file", type=Path, help=f"a file that `gristmill pack` wrote, such as quickstart{SUFFIX}")
    taken.add_argument("--max-size", type=int, metavar="BYTES", help="most bytes that the run may have")
    health = command("doctor", commands.examine, "checks of this machine, of a configuration, or of a run")
    health.add_argument("run", nargs="?", help="id, folder or pack of a run whose files are checked")
    health.add_argument("--config", metavar="NAME", help="name or path of a run's YAML")
    health.add_argument("--json", action="store_true", help="one JSON object")
    served = command("model", commands.model, "a model server that stays for the next commands")
    served.set_defaults(name="model")
    served.add_argument("action", choices=["start", "stop", "status"])
    served.add_argument("--model", help="tiny, smollm2, a path, a hub id (MODEL, tiny)")
    served.add_argument("--model_port", metavar="PORT", help="its port (MODEL_PORT, 9001)")
    served.add_argument("--state_dir", type=Path, metavar="FOLDER", help="models and published weights, as for `run`")
    placed = command("slurm", commands.slurm, "a training on the nodes of a Slurm cluster")
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
    placed.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a key of the YAML, such as trainer.learning_rate=1e-5; may be repeated",
    )  # fmt: skip
    placed.add_argument("--time", help="time limit, after which the job returns to the queue: 4:00:00")
    placed.add_argument("--partition", help="partition of all nodes")
    placed.add_argument("--api-port", default="8000", metavar="PORT", help="port on the first node (8000)")
    placed.add_argument("--image", help="image of containers, such as /shared/gristmill-{service}.sqsh")
    placed.add_argument("--dry-run", action="store_true", help="print the script, and do not submit it")
    # The packages of the services parse the arguments of these commands, and --help.
    for name, function, text in (
        ("run", commands.run, "train on this machine, without Docker"),
        *((name, commands.environment, text) for name, text in commands.ENVIRONMENT.items()),
        *((name, commands.train_again, text) for name, text in commands.TRAIN_AGAIN.items()),
    ):
        subparsers.add_parser(name, help=text, add_help=False).set_defaults(command=function, name=name)
    parser.epilog = _overview({choice.dest: choice.help or "" for choice in subparsers._choices_actions})
    return parser
