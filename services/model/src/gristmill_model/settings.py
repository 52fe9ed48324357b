"""The model service's settings, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gristmill import Deployment
from gristmill.hosts import AllowedHosts
from gristmill_model.errors import ModelError

Device = Literal["cpu", "cuda"]
DEFAULT_PORT = 9001
DEFAULT_MAX_LENGTH = 4096
LORA_RANKS = (0, 1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM can be started with. It takes adapters of any rank up to that."""


@dataclass(frozen=True)
class Settings:
    """What to serve, where and on what."""

    model: str
    """tiny, smollm2, a path or a hub id."""
    device: Device
    host: str
    port: int
    max_length: int
    """Most tokens of prompt and completion together; the model's own limit may be lower."""
    gpu_memory: float
    """Share of the GPU's memory that vLLM may take (CUDA only)."""
    lora_rank: int
    """Highest rank of LoRA adapters that the server is to take; 0: it takes whole weights."""
    models_dir: Path
    weights_dir: Path
    hosts: AllowedHosts
    """Hosts that requests may name. The gate reads the same variable in vLLM's process."""

    @classmethod
    def read(cls, environ: Mapping[str, str], cuda_available: bool) -> Settings:
        """From `os.environ`; an empty variable counts as unset. Raises ModelError for a value that is no setting.

        DEVICE unset means: cuda where there is a GPU, else cpu.
        """
        device = environ.get("DEVICE") or ("cuda" if cuda_available else "cpu")
        if device not in ("cpu", "cuda"):
            raise ModelError(f"DEVICE={device!r} is no device; set it to cpu or cuda")
        deployment = Deployment.read(environ)
        return cls(
            model=environ.get("MODEL") or "tiny",
            device="cuda" if device == "cuda" else "cpu",
            host=environ.get("MODEL_HOST") or "127.0.0.1",
            port=int(_number(environ, "MODEL_PORT", DEFAULT_PORT)),
            max_length=int(_number(environ, "MODEL_MAX_LENGTH", DEFAULT_MAX_LENGTH)),
            lora_rank=_lora_rank(environ.get("LORA_RANK") or "0"),
            gpu_memory=_number(environ, "GPU_MEMORY_UTILIZATION", 0.85),
            models_dir=deployment.models_dir.resolve(),
            weights_dir=deployment.weights_dir.resolve(),
            hosts=AllowedHosts.read(environ),
        )

    @property
    def dtype(self) -> str:
        """The type vLLM computes in: without AVX-512, float32 is five times as fast as bfloat16 on a CPU."""
        return "float32" if self.device == "cpu" else "bfloat16"


def _lora_rank(text: str) -> int:
    if not text.isdecimal() or int(text) > LORA_RANKS[-1]:
        raise ModelError(f"LORA_RANK={text!r} is no rank; vLLM takes adapters of rank 1 to {LORA_RANKS[-1]}, 0 none")
    return next(rank for rank in LORA_RANKS if rank >= int(text))


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise ModelError(f"{name}={text!r} is not a number") from None
