"""The model service's settings, read from the environment once."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gristmill import Deployment
from gristmill.internal.hosts import AllowedHosts
from gristmill_model.errors import ModelError

EMBEDDED: Final = ("tiny", "smollm2")
"""Models that we ship."""
HUB_ID: Final = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?"
)
"""OWNER/NAME, or OWNER/NAME@REVISION with a commit, tag or branch."""
Device = Literal["cpu", "cuda"]
DEFAULT_PORT = 9001
DEFAULT_MAX_LENGTH = 4096
NO_PARSER: Final = "none"
"""The value of MODEL_TOOL_PARSER and MODEL_REASONING_PARSER for a server without that parser."""
LORA_RANKS = (0, 1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM can be started with. It takes adapters of any rank up to that."""
SHARED_GPU: Final = 0.45
OWN_GPU: Final = 0.85
"""Share of a GPU's memory for vLLM, if the trainer uses the same GPU and if it does not."""

_NOT_EXTRA: Final[Mapping[str, str]] = {
    "--model": "MODEL",
    "--served-model-name": "MODEL",
    "--tokenizer": "MODEL",
    "--host": "MODEL_HOST",
    "--port": "MODEL_PORT",
    "--max-model-len": "MODEL_MAX_LENGTH",
    "--gpu-memory-utilization": "GPU_MEMORY_UTILIZATION",
    "--tensor-parallel-size": "MODEL_TENSOR_PARALLEL",
    "--enforce-eager": "MODEL_CUDA_GRAPHS",
    "--enable-sleep-mode": "MODEL_SLEEP",
    "--enable-lora": "LORA_RANK",
    "--max-lora-rank": "LORA_RANK",
    "--max-loras": "LORA_RANK",
    "--lora-modules": "LORA_RANK",
    "--enable-auto-tool-choice": "MODEL_TOOL_PARSER",
    "--tool-call-parser": "MODEL_TOOL_PARSER",
    "--reasoning-parser": "MODEL_REASONING_PARSER",
    "--api-key": "",
    "--ssl-keyfile": "",
    "--ssl-certfile": "",
    "--uds": "",
    "--root-path": "",
    "--worker-extension-cls": "",
    "--dtype": "",
    "--logprobs-mode": "",
    "--override-generation-config": "",
    "--middleware": "",
    "--disable-access-log-for-endpoints": "",
    "--distributed-executor-backend": "",
    "--shutdown-timeout": "",
    "--enable-scale-out": "",
    "--enable-prefix-caching": "",
    "--trust-remote-code": "",
    "--config": "",
}
"""vLLM's options that VLLM_ARGS may not set, and the variable that sets each, if there is one. The service sets them so
that weights can be updated and logprobs are the policy's, and that the other services reach it. The last two would read
code or options from a file."""


@dataclass(frozen=True)
class Settings:
    """What to serve, where and on what."""

    model: str
    """tiny, smollm2, a path or a hub id, with @REVISION if it is pinned."""
    device: Device
    host: str
    port: int
    max_length: int
    """Most tokens of prompt and completion together; the model's own limit may be lower."""
    gpu_memory: float
    """Share of each GPU's memory that vLLM may take (CUDA only)."""
    tensor_parallel: int
    """GPUs that the model is split over (CUDA only)."""
    cuda_graphs: bool
    """Whether vLLM captures CUDA graphs and compiles the model (CUDA only). Weight updates of vLLM 0.32 copy into the
    memory that the graphs read, so they do not keep old weights."""
    sleep: bool
    """Whether the trainer may let vLLM sleep during its steps. On a CPU, vLLM then pauses and frees no memory."""
    vllm_args: tuple[str, ...]
    """Further arguments of vLLM's command line."""
    lora_rank: int
    """Highest rank of LoRA adapters that the server is to take; 0: it takes whole weights."""
    tool_parser: str
    """Name of vLLM's parser of tool calls; empty: by the model's family; NO_PARSER: none."""
    reasoning_parser: str
    """Name of vLLM's parser of reasoning, as `tool_parser`."""
    models_dir: Path
    weights_dir: Path
    hosts: AllowedHosts
    """Hosts that requests may name. The gate reads the same variable in vLLM's process."""

    @classmethod
    def read(cls, environ: Mapping[str, str], cuda_available: bool) -> Settings:
        """Reads `os.environ`. An empty variable counts as unset. Raises ModelError for a value that is not valid.

        Without DEVICE, the device is cuda if the machine has a GPU, else cpu.
        """
        device = environ.get("DEVICE") or ("cuda" if cuda_available else "cpu")
        if device not in ("cpu", "cuda"):
            raise ModelError(
                "invalid_variable",
                f"DEVICE={device!r} is not a device; set it to cpu or cuda",
                variable="DEVICE",
                value=device,
            )
        deployment = Deployment.read(environ)
        return cls(
            model=environ.get("MODEL") or "tiny",
            device="cuda" if device == "cuda" else "cpu",
            host=environ.get("MODEL_HOST") or "127.0.0.1",
            port=_whole(environ, "MODEL_PORT", DEFAULT_PORT, 2**16 - 1),
            max_length=_whole(environ, "MODEL_MAX_LENGTH", DEFAULT_MAX_LENGTH, 2**31 - 1),
            lora_rank=_lora_rank(environ.get("LORA_RANK") or "0"),
            gpu_memory=_number(environ, "GPU_MEMORY_UTILIZATION", _gpu_share(environ)),
            tensor_parallel=_tensor_parallel(environ, device),
            cuda_graphs=device == "cuda" and _flag(environ, "MODEL_CUDA_GRAPHS", default=True),
            sleep=_flag(environ, "MODEL_SLEEP", default=False),
            vllm_args=_vllm_args(environ.get("VLLM_ARGS") or ""),
            tool_parser=environ.get("MODEL_TOOL_PARSER") or "",
            reasoning_parser=environ.get("MODEL_REASONING_PARSER") or "",
            models_dir=deployment.models_dir.resolve(),
            weights_dir=deployment.weights_dir.resolve(),
            hosts=AllowedHosts.read(environ),
        )

    @property
    def dtype(self) -> str:
        """The type vLLM computes in: without AVX-512, float32 is five times as fast as bfloat16 on a CPU."""
        return "float32" if self.device == "cpu" else "bfloat16"


def named(requested: str) -> re.Match[str] | None:
    """The parts of a hub id (`HUB_ID`), or None for a model that is not on a hub. Asks no hub and builds nothing.

    Raises:
        ModelError: it is neither a hub id, nor the name of a model that we ship, nor a folder with a config.json.
    """
    if requested in EMBEDDED:
        return None
    folder = Path(requested).expanduser()
    if not requested.startswith((".", "/", "~")) and not folder.is_dir() and (hub := HUB_ID.fullmatch(requested)):
        return hub
    if not folder.is_dir():
        raise ModelError(
            "model_missing",
            f"MODEL={requested!r} is neither a folder here nor a hub id (OWNER/NAME or OWNER/NAME@REVISION); "
            f"set MODEL to one of {', '.join(EMBEDDED)}, a folder with a config.json, or a hub id",
            model=requested,
            known=EMBEDDED,
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            "model_config_missing",
            f"MODEL={folder.resolve()} holds no config.json; name the folder that save_pretrained wrote",
            model=str(folder.resolve()),
        )
    return None


def served_name(model: str) -> str:
    """Returns the name that the model server answers to if it loads `model`. Raises ModelError for an invalid name."""
    hub = named(model)
    return hub[1] if hub else model


def _gpus(environ: Mapping[str, str], name: str) -> set[str]:
    """The GPUs of a variable such as MODEL_GPU=0,1."""
    return {part.strip() for part in (environ.get(name) or "").split(",") if part.strip()}


def _gpu_share(environ: Mapping[str, str]) -> float:
    ours, trainers = _gpus(environ, "MODEL_GPU"), _gpus(environ, "TRAINER_GPU")
    # Without the variables, as on a machine with one GPU, the trainer may use the same one. So it may when one variable
    # has numbers and the other has UUIDs, because a UUID does not say which number it is.
    comparable = len({gpu.isdecimal() for gpu in ours | trainers}) == 1
    return OWN_GPU if ours and trainers and comparable and ours.isdisjoint(trainers) else SHARED_GPU


def _tensor_parallel(environ: Mapping[str, str], device: str) -> int:
    text = environ.get("MODEL_TENSOR_PARALLEL") or "0"
    if not text.isdecimal():
        raise ModelError(
            "invalid_variable",
            f"MODEL_TENSOR_PARALLEL={text!r} is not a number of GPUs",
            variable="MODEL_TENSOR_PARALLEL",
            value=text,
        )
    if device == "cpu":
        if int(text) > 1:
            raise ModelError(
                "needs_cuda", f"MODEL_TENSOR_PARALLEL={text} needs DEVICE=cuda", setting="MODEL_TENSOR_PARALLEL"
            )
        return 1
    return int(text) or max(1, len(_gpus(environ, "MODEL_GPU")))


def _vllm_args(text: str) -> tuple[str, ...]:
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise ModelError(
            "invalid_variable", f"VLLM_ARGS={text!r} cannot be split into words: {error}", variable="VLLM_ARGS"
        ) from None
    for argument in arguments:
        option = "--tensor-parallel-size" if argument.startswith("-tp") else argument
        if not option.startswith("--"):
            continue
        # As vLLM reads it: --a_b is --a-b, --a.key sets one key of --a, --no-a turns --a off, and a beginning will do.
        name = option.partition("=")[0].partition(".")[0].replace("_", "-").replace("--no-", "--", 1)
        taken = next((known for known in sorted(_NOT_EXTRA) if known.startswith(name)), None)
        if taken is not None:
            remedy = f"set {_NOT_EXTRA[taken]} instead" if _NOT_EXTRA[taken] else "leave it out"
            raise ModelError(
                "vllm_option_taken",
                f"VLLM_ARGS may not hold {argument}, because the model service sets {taken}: {remedy}",
                option=taken,
                variable=_NOT_EXTRA[taken],
            )
    return arguments


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environ.get(name) or str(int(default))
    if text not in ("0", "1"):
        raise ModelError("invalid_variable", f"{name}={text!r} is neither 0 nor 1", variable=name, value=text)
    return text == "1"


def _lora_rank(text: str) -> int:
    if not text.isdecimal() or int(text) > LORA_RANKS[-1]:
        raise ModelError(
            "invalid_variable",
            f"LORA_RANK={text!r} is not a rank; vLLM takes adapters of rank 1 to {LORA_RANKS[-1]}, 0 means none",
            variable="LORA_RANK",
            value=text,
        )
    return next(rank for rank in LORA_RANKS if rank >= int(text))


def _whole(environ: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = environ.get(name) or str(default)
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= most:
        raise ModelError(
            "invalid_variable", f"{name}={text!r} is not a whole number from 1 to {most}", variable=name, value=text
        )
    return int(text)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ModelError("invalid_variable", f"{name}={text!r} is not a number", variable=name, value=text)
    return value
