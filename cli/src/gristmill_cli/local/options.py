"""The command line of `gristmill run`, and the variables of .env."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill import ConfigError
from gristmill.deployment import env_file
from gristmill.folders import default_roots
from gristmill.internal.dotenv import read_env_file
from gristmill.internal.redaction import redact

ROOT = Path(__file__).resolve().parents[4]
"""The clone of the repository: its configs/, .venv-model, .gristmill/ and runs/."""
PROGRAM = ".venv/bin/gristmill"
_ABOUT = """\
Trains on this machine, without Docker: starts Redis, model server, trajectory API, environment and trainer, and stops
them at the end. `make local` and scripts/launch_local_dataset_run.py are the same.

  gristmill run                               the quickstart
  gristmill run my.yaml --model smollm2       a configuration: a path, or a name in configs/
  gristmill run --set trainer.learning_rate=1e-5 --set dataset.max_tokens=64     keys of the YAML
  gristmill run --preset qwen                 Qwen2.5-1.5B on 100 test rows, length reward
  gristmill run --training_steps 120          train a finished or interrupted run longer
  gristmill run --fresh                       train the run again from its first step
  gristmill run --close quickstart            end a run that is not to be continued

Variables such as MODEL, CONFIG, RUN_ID, API_PORT and MODEL_PORT may be in .env, as for Compose. The environment
overrides that file, and the command line overrides both.

The launcher first checks everything that can be checked without a service. A model server that already answers on its
port is used (--publisher none if its weights may not be updated); `gristmill model start` starts one that stays. After
`make secure` the API asks for tokens and Redis for a password; the launcher gives them to the services that it starts.
It stops all of these services at the end or on SIGINT (Ctrl-C), SIGTERM or SIGHUP, and keeps their full output in
runs/<run>/logs/. After a signal the trainer finishes its step. A second signal changes nothing, and a third one kills.
Exit code 0: the run is finished.

A terminal shows a live view of the run. Without a terminal the launcher prints one line per step and the warnings, and
with --verbose the output of all services. A summary with the next commands ends the run.
"""


@dataclass(frozen=True)
class Preset:
    """The config and the model that --preset selects."""

    config: str
    model: str


PRESETS = {
    "quickstart": Preset("quickstart", "tiny"),
    "qwen": Preset("qwen_length", "Qwen/Qwen2.5-1.5B"),
}


def read_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Returns the options of the command line, completed by the environment's variables and the preset.

    `given` in the result has the options that select the run and its services, by name. Raises ConfigError.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environ = os.environ
    parser.add_argument("positional", nargs="?", metavar="CONFIG", help="a name in configs/ or a path, as --config")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="config and model together (default: quickstart)")
    parser.add_argument("--config", help="a name in configs/ or a path (default: the preset's, or CONFIG)")
    parser.add_argument("--model", help="the model that the server loads: tiny, smollm2, a path, a hub id")
    parser.add_argument("--model_name", help="weights to train if the model server was not started here")
    parser.add_argument("--run_id", help="name of the run (default: the config's)")
    parser.add_argument("--training_steps", type=int, help="optimizer steps (default: the config's); more extend a run")
    parser.add_argument("--resume", help="auto (default), never, or a checkpoint's folder; see docs/operations.md")
    parser.add_argument("--policy_loss", metavar="FILE.py:NAME", help="a loss of your own; see docs/trainer.md")
    parser.add_argument("--ref_model", help="reference of the KL divergence: a hub id or a folder")
    parser.add_argument(
        "--publisher", choices=["filesystem", "ipc", "nccl", "none"],
        help="ipc: a server on the trainer's GPU copies its memory; nccl: a server on another GPU receives it; "
        "none: the server may not be updated",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="start the run again; its files so far are set apart")
    parser.add_argument("--verbose", action="store_true", help="print the output of all services")
    parser.add_argument("--close", metavar="RUN", help="end a run and exit: no training")
    parser.add_argument("--api_port", metavar="PORT", help="of the trajectory API (API_PORT, 8000)")
    parser.add_argument("--model_port", metavar="PORT", help="of the model server (MODEL_PORT, 9001)")
    parser.add_argument("--state_dir", default=str(ROOT / ".gristmill"), help="Redis data, models, published weights")
    runs = str(default_roots()[0] if environ.get("GRISTMILL_RUNS_DIR") else ROOT / "runs")
    parser.add_argument(
        "--runs_dir", default=runs, help="metrics, checkpoints, final models, logs (GRISTMILL_RUNS_DIR)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a key of the YAML, such as trainer.learning_rate=1e-5; may be repeated",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    positional: str | None = vars(options).pop("positional")
    if positional is not None and options.config not in (None, positional):
        raise ConfigError(
            "two_configs",
            f"command line: {positional} and --config {options.config} are two configurations; name one",
            names=[positional, options.config],
        )
    options.config = positional or options.config
    options.run_id = options.run_id or environ.get("RUN_ID") or environ.get("GRISTMILL_RUN_ID")
    if options.preset is None:
        options.config = options.config or environ.get("CONFIG")
        options.model = options.model or environ.get("MODEL")
    options.given = {
        name: value
        for name, value in vars(options).items()
        if name not in ("training_steps", "resume", "fresh", "close", "verbose")
        and value not in (None, [])
        and str(value) != parser.get_default(name)
    }
    for name in PORTS:
        setattr(options, name, read_port(name, environ, vars(options)[name]))
    if options.api_port == options.model_port:
        raise ConfigError(
            "port_invalid",
            f"the trajectory API and the model server have the same port {options.api_port}: choose another port with "
            "--api_port or --model_port",
            port=options.api_port,
        )
    preset = PRESETS[options.preset or "quickstart"]
    options.config = options.config or preset.config
    options.model = options.model or preset.model
    return options


PORTS = {"api_port": 8000, "model_port": 9001}
"""The ports of the services, by their flags. The variables have the same names in capital letters."""


def read_port(name: str, environ: Mapping[str, str], given: str | None = None) -> int:
    """Returns a port of `PORTS`: `given` by its flag, or else by its variable. Raises ConfigError."""
    if given is not None:
        return parse_port(name, f"--{name} ", given)
    return parse_port(name, f"{name.upper()}=", environ.get(name.upper()) or str(PORTS[name]))


def parse_port(name: str, where: str, text: str) -> int:
    """`name`: of the port. `where`: the words before the port in the message. Raises ConfigError."""
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 2**16:
        raise ConfigError("port_invalid", f"{where}{text} is not a port: name a number from 1 to 65535", name=name)
    return int(text)


def command(options: argparse.Namespace, **other: object) -> str:
    """Returns a command that starts the same run with the same services. `other`: options that replace this start's.

    An option that is True is a flag without a value.
    """
    chosen = {**options.given, **other}
    words = [PROGRAM, "run"]
    if config := chosen.pop("config", None):
        words.append(str(config))
    for name, value in chosen.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return shlex.join(words)


def serve_command(options: argparse.Namespace, model: Path, *, stays: bool) -> str:
    """Returns a command that serves `model` with the port and the folder of this start. `stays`: a model server, which
    has another model, runs there already."""
    place = [
        word
        for name in ("model_port", "state_dir")
        if name in options.given
        for word in (f"--{name}", str(options.given[name]))
    ]
    serve = shlex.join([PROGRAM, "model", "start", "--model", str(model), *place])
    return f"{shlex.join([PROGRAM, 'model', 'stop', *place])} && {serve}" if stays else serve


def is_clone() -> bool:
    """Returns whether this package is in a clone of the repository."""
    return (ROOT / "configs" / "trainer.yaml").is_file()


def require_clone(name: str) -> None:
    """Raises ConfigError outside of a clone. `name`: of the command that needs one."""
    if not is_clone():
        raise ConfigError(
            "clone_missing",
            f"`gristmill {name}` works in a clone of the repository only, and {ROOT} is not a clone: run the command "
            "in a clone, after `make setup`",
            path=ROOT,
        )


def read_dotenv(*, shown: bool = True) -> None:
    """Sets the variables of .env that the environment does not set. Prints those that differ from .env.example, if
    `shown`."""
    variables = {name: value for name, value in env_file(Path.cwd(), os.environ).items() if value}
    os.environ.update(variables)
    usual = read_env_file(ROOT / ".env.example", {})
    # Some values are arguments of a program, as VLLM_ARGS.
    shown_as = {name: " ".join(redact(str(redact({name: value})[name]).split())) for name, value in variables.items()}
    differ = [f"{name}={shown_as[name]}" for name, value in variables.items() if value != usual.get(name)]
    if differ and shown:
        print(f"from .env: {', '.join(differ)}", flush=True)
