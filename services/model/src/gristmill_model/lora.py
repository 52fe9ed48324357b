"""LoRA adapters instead of whole weights: the trainer publishes adapters, and the model's name means the trained model.

vLLM holds one adapter. `worker.Worker` replaces the adapter in place, and `LoraRouting` routes all requests through it.
The first adapter is all zeros, so before the trainer's first version the server answers as the model without an adapter
does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gristmill_model.asgi import App, Receive, Scope, Send, read_body, read_json, with_body
from gristmill_model.cache import built, locked, name_of_copy

NAME: Final = "lora"
"""vLLM's name for the adapter. Clients still send the model's name."""
SERVED_MODEL: Final = "GRISTMILL_SERVED_MODEL"
"""Variable that holds the served name. MODEL cannot replace it, because MODEL may hold a revision."""
PATHS: Final = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
    "/inference/v1/generate", "/invocations", "/generative_scoring", "/cohere/v2/chat", "/v1/systemone",
})  # fmt: skip
"""vLLM's routes that sample from the model, or score with it."""
ADAPTER_NUMBER: Final = 1
"""vLLM's number for the adapter that it was started with."""


def arguments(rank: int, adapter: Path) -> list[str]:
    """Returns vLLM's options for one adapter of at most rank `rank`, which at first is the adapter in `adapter`."""
    return [
        *("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1"),
        *("--lora-modules", json.dumps({"name": NAME, "path": str(adapter)})),
        *("--middleware", "gristmill_model.lora.LoraRouting"),
    ]


def first_adapter(weights: Path, models_dir: Path) -> Path:
    """Returns the folder with an all-zero adapter for the model in `weights`. The first call makes the adapter."""
    with locked(models_dir):
        return built(models_dir, name_of_copy(weights, "adapter"), lambda folder: _write(weights, folder))


def _write(weights: Path, folder: Path) -> None:
    """Writes an adapter of rank 1 on all linear layers except the head."""
    make: Any = AutoModelForCausalLM.from_config
    config: Any = AutoConfig.from_pretrained(weights, trust_remote_code=False)
    config._attn_implementation = None  # The model's own choice may be code from a hub.
    with torch.device("meta"):
        model = make(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    tensors: dict[str, torch.Tensor] = {}
    names: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            names.add(name.rpartition(".")[2])
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(1, module.in_features)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(module.out_features, 1)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": sorted(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


class LoraRouting:
    """ASGI middleware that puts the adapter's name into requests for the model. vLLM loads it by `--middleware`.

    vLLM serves an adapter under a separate name. In Gristmill the model's name always means the trained model, with or
    without adapters. Environments, including Atropos environments, and curl commands therefore work unchanged. The
    middleware passes a request for another model on unchanged, and vLLM refuses the request.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._model = os.environ[SERVED_MODEL]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS:
            scope, receive = with_body(scope, receive, self._led(await read_body(receive)))
        await self._app(scope, receive, send)

    def _led(self, body: bytes) -> bytes:
        """Returns the body with the adapter's name. An invalid body stays unchanged, and vLLM refuses it."""
        request = read_json(body)
        if not isinstance(request, dict):
            return body
        named = request.get("model")
        if named and named != self._model:  # To vLLM, an empty name is the model without the adapter.
            return body
        return json.dumps({**request, "model": NAME}).encode()
