"""The command lines of `gristmill retrain`, `gristmill bisect` and `gristmill fork`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from transformers.utils import logging as transformers_logging

from gristmill import Hyperparameters
from gristmill.deployment import RUN_ID
from gristmill.folders import RunFolder
from gristmill.internal.assignments import read_assignment
from gristmill.internal.flags import parse_flags
from gristmill_trainer.replay import fork
from gristmill_trainer.replay.bisect import bisect
from gristmill_trainer.replay.recorded import RecordedRun, ReplayError
from gristmill_trainer.replay.retrain import Request, retrain, verify

_RUN_ID = re.compile(RUN_ID)


class Here(NamedTuple):
    """This machine, as the command line of `gristmill` describes it."""

    roots: Sequence[Path]
    """Folders of runs."""
    models_dir: Path
    """Folder with the manifest of a model."""
    api: str
    """URL of the trajectory API, which only a fork needs."""
    token: str | None
    open: Callable[[str], RunFolder]
    """Returns the run of an id, a folder or a packed run. Raises GristmillError."""
    show: Callable[[Sequence[Path], str], None] | None
    """Opens the page over folders of runs at a path, until Ctrl-C. None: there is no terminal or no browser."""


def main(command: str, arguments: Sequence[str], here: Here) -> int:
    """Runs a command. Returns its exit code. Raises GristmillError.

    `arguments`: without the command's name.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    transformers_logging.disable_progress_bar()  # two bars for every checkpoint
    commands: dict[str, Callable[[Sequence[str], Here], int]] = {
        "retrain": _retrain,
        "bisect": _bisect,
        "fork": _fork,
    }
    return commands[command](arguments, here)


def _retrain(arguments: Sequence[str], here: Here) -> int:
    parser = _parser(
        "retrain",
        "Trains a recorded run again, from its archive, without API, environment and model server. Every "
        "hyperparameter is a flag too, such as --objective cispo or --learning_rate 1e-5; another value than the "
        "recorded one makes the recorded completions off-policy.",
    )
    parser.add_argument("--verify", action="store_true", help="compare every checkpoint; exit code 1 if one differs")
    parser.add_argument("--at", type=int, metavar="STEP", help="begin after this step; other settings act from there")
    parser.add_argument("--until", type=int, metavar="STEP", help="the last step (default: the last checkpoint)")
    parser.add_argument("--force", action="store_true", help="continue below an effective sample size of 10 %%")
    parser.add_argument("--out", metavar="NAME", help="id of the retrained run (default: RUN-retrained)")
    options, rest = parser.parse_known_args(arguments)
    before = dict(zip(arguments[1:], arguments, strict=False)).get(options.run, "")
    if before in rest and "=" not in before:  # argparse does not know that this flag takes the next word.
        raise ReplayError(
            "run_first", f"name the run before {before}: gristmill retrain RUN {before} {options.run}", flag=before
        )
    settings = parse_flags(rest, Hyperparameters, "gristmill retrain RUN", "Hyperparameters of a retraining.")
    request = Request(settings, options.at, options.until, options.force)
    run = _open(options, here)
    if options.verify:
        if settings:
            raise ReplayError(
                "verify_with_settings",
                f"--verify trains with the recorded settings; leave out {', '.join(f'--{name}' for name in settings)}",
                settings=sorted(settings),
            )
        verdict = verify(run, request, _say)
        for line in verdict.report():
            _say(line)
        return 0 if verdict.step is None else 1
    name = options.out or f"{run.run_id}-retrained"
    _check_run_id(name)
    out = _place(options.run, run, here) / name
    report = retrain(run, request, out, _say)
    for line in [] if report is None else report.report():
        _say(line)
    _say(f"the retrained run: {out}")
    runs = f" {options.run} {out}" if Path(options.run).is_file() else ""
    _say(f"both curves on one page: gristmill view{runs}, then /view/compare?runs={run.run_id},{name}")
    return 0


def _bisect(arguments: Sequence[str], here: Here) -> int:
    parser = _parser("bisect", "Finds the group and the sequence that cause the value of a metric in a step.")
    parser.add_argument("--metric", required=True, help="such as grad_norm, loss, kl_rollout, ratio.max")
    parser.add_argument("--step", type=int, required=True, help="the step with the unusual value")
    options = parser.parse_args(arguments)
    run = _open(options, here)
    result = bisect(run, options.metric, options.step, _say)
    for line in result.report():
        _say(line)
    link = f"/view/{quote(run.run_id)}/group/{quote(result.group.group_id)}#s{result.sequence.sequence}"
    _say(f"on the page (gristmill view {options.run}): http://127.0.0.1:8080{link}")
    if here.show is not None:
        here.show(run.folder.roots, link)
    return 0


def _fork(arguments: Sequence[str], here: Here) -> int:
    parser = _parser("fork", "Continues a run live from one of its steps, with other settings, as a new run.")
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="begin with the weights after this step")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a hyperparameter such as learning_rate=1e-5, policy_loss, ref_model or publisher, or a setting of the "
        "environment such as dataset.temperature=0.8; may be repeated",
    )  # fmt: skip
    parser.add_argument("--id", metavar="NAME", help="id of the new run (default: RUN-fork-STEP)")
    options = parser.parse_args(arguments)
    run = _open(options, here)
    name = options.id or f"{run.run_id}-fork-{options.at}"
    _check_run_id(name)
    settings = dict(map(read_assignment, options.set))
    config_dir = Path(os.environ.get("GRISTMILL_CONFIG_DIR") or "configs")
    runs_dir = _place(options.run, run, here)
    startable = fork.can_start(here.api, here.token)
    prepared = fork.prepare(run, options.at, settings, runs_dir / name, config_dir, _say)
    _say(f"both curves on one page: /view/compare?runs={run.run_id},{name}")
    if startable:
        return fork.start(prepared, here.api, runs_dir)
    _say(f"no trajectory API answers at {here.api}. Start the fork with all services:")
    _say(f"  {shlex.join(['gristmill', 'run', str(prepared.config), *prepared.flags, '--runs_dir', str(runs_dir)])}")
    return 0


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"gristmill {name}", description=text, allow_abbrev=False)
    parser.add_argument("run", help="id, folder or pack of the run")
    parser.add_argument(
        "--trust", action="store_true",
        help="use the code, files, downloads and addresses that the run's record names",
    )  # fmt: skip
    parser.add_argument("--model", metavar="FOLDER", help="the model before any training (default: as recorded)")
    return parser


def _open(options: argparse.Namespace, here: Here) -> RecordedRun:
    recorded = RecordedRun.open(here.open(options.run), here.models_dir, model=options.model, trust=options.trust)
    _say(f"run {recorded.run_id}: {recorded.coverage().report()}")
    return recorded


def _place(named: str, run: RecordedRun, here: Here) -> Path:
    """Returns the folder of runs for a new run: that of the run, or the first one if a packed run is named."""
    return here.roots[0] if Path(named).is_file() else run.folder.folders[0].parent


def _check_run_id(name: str) -> None:
    if not _RUN_ID.fullmatch(name):
        raise ReplayError(
            "run_id_invalid",
            f"{name!r} is not a valid run id: use at most 64 letters, digits, '.', '_' and '-'",
            run=name,
        )


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's output
