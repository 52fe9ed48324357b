"""Real services for tests without Docker: Redis, the trajectory API and vLLM as separate processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gristmill_cli.local.processes import LocalStack, Service, answers, listens
from gristmill_cli.local.redis_server import redis_command

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-model" / "bin" / "python"
# Built once and kept: the warm start of `tiny` takes minutes, and its cache is part of the tests.
MODELS_DIR = ROOT / ".gristmill" / "models"

EMBEDDINGS_KEY = "sk-embeddings"


@dataclass
class Output:
    """The merged output of a stack's processes."""

    lines: list[str] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        self.lines.append(f"{name} | {text}")
        print(f"{name:<7} | {text}")  # noqa: T201  pytest shows it where a test fails

    def of(self, name: str) -> str:
        return "\n".join(text for text in self.lines if text.startswith(f"{name} | "))


def environ(
    api_url: str, model_url: str, runs_dir: Path, config_dir: Path, weights_dir: Path, models_dir: Path = MODELS_DIR
) -> dict[str, str]:
    """The addresses of all services, for an environment or a trainer."""
    return {
        "GRISTMILL_API_URL": api_url,
        "GRISTMILL_MODEL_URL": model_url,
        "GRISTMILL_CONFIG_DIR": str(config_dir),
        "GRISTMILL_MODELS_DIR": str(models_dir),
        "GRISTMILL_WEIGHTS_DIR": str(weights_dir),
        "GRISTMILL_RUNS_DIR": str(runs_dir),
        "GRISTMILL_RUN_ID": "",
    }


def start_redis(stack: LocalStack, folder: Path, port: int) -> Service:
    folder.mkdir(parents=True, exist_ok=True)
    redis = stack.start("redis", redis_command(port, folder))
    stack.wait_until(redis, lambda: listens(port), timeout=30)
    return redis


def start_api(stack: LocalStack, redis_port: int, port: int, **environ: str) -> Service:
    """`environ`: more variables of the API, such as API_VIEW_SERVERS."""
    command = [sys.executable, "-m", "gristmill_api", "--host", "127.0.0.1", "--port", str(port)]
    api = stack.start("api", command, {"REDIS_URL": f"redis://127.0.0.1:{redis_port}/0", **environ})
    stack.wait_until(api, lambda: answers(f"http://127.0.0.1:{port}/readyz"), timeout=120)
    return api


def start_vllm(
    stack: LocalStack,
    weights_dir: Path,
    port: int,
    model: str = "tiny",
    models_dir: Path = MODELS_DIR,
    lora_rank: int = 0,
    host: str = "127.0.0.1",
    environ: Mapping[str, str] | None = None,
) -> Service:
    """The model service. Fails, and does not skip, if its virtual environment is missing: `make setup` makes it.

    `environ`: more variables, such as the hub's cache.
    """
    assert VLLM_PYTHON.exists(), f"no {VLLM_PYTHON}: run `make setup`"
    environ = {
        **(environ or {}),
        "MODEL": model,
        "MODEL_HOST": host,
        "MODEL_PORT": str(port),
        "GRISTMILL_MODELS_DIR": str(models_dir),
        "GRISTMILL_WEIGHTS_DIR": str(weights_dir),
        "LORA_RANK": str(lora_rank),
    }
    server = stack.start("model", [str(VLLM_PYTHON), "-m", "gristmill_model"], environ)
    stack.wait_until(server, lambda: answers(f"http://{host}:{port}/health"), timeout=900)
    return server


def start_embeddings(stack: LocalStack, model: Path, port: int) -> Service:
    """vLLM with the model at `model` as an embedding model named "tiny", for texts of up to 64 tokens."""
    from gristmill_model.server import IN_PROCESS  # It imports torch, which most tests with services do not need.

    assert VLLM_PYTHON.exists(), f"no {VLLM_PYTHON}: run `make setup`"
    options = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--runner": "pooling",
        "--convert": "embed",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "64",
        "--api-key": EMBEDDINGS_KEY,
        "--distributed-executor-backend": IN_PROCESS,
    }
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [text for option in options.items() for text in option]
    environ = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    server = stack.start("embed", command, {**environ, "VLLM_CPU_KVCACHE_SPACE": "1"})
    stack.wait_until(server, lambda: answers(f"http://127.0.0.1:{port}/health"), timeout=300)
    return server


@dataclass(frozen=True)
class Vllm:
    """A running model server."""

    url: str
    weights_dir: Path
    models_dir: Path
    output: Output

    def environ(self, api_url: str, runs_dir: Path, config_dir: Path = ROOT / "configs") -> dict[str, str]:
        """The variables of an environment or a trainer that uses this server."""
        return environ(api_url, self.url, runs_dir, config_dir, self.weights_dir, self.models_dir)


@dataclass(frozen=True)
class ApiServer:
    """A running trajectory API over a separate Redis."""

    url: str
    output: Output
