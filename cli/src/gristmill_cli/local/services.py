"""The services of a local stack: their folders, addresses, tokens, GPUs and commands."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx

from gristmill import Deployment, SyncClient
from gristmill.internal import connections
from gristmill_cli.local.options import ROOT
from gristmill_cli.local.processes import LocalStack, LocalStackError, Service, answers, free_port, listens
from gristmill_cli.local.redis_server import redis_command
from gristmill_cli.local.secret_files import ACL, AGENT, PASSWORD, Secrets
from gristmill_cli.local.warm_server import MODEL_TIMEOUT, WarmServer

MODEL_PYTHON = ROOT / ".venv-model" / "bin" / "python"
MODEL_COMMAND = [str(MODEL_PYTHON), "-m", "gristmill_model"]
TRAINER_LAST_SECONDS = 20.0


class Services:
    """The services of one command line. Each `start_` method adds one of them to a stack."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises SecretsError if some of the files of `make secure` are missing."""
        self.options = options
        self.runs_dir = Path(options.runs_dir).expanduser().absolute()
        self.state = Path(options.state_dir).expanduser().absolute()
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
        self.warm = WarmServer(self.state / "models", options.model_port)
        self._lock: int | None = None
        """The lock of the model server that stays, if this run uses it."""
        self._run_lock: int | None = None

    def lock_run(self, stack: LocalStack, run_id: str) -> None:
        """Locks the run's folder until the stack and the trainer, which inherits the lock, have ended.

        Raises LocalStackError if another launcher trains the run: with different stores, both would train it, and write
        their steps into the same files.
        """
        folder = self.runs_dir / run_id
        in_use = LocalStackError(
            "run_in_use",
            f"another `gristmill run` trains run {run_id} in {folder} (or the trainer of one that was killed still "
            "saves its step): wait until it ends, stop it, or name another run with --run_id",
            run=run_id,
            path=folder,
        )
        self._run_lock = stack.borrow(_locked(folder / "logs" / "lock", in_use))

    def start_store(self, stack: LocalStack) -> None:
        """Starts Redis and the API."""
        if self.secrets is not None:
            self.secrets.write()  # the user list must contain the current API's commands
        redis_url = start_redis(stack, self.state, self.secrets)
        start_api(stack, self.environ, redis_url, self.options.api_port, self.secrets)

    def start_model(self, stack: LocalStack, say: Callable[[str], None]) -> None:
        """Starts the model server and waits until it answers. Uses a server that already answers on the port.

        A server of `gristmill model start` belongs to this stack until the stack has stopped.
        """
        if (record := self.warm.record()) is not None:
            say(f"using {self.warm.describe(record)}")
            self._lock = stack.borrow(self.warm.use(self.named_model, os.environ, say, alone=True))
            return
        if self.model_answers():
            say(f"using the model server that already answers at {self.model_url}")
            return
        service = stack.start("model", MODEL_COMMAND, model_environ(self.state, self.options.model, self.warm.port))
        stack.wait_until(service, self.model_answers, MODEL_TIMEOUT)

    def check_model(self) -> None:
        """Raises LocalStackError if the model server that this run borrowed has ended."""
        if self._lock is not None:
            self.warm.raise_if_ended()

    @property
    def named_model(self) -> str | None:
        """The model that the user named; None if a model server that already runs may have any model."""
        given = self.options.given
        return self.options.model if "model" in given or "preset" in given else None

    def start_trainer(self, stack: LocalStack, grace: float) -> Service:
        """Starts the trainer. `grace`: seconds that it may take for the step after SIGTERM."""
        return stack.start(
            "trainer",
            [sys.executable, "-m", trainer_module(os.environ), *self._trainer_flags()],
            {
                **self.environ,
                **_hub_token("HF_WRITE_TOKEN_FILE"),
                **token_files("trainer", self.secrets),
                **visible_gpus(os.environ, "TRAINER_GPU"),
            },
            grace=grace + TRAINER_LAST_SECONDS / 2,
            keeps=[lock for lock in (self._lock, self._run_lock) if lock is not None],
        )

    def start_env(self, stack: LocalStack) -> Service:
        """Starts the environment. It is ready when the run is open."""
        return stack.start(
            "env",
            [sys.executable, "-m", "gristmill_env", "serve", *self.env_flags()],
            {**self.environ, **_hub_token("HF_TOKEN_FILE"), **token_files("env", self.secrets)},
            ready_text=" is open at version ",
        )

    def served_models(self) -> list[str]:
        """Returns the names of the models that the server on the port serves; none if no model server answers."""
        try:
            with connections.client(self.model_url, timeout=2.0) as http:
                return [str(card["id"]) for card in http.get("/v1/models").raise_for_status().json()["data"]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return []

    def model_answers(self) -> bool:
        """Returns whether a model server answers on the port."""
        return answers(f"{self.model_url}/v1/models")

    def admin(self, patience: float = 10) -> SyncClient:
        """Returns a client of the API with the administrator's token. `patience`: seconds for which the API may be
        away."""
        token = Deployment.read(token_files("admin", self.secrets)).api_token
        return SyncClient(self.api_url, patience=patience, timeout=10, token=token)

    def env_flags(self) -> list[str]:
        """Returns the environment's flags."""
        # The environment records the number of steps, so that the trainer and a later start agree on it.
        given = {"run_id": self.options.run_id or None, "total_steps": self.options.training_steps}
        flags = ["--config", self.options.config]
        flags += [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        # The trainer's keys are in the record of the run, from which the trainer reads them.
        return flags + [word for assignment in self.options.set for word in ("--set", assignment)]

    def trainer_settings(self) -> dict[str, str]:
        """Returns the settings of the trainer that the command line gives."""
        names = ("publisher", "policy_loss", "ref_model", "model_name", "resume")
        return {name: value for name in names if (value := getattr(self.options, name))}

    def _trainer_flags(self) -> list[str]:
        return [word for name, value in self.trainer_settings().items() for word in (f"--{name}", value)]


def model_environ(state: Path, model: str, port: int) -> dict[str, str]:
    """Returns the variables of the model server that loads `model`, with its files in `state`."""
    return {
        "GRISTMILL_MODELS_DIR": str(state / "models"),
        "GRISTMILL_WEIGHTS_DIR": str(state / "weights"),
        **_as_in_compose(os.environ),
        **_hub_token("HF_TOKEN_FILE"),
        "MODEL": model,
        "MODEL_PORT": str(port),
        **visible_gpus(os.environ, "MODEL_GPU"),
    }


def start_redis(stack: LocalStack, state: Path, secrets: Secrets | None) -> str:
    """Starts Redis with its data in `state`/redis. Returns its URL.

    Raises LocalStackError if another Redis of a stack has the folder. Two would write into the same files, and destroy
    the store. Redis inherits the lock, so that the lock outlives a launcher that was killed.
    """
    folder, port = state / "redis", free_port()
    folder.mkdir(parents=True, exist_ok=True)
    users = ["--aclfile", str(secrets.path(ACL))] if secrets else []
    in_use = LocalStackError(
        "state_in_use",
        f"another stack uses the store in {folder}: stop the `gristmill run` that has it (or the redis-server that "
        "a killed one left), or choose another folder with --state_dir",
        path=folder,
    )
    with _locked(folder / "lock", in_use) as lock:
        redis = stack.start("redis", [*redis_command(port, folder), *users], keeps=(lock,))
    stack.wait_until(redis, lambda: listens(port), timeout=60)
    return f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def _locked(file: Path, in_use: LocalStackError) -> Iterator[int]:
    """Locks a file, and yields its descriptor. A process that inherits the descriptor keeps the lock after the context.

    Raises `in_use` if another process still holds the lock after some seconds: the services of a launcher that was
    killed need a moment to end.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + 5
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise in_use from None
                time.sleep(0.1)
        yield lock
    finally:
        os.close(lock)


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


def _as_in_compose(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of services that have another name in .env, or a path that starts at .env's folder."""
    values = {}
    if stack := environ.get("STACK"):
        values["GRISTMILL_STACK"] = stack
    if gigabytes := environ.get("MODEL_KV_CACHE_GB"):
        values["VLLM_CPU_KVCACHE_SPACE"] = gigabytes
    if (ports := environ.get("GATEWAY_PORT")) and not environ.get("GRISTMILL_GATEWAY_ADDRESS"):
        values["GRISTMILL_GATEWAY_ADDRESS"] = ports.partition("-")[0]  # One environment needs one port of a range.
    if key := environ.get("WANDB_API_KEY_FILE"):
        values["WANDB_API_KEY_FILE"] = str(Path.cwd() / key)
    return values


def visible_gpus(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns the variable that shows a service the GPUs of MODEL_GPU or TRAINER_GPU only, as in compose/cuda.yaml.

    Without GPUs in the variable, a service sees those that this process sees. With DEVICE=cuda, which starts one
    trainer per GPU, the trainer then sees the first of them only.
    """
    device = environ.get("DEVICE")
    gpus = [part.strip() for part in environ.get(name, "").split(",") if part.strip()]
    if device == "cpu":
        return {}
    if not gpus and device == "cuda" and name == "TRAINER_GPU":
        gpus = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def trainer_module(environ: Mapping[str, str]) -> str:
    """Returns the trainer's module: with DEVICE=cuda the one that starts a process per GPU, and none without a GPU."""
    return "gristmill_trainer.per_gpu" if environ.get("DEVICE") == "cuda" else "gristmill_trainer"


def _hub_token(variable: str) -> dict[str, str]:
    """Returns the hub library's variable for the token file that `variable` names. An empty file has no token."""
    file = Path.cwd() / os.environ.get(variable, "")
    return {"HF_TOKEN_PATH": str(file)} if file.is_file() and file.stat().st_size else {}
