#!/usr/bin/env python
"""A whole training on this machine, without Docker: Redis, model server, trajectory API, environment, trainer.

    python scripts/launch_local_dataset_run.py                       the quickstart (`make local`)
    python scripts/launch_local_dataset_run.py --preset qwen         Qwen2.5-1.5B on 100 test rows, length reward
    python scripts/launch_local_dataset_run.py --config gsm8k --model smollm2
    python scripts/launch_local_dataset_run.py --training_steps 120  train a finished or interrupted run longer
    python scripts/launch_local_dataset_run.py --fresh               train the run again from its first step
    python scripts/launch_local_dataset_run.py --close quickstart    end a run that is not to be continued

Variables such as MODEL, CONFIG, RUN_ID, API_PORT and MODEL_PORT may be in .env, as for Compose. The environment
overrides that file, and the command line overrides both.

The launcher first checks everything that can be checked without a service. A model server that already answers on its
port is used as it is (--publisher none if its weights may not be updated). After `make secure` the API asks for tokens
and Redis for a password; the launcher gives them to the services that it starts. It stops all of these services at the
end or on SIGINT (Ctrl-C), SIGTERM or SIGHUP, and keeps their full output in runs/<run>/logs/. After a signal the
trainer finishes its step. A second signal changes nothing, and a third one kills. Exit code 0: the run is finished.

A terminal shows a live view of the run. Without a terminal the launcher prints one line per step and the warnings, and
with --verbose the output of all services. A summary with the next commands ends the run.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gristmill import ApiError, Deployment, GristmillError, PolicyVersion, RunState, SyncClient
from gristmill.deployment import env_file
from gristmill.dotenv import read_env_file
from gristmill.errors import FileError
from gristmill.lines import read_jsonl
from gristmill.metrics import METRICS_FILE
from gristmill.redaction import redact
from gristmill.settings import load_yaml, merge, parse
from gristmill_cli.terminal import Command
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import Task
from gristmill_model.settings import named
from gristmill_trainer.settings import TrainerSettings
from local_output import LocalRun, MergedLogs, Output, choose, next_commands, saved_step, show_context
from local_processes import LocalStack, LocalStackError, Service, StoppedError, StopSignals, answers, free_port, listens
from redis_binary import RedisMissingError, redis_command, redis_server
from secure import ACL, AGENT, PASSWORD, Secrets, SecretsError

ROOT = Path(__file__).resolve().parent.parent
MODEL_PYTHON = ROOT / ".venv-model" / "bin" / "python"
# A first start may download the model.
MODEL_TIMEOUT = 3600.0
TRAINER_LAST_SECONDS = 20.0
ARCHIVE_SECONDS = 30.0
"""Maximum seconds that a deletion waits until the API has archived the run's last groups."""


@dataclass(frozen=True)
class Preset:
    """The config and the model that --preset selects."""

    config: str
    model: str


PRESETS = {
    "quickstart": Preset("quickstart", "tiny"),
    "qwen": Preset("qwen_length", "Qwen/Qwen2.5-1.5B"),
}


class Launcher:
    """One run on this machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.runs_dir = Path(options.runs_dir).absolute()
        self.state = Path(options.state_dir).absolute()
        self.api_url = f"http://127.0.0.1:{options.api_port}"
        self.model_url = f"http://127.0.0.1:{options.model_port}"
        self.environ = {
            "GRISTMILL_API_URL": self.api_url,
            "GRISTMILL_MODEL_URL": self.model_url,
            "GRISTMILL_CONFIG_DIR": str(ROOT / "configs"),
            "GRISTMILL_MODELS_DIR": str(self.state / "models"),
            "GRISTMILL_WEIGHTS_DIR": str(self.state / "weights"),
            "GRISTMILL_RUNS_DIR": str(self.runs_dir),
            "API_VIEW_SERVERS": self.model_url,
            "GRISTMILL_RUN_ID": options.run_id or "",
            **_as_in_compose(os.environ),
        }
        self.secrets = Secrets.find(ROOT)
        self.output: Output = MergedLogs()
        self.trainer_grace = TrainerSettings().stop_grace_seconds

    # --- Checks that need no service ------------------------------------------------------------------------
    def check(self) -> tuple[str, int]:
        """Checks config, rewards, local data, settings of the trainer, the model's name, ports and programs.

        Returns the run's id and its number of steps.

        Raises GristmillError, which names the mistake and the remedy.
        """
        launch = RunSettings.read(self._env_flags(), {**os.environ, **self.environ}, "make local")
        settings = self._trainer_settings(launch)
        self.trainer_grace = settings.stop_grace_seconds
        self._check_finished(launch.run_id, settings.training_steps)
        if launch.config.dataset.dataset_path is not None:
            Task.load(launch)  # The environment checks a data set on a hub, because its download may take long.
        logs = self.runs_dir / launch.run_id / "logs"
        for folder in (logs, *(self.state / name for name in ("redis", "models", "weights"))):
            check_folder(folder)
        self._check_ports()
        if not answers(f"{self.model_url}/v1/models"):
            self._check_model(launch)
        redis_server()
        return launch.run_id, settings.training_steps

    def _trainer_settings(self, launch: RunSettings) -> TrainerSettings:
        file = ROOT / "configs" / "trainer.yaml"
        layers = merge(merge(load_yaml(file), launch.config.trainer_block()), self._trainer_settings_given())
        where = f"trainer settings ({file.name}, trainer: block of {launch.config_path}, command line)"
        settings = parse(TrainerSettings, layers, where)
        settings.check_whole_groups(launch.config.group_size, where)
        return settings

    def _check_finished(self, run_id: str, training_steps: int) -> None:
        folder = self.runs_dir / run_id
        steps = self._steps_done(run_id)
        if self.options.fresh or steps < training_steps or not (folder / "model").is_dir():
            return
        raise self._finished(run_id, steps)

    def _steps_done(self, run_id: str) -> int:
        metrics = self.runs_dir / run_id / METRICS_FILE
        return max((row["step"] for row in read_jsonl(metrics)), default=0) if metrics.exists() else 0

    def check_store(self, run_id: str, training_steps: int) -> None:
        """Refuses a run that is finished in the store but not in its files, for example after it was closed by hand."""
        try:
            with self._admin() as api:
                record = api.get_run(run_id)
        except ApiError as error:
            if error.code != "run_missing":
                raise
            return
        if record.state == RunState.FINISHED and training_steps <= (record.training_steps or training_steps):
            version = PolicyVersion.parse(record.version) if record.version else None
            raise self._finished(run_id, version.step if version else 0)

    def _finished(self, run_id: str, steps: int) -> LocalStackError:
        model = self.runs_dir / run_id / "model"
        here = f"its model is {model}" if model.is_dir() else f"there is no model in {model.parent}"
        longer = max(2 * steps, self.options.training_steps or 0, 20)
        commands = [
            ("train it longer", self._command(training_steps=longer)),
            ("train it again", self._command() + " --fresh"),
            ("train another run of it", self._command(run_id=f"{run_id}-2")),
        ]
        lines = [f'  {purpose + ":":<24} make local ARGS="{flags.strip()}"' for purpose, flags in commands]
        if model.is_dir():
            lines += [f"  serve its model:         MODEL={model} {MODEL_PYTHON.relative_to(ROOT)} -m gristmill_model"]
        return LocalStackError(
            "run_finished",
            "\n".join([f"run {run_id} is finished after {steps} steps; {here}", *lines]),
            run=run_id,
            steps=steps,
        )

    def _command(self, **other: object) -> str:
        """Returns the flags of this start that select the run and its services. `other` flags replace them."""
        return " ".join(
            f"--{name} {shlex.quote(str(value))}" for name, value in {**self.options.given, **other}.items()
        )

    def _check_ports(self) -> None:
        if listens(self.options.api_port):
            raise LocalStackError(
                "port_taken",
                f"port {self.options.api_port} of the trajectory API is taken: stop the process that listens there "
                "(another `make local` or `docker compose up`?), or choose another port with --api_port",
                port=self.options.api_port,
            )
        if listens(self.options.model_port) and not answers(f"{self.model_url}/v1/models"):
            raise LocalStackError(
                "port_taken",
                f"port {self.options.model_port} of the model server is taken by a process that does not answer as "
                "a model server: stop it, or choose another port with --model_port",
                port=self.options.model_port,
            )

    def _check_model(self, launch: RunSettings) -> None:
        name = served_name(self.options.model)
        wanted = launch.config.server.model_name
        if wanted not in (None, name):
            raise LocalStackError(
                "model_mismatch",
                f"{launch.config_path} trains the model {wanted!r}, but the model server would load "
                f"{name!r}: add --model {wanted}",
                model_name=wanted,
                served=name,
            )
        if not MODEL_PYTHON.exists():
            raise LocalStackError("setup_missing", f"no {MODEL_PYTHON}: run `make setup` first", path=MODEL_PYTHON)

    # --- Commands -------------------------------------------------------------------------------------------
    def train(self, run_id: str, training_steps: int) -> None:
        """Runs the services until the run is finished, shows the run meanwhile, and prints a summary at the end."""
        folder = self.runs_dir / run_id
        run = LocalRun(run_id, training_steps, folder, self.state / "models", self.model_url)
        self.output = choose(run, folder / "logs", verbose=self.options.verbose)
        lines: list[Text] = []
        try:
            logs = folder / "logs"
            with self.output, LocalStack(self.output.line, logs, self.output.say, StopSignals()) as stack:
                run.attach(stack)
                try:
                    self.run(stack, run, training_steps)
                    run.wait_for_report()
                    lines = run.end(self._next_commands(run_id, training_steps, run.question()))
                except StoppedError:
                    self.output.stopping(self._being_finished(stack, run_id))
                    raise
                except BaseException:
                    self.output.stopping()
                    raise
                self.output.stopping()
        except LocalStackError as error:
            if not self.options.verbose:
                show_context(error.values.get("log"))
            if error.code == "service_killed":
                step = saved_step(folder)
                start = "from its first step" if step is None else f"from step {step}"
                raise LocalStackError(
                    error.code, f"{error}. The same command continues the run {start}", **error.values, step=step
                ) from error
            raise
        console = Console(highlight=False)
        for line in lines:
            console.print(line, soft_wrap=True)

    def _being_finished(self, stack: LocalStack, run_id: str) -> str:
        """Returns a sentence about the trainer's work after a stop signal."""
        if all(service.name != "trainer" for service in stack.services):
            return "stopping the services"
        return (
            f"stopping: the trainer finishes step {self._steps_done(run_id) + 1} if it has the groups of the step and "
            f"needs at most {self.trainer_grace:.0f} s; a third signal kills it"
        )

    def stopped(self, run_id: str) -> str:
        """Returns the last line after a stop signal, when every service has ended."""
        step = saved_step(self.runs_dir / run_id)
        if step is None:
            return f"stopped everything; no step of run {run_id} is saved yet; the same command continues the run"
        return f"stopped everything; step {step} of run {run_id} is saved; the same command continues from there"

    def run(self, stack: LocalStack, run: LocalRun, training_steps: int) -> None:
        """Starts the services in order and waits for the end of the run."""
        self.start_store(stack)
        if self.options.fresh:
            self.discard(stack, run.run_id)
        else:
            self.check_store(run.run_id, training_steps)
        run.connect(self._admin(patience=0))
        self._start_model(stack)
        with self._admin() as api:
            interrupted = api.open_run(wait=0, stack=Deployment.read(self.environ).stack)
        if interrupted is None:
            trainer, env = self._start_trainer(stack), self._start_env(stack)
        else:  # The trainer would take the open run before the environment has extended it, or opened another run.
            env = self._start_env(stack)
            stack.wait_until(env, lambda: env.ready or env.exit_code == 0, MODEL_TIMEOUT)
            trainer = self._start_trainer(stack)
        watch(stack, env, trainer)

    def _start_trainer(self, stack: LocalStack) -> Service:
        return stack.start(
            "trainer",
            [sys.executable, "-m", trainer_module(os.environ), *self._trainer_flags()],
            {
                **self.environ,
                **_hub_token("HF_WRITE_TOKEN_FILE"),
                **token_files("trainer", self.secrets),
                **visible_gpus(os.environ, "TRAINER_GPU"),
            },
            grace=self.trainer_grace + TRAINER_LAST_SECONDS / 2,
        )

    def _start_env(self, stack: LocalStack) -> Service:
        return stack.start(
            "env",
            [sys.executable, "-m", "gristmill_env", "serve", *self._env_flags()],
            {**self.environ, **_hub_token("HF_TOKEN_FILE"), **token_files("env", self.secrets)},
            ready_text=" is open at version ",
        )

    def close(self, run_id: str) -> None:
        """Ends a run by hand at the API of this machine. Starts the API if it does not answer."""
        with LocalStack(signals=StopSignals()) as stack:
            if not answers(f"{self.api_url}/healthz"):
                self.start_store(stack)
            with self._admin() as api:
                record = api.close_run(run_id)
        print(f"run {run_id} is closed at version {record.version or 'none'}; its folder is {self.runs_dir / run_id}")

    def discard(self, stack: LocalStack, run_id: str) -> None:
        """Deletes the run from the store, and moves its files to a folder with another name."""
        with self._admin() as api:
            try:
                api.close_run(run_id)
                _delete(stack, api, run_id)
            except ApiError as error:
                if error.code != "run_missing":
                    raise
        folder = self.runs_dir / run_id
        if folder.exists():
            apart = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{run_id}.old-{n}")).exists())
            apart.mkdir()
            for path in folder.iterdir():
                if path.name != "logs":  # This start already writes into the logs folder.
                    path.rename(apart / path.name)
            self.output.say(f"the files of the run before are in {apart}")

    # --- Services -------------------------------------------------------------------------------------------
    def start_store(self, stack: LocalStack) -> None:
        """Starts Redis and the API."""
        if self.secrets is not None:
            self.secrets.write()  # the user list must contain the current API's commands
        redis_url = start_redis(stack, self.state, self.secrets)
        start_api(stack, self.environ, redis_url, self.options.api_port, self.secrets)

    def _start_model(self, stack: LocalStack) -> None:
        url = f"{self.model_url}/v1/models"
        if answers(url):
            self.output.say(f"using the model server that already answers at {self.model_url}")
            return
        service = stack.start(
            "model",
            [str(MODEL_PYTHON), "-m", "gristmill_model"],
            {
                **self.environ,
                **_hub_token("HF_TOKEN_FILE"),
                "MODEL": self.options.model,
                "MODEL_PORT": str(self.options.model_port),
                **visible_gpus(os.environ, "MODEL_GPU"),
            },
        )
        stack.wait_until(service, lambda: answers(url), MODEL_TIMEOUT)

    def _admin(self, patience: float = 10) -> SyncClient:
        token = Deployment.read(token_files("admin", self.secrets)).api_token
        return SyncClient(self.api_url, patience=patience, timeout=10, token=token)

    def _next_commands(self, run_id: str, training_steps: int, question: str) -> list[Command]:
        return next_commands(
            run_id=run_id,
            folder=self.runs_dir / run_id,
            root=ROOT,
            config=self.options.config,
            given=self._command(),
            steps=training_steps,
            model_port=self.options.model_port,
            question=question,
        )

    def _env_flags(self) -> list[str]:
        # The environment records the number of steps, so that the trainer and a later start agree on it.
        steps = self.options.training_steps
        return ["--config", self.options.config, *(["--total_steps", str(steps)] if steps else [])]

    def _trainer_settings_given(self) -> dict[str, str]:
        names = ("publisher", "model_name", "resume")
        return {name: value for name in names if (value := getattr(self.options, name))}

    def _trainer_flags(self) -> list[str]:
        return [word for name, value in self._trainer_settings_given().items() for word in (f"--{name}", value)]


def start_redis(stack: LocalStack, state: Path, secrets: Secrets | None) -> str:
    """Starts Redis with its data in `state`/redis. Returns its URL."""
    folder, port = state / "redis", free_port()
    folder.mkdir(parents=True, exist_ok=True)
    users = ["--aclfile", str(secrets.path(ACL))] if secrets else []
    redis = stack.start("redis", [*redis_command(port, folder), *users])
    stack.wait_until(redis, lambda: listens(port), timeout=60)
    return f"redis://127.0.0.1:{port}/0"


def start_api(stack: LocalStack, environ: dict[str, str], redis_url: str, port: int, secrets: Secrets | None) -> None:
    """Starts the trajectory API and waits until it is ready."""
    command = [sys.executable, "-m", "gristmill_api", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"REDIS_URL": redis_url}
    if secrets is not None:
        settings |= {"REDIS_PASSWORD_FILE": str(secrets.path(PASSWORD))}
        settings |= {"API_AUTH": "token", "API_TOKENS_DIR": str(secrets.folder)}
    api = stack.start("api", command, {**environ, **settings})
    stack.wait_until(api, lambda: answers(f"{environ['GRISTMILL_API_URL']}/readyz"), timeout=60)


def token_files(role: str, secrets: Secrets | None) -> dict[str, str]:
    """Returns the variables that name a role's token file and the file of the token for agents elsewhere. They do not
    hold the tokens themselves, because other processes can read a process' variables."""
    if secrets is None:
        return {}
    files = {"GRISTMILL_API_TOKEN_FILE": secrets.path(role)}
    if role == "env":
        files["GRISTMILL_AGENT_TOKEN_FILE"] = secrets.path(AGENT)
    return {variable: str(path) for variable, path in files.items()}


def _delete(stack: LocalStack, api: SyncClient, run_id: str) -> None:
    deadline = time.monotonic() + ARCHIVE_SECONDS
    while True:
        stack.raise_if_stopped()
        try:
            return api.delete_run(run_id)
        except ApiError as error:
            if error.code != "archiving" or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def check_folder(folder: Path) -> None:
    """Checks that files can be written into the folder, or into the nearest folder above it if it does not exist yet.

    Creates nothing that stays. Raises OSError.
    """
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(folder)) from error


def served_name(model: str) -> str:
    """Returns the name that the model server answers to if it loads `model`. Raises ModelError for an invalid name."""
    hub = named(model)
    return hub[1] if hub else model


def watch(stack: LocalStack, env: Service, trainer: Service) -> None:
    """Waits until environment and trainer end without error. The first failure of a service ends the run.

    Raises StoppedError after a stop signal.
    """
    deadline = None
    while True:
        stack.raise_if_stopped()
        for service in stack.services:
            if service.exit_code or (service.exit_code is not None and service not in (env, trainer)):
                raise service.failure()
        if env.exit_code == 0:
            # The run is finished. The trainer ends with the run, unless the run finished before the trainer started.
            deadline = deadline or time.monotonic() + TRAINER_LAST_SECONDS
            if trainer.exit_code == 0 or time.monotonic() > deadline:
                return
        time.sleep(0.2)


def read_dotenv() -> None:
    """Sets the variables of .env that the environment does not set, and prints those that differ from .env.example."""
    found = {name: value for name, value in env_file(Path.cwd(), os.environ).items() if value}
    os.environ.update(found)
    usual = read_env_file(ROOT / ".env.example", {})
    shown = [f"{name}={redact({name: value})[name]}" for name, value in found.items() if value != usual.get(name)]
    if shown:
        print(f"from .env: {', '.join(shown)}", flush=True)


def _as_in_compose(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of services that have another name in .env, or a path that starts at .env's folder."""
    found = {}
    if stack := environ.get("STACK"):
        found["GRISTMILL_STACK"] = stack
    if gigabytes := environ.get("MODEL_KV_CACHE_GB"):
        found["VLLM_CPU_KVCACHE_SPACE"] = gigabytes
    if key := environ.get("WANDB_API_KEY_FILE"):
        found["WANDB_API_KEY_FILE"] = str(Path.cwd() / key)
    return found


def visible_gpus(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns the variable that shows a service the GPUs of MODEL_GPU or TRAINER_GPU only, as in compose/cuda.yaml.

    Without DEVICE=cuda or GPUs in the variable `name`, the service sees the GPUs that this process sees.
    """
    gpus = _gpus(environ, name)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def trainer_module(environ: Mapping[str, str]) -> str:
    """Returns the trainer's module: with several GPUs the module that starts one process per GPU."""
    return "gristmill_trainer.per_gpu" if len(_gpus(environ, "TRAINER_GPU")) > 1 else "gristmill_trainer"


def _gpus(environ: Mapping[str, str], name: str) -> list[str]:
    if environ.get("DEVICE") != "cuda":
        return []
    return [part.strip() for part in environ.get(name, "").split(",") if part.strip()]


def _hub_token(variable: str) -> dict[str, str]:
    """Returns the hub library's variable for the token file that `variable` names. An empty file has no token."""
    file = Path.cwd() / os.environ.get(variable, "")
    return {"HF_TOKEN_PATH": str(file)} if file.is_file() and file.stat().st_size else {}


def main() -> int:
    # Without services, the default action ends the launcher: no service is left behind, and no traceback is printed.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        read_dotenv()
        options = _options()
        launcher = Launcher(options)
        if options.close:
            try:
                launcher.close(options.close)
            except StoppedError as stop:
                print(f"stopped everything; run {options.close} may be open still; the same command closes it")
                return 128 + stop.number
            return 0
        if launcher.secrets is not None:
            launcher.secrets.close_to_others(launcher.runs_dir, launcher.state)
        run_id, training_steps = launcher.check()
        try:
            launcher.train(run_id, training_steps)
        except StoppedError as stop:
            print(launcher.stopped(run_id))
            return 128 + stop.number
    except (GristmillError, RedisMissingError, SecretsError, OSError) as error:
        shown = FileError.of(error) if isinstance(error, OSError) else error
        print(f"error [{shown.code}]: {shown}", file=sys.stderr)
        return 1
    folder = launcher.runs_dir / run_id
    print(f"run {run_id} is finished; metrics, checkpoints, the final model and logs are in {folder}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    environ = os.environ
    parser.add_argument("--preset", choices=sorted(PRESETS), help="config and model together (default: quickstart)")
    parser.add_argument("--config", help="a name in configs/ or a path (default: the preset's, or CONFIG)")
    parser.add_argument("--model", help="the model that the server loads: tiny, smollm2, a path, a hub id")
    parser.add_argument("--model_name", help="weights to train if the model server was not started here")
    parser.add_argument("--run_id", help="name of the run (default: the config's)")
    parser.add_argument("--training_steps", type=int, help="optimizer steps (default: the config's); more extend a run")
    parser.add_argument("--resume", help="auto (default), never, or a checkpoint's folder; see docs/operations.md")
    parser.add_argument("--publisher", choices=["filesystem", "none"], help="none: the server may not be updated")
    parser.add_argument("--fresh", action="store_true", help="start the run again; its files so far are set apart")
    parser.add_argument("--verbose", action="store_true", help="print the output of all services")
    parser.add_argument("--close", metavar="RUN", help="end a run and exit: no training")
    parser.add_argument("--api_port", type=int, default=environ.get("API_PORT") or "8000", metavar="PORT")
    parser.add_argument("--model_port", type=int, default=environ.get("MODEL_PORT") or "9001", metavar="PORT")
    parser.add_argument("--state_dir", default=str(ROOT / ".gristmill"), help="Redis data, models, published weights")
    parser.add_argument("--runs_dir", default=str(ROOT / "runs"), help="metrics, checkpoints, final models, logs")
    options = parser.parse_args()
    options.run_id = options.run_id or environ.get("RUN_ID")
    if options.preset is None:
        options.config = options.config or environ.get("CONFIG")
        options.model = options.model or environ.get("MODEL")
    # The options that select the run and its services. Messages that print a command repeat these options.
    options.given = {
        name: value
        for name, value in vars(options).items()
        if name not in ("training_steps", "resume", "fresh", "close", "verbose")
        and value is not None
        and str(value) != parser.get_default(name)
    }
    preset = PRESETS[options.preset or "quickstart"]
    options.config = options.config or preset.config
    options.model = options.model or preset.model
    return options


if __name__ == "__main__":
    sys.exit(main())
