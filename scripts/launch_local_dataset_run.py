#!/usr/bin/env python
"""A whole training on this machine, without Docker: Redis, model server, trajectory API, environment, trainer.

    python scripts/launch_local_dataset_run.py                       the quickstart (`make local`)
    python scripts/launch_local_dataset_run.py --preset qwen         Qwen2.5-1.5B on 100 test rows, length reward
    python scripts/launch_local_dataset_run.py --config gsm8k --model smollm2

A model server that already answers on its port is used as it is (--publisher none when it may not be updated).
After `make secure` the API asks for tokens and Redis for a password; everything started here has them.
Everything started here is stopped at the end or on Ctrl-C. Exit code 0: the run is finished.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from local_processes import LocalStack, LocalStackError, Service, answers, free_port, listens
from redis_binary import RedisMissingError, redis_command
from secure import ACL, PASSWORD, Secrets, SecretsError

ROOT = Path(__file__).resolve().parent.parent
# A first start builds or downloads the model.
MODEL_TIMEOUT = 3600.0
TRAINER_LAST_SECONDS = 20.0


@dataclass(frozen=True)
class Preset:
    """What --preset fills in."""

    config: str
    model: str


PRESETS = {
    "quickstart": Preset("quickstart", "tiny"),
    "qwen": Preset("qwen_length", "Qwen/Qwen2.5-1.5B"),
}


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with LocalStack() as stack:
            try:
                _run(stack, options)
            except KeyboardInterrupt:
                print("stopping everything; start again to go on where this run is")
                return 130
    except (LocalStackError, RedisMissingError, SecretsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"finished; metrics, checkpoints and the final model are under {options.runs_dir}")
    return 0


def _run(stack: LocalStack, options: argparse.Namespace) -> None:
    api_url, model_url = f"http://127.0.0.1:{options.api_port}", f"http://127.0.0.1:{options.model_port}"
    if listens(options.api_port):
        raise LocalStackError(
            f"port {options.api_port} is taken; stop what listens there, or choose another --api_port"
        )
    state = Path(options.state_dir).absolute()
    environ = {
        "GRISTMILL_API_URL": api_url,
        "GRISTMILL_MODEL_URL": model_url,
        "GRISTMILL_CONFIG_DIR": str(ROOT / "configs"),
        "GRISTMILL_MODELS_DIR": str(state / "models"),
        "GRISTMILL_WEIGHTS_DIR": str(state / "weights"),
        "GRISTMILL_RUNS_DIR": str(Path(options.runs_dir).absolute()),
        "GRISTMILL_RUN_ID": options.run_id or "",
    }
    secrets = Secrets.find(ROOT)
    if secrets is not None:
        secrets.write()  # the commands in the user list are those of today's API
    redis_url = start_redis(stack, state, secrets)
    start_api(stack, environ, redis_url, options.api_port, secrets)
    _start_model(stack, environ, options.model, options.model_port)

    python = sys.executable
    trainer_flags = ["--publisher", options.publisher] if options.publisher else []
    trainer_flags += ["--training_steps", str(options.training_steps)] if options.training_steps else []
    trainer_flags += ["--model_name", options.model_name] if options.model_name else []
    trainer = stack.start(
        "trainer", [python, "-m", "gristmill_trainer", *trainer_flags], {**environ, **token_file("trainer", secrets)}
    )
    command = [python, "-m", "gristmill_env", "serve", "--config", options.config]
    env = stack.start("env", command, {**environ, **token_file("env", secrets)})
    _watch(env, trainer)


def start_redis(stack: LocalStack, state: Path, secrets: Secrets | None) -> str:
    folder, port = state / "redis", free_port()
    folder.mkdir(parents=True, exist_ok=True)
    users = ["--aclfile", str(secrets.path(ACL))] if secrets else []
    redis = stack.start("redis", [*redis_command(port, folder), *users])
    stack.wait_until(redis, lambda: listens(port), timeout=60)
    return f"redis://127.0.0.1:{port}/0"


def start_api(stack: LocalStack, environ: dict[str, str], redis_url: str, port: int, secrets: Secrets | None) -> None:
    command = [sys.executable, "-m", "uvicorn", "gristmill_api.app:app", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"REDIS_URL": redis_url}
    if secrets is not None:
        settings |= {"REDIS_PASSWORD_FILE": str(secrets.path(PASSWORD))}
        settings |= {"API_AUTH": "token", "API_TOKENS_DIR": str(secrets.folder)}
    api = stack.start("api", command, {**environ, **settings})
    stack.wait_until(api, lambda: answers(f"{environ['GRISTMILL_API_URL']}/readyz"), timeout=60)


def _start_model(stack: LocalStack, environ: dict[str, str], model: str, port: int) -> None:
    url = f"{environ['GRISTMILL_MODEL_URL']}/v1/models"
    if answers(url):
        print(f"using the model server that already answers at {environ['GRISTMILL_MODEL_URL']}")
        return
    python = ROOT / ".venv-model" / "bin" / "python"
    if not python.exists():
        raise LocalStackError(f"no {python}: run `make setup` first")
    service = stack.start(
        "model", [str(python), "-m", "gristmill_model"], {**environ, "MODEL": model, "MODEL_PORT": str(port)}
    )
    stack.wait_until(service, lambda: answers(url), MODEL_TIMEOUT)


def token_file(role: str, secrets: Secrets | None) -> dict[str, str]:
    """Where a service finds its token: the path, as a process' environment is there for others to read."""
    return {"GRISTMILL_API_TOKEN_FILE": str(secrets.path(role))} if secrets else {}


def _watch(env: Service, trainer: Service) -> None:
    """Wait for both to end well. The first failure ends the run."""
    deadline = None
    while True:
        for service in (env, trainer):
            if service.exit_code:
                raise LocalStackError(
                    f"{service.name} ended with exit code {service.exit_code}; its lines above say why"
                )
        if env.exit_code == 0:
            # The run is finished. The trainer ends with it, unless the run was finished before it came.
            deadline = deadline or time.monotonic() + TRAINER_LAST_SECONDS
            if trainer.exit_code == 0 or time.monotonic() > deadline:
                return
        time.sleep(0.2)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quickstart", help="config and model together")
    parser.add_argument("--config", help="a name in configs/ or a path (default: the preset's)")
    parser.add_argument("--model", help="what the model server loads: tiny, smollm2, a path, a hub id")
    parser.add_argument("--model_name", help="weights to train when the server that already runs is not ours")
    parser.add_argument("--run_id", default=os.environ.get("RUN_ID"), help="name of the run (default: the config's)")
    parser.add_argument("--training_steps", type=int, help="optimizer steps (default: the config's)")
    parser.add_argument("--publisher", choices=["filesystem", "none"], help="none: the server may not be updated")
    parser.add_argument("--api_port", type=int, default=8000)
    parser.add_argument("--model_port", type=int, default=9001)
    parser.add_argument("--state_dir", default=str(ROOT / ".gristmill"), help="Redis data, models, published weights")
    parser.add_argument("--runs_dir", default=str(ROOT / "runs"), help="metrics, checkpoints, final models")
    options = parser.parse_args()
    preset = PRESETS[options.preset]
    options.config = options.config or preset.config
    options.model = options.model or os.environ.get("MODEL") or preset.model
    return options


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
