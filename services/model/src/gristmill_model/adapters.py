"""LoRA adapters instead of whole weights: vLLM's options that let the trainer publish adapters.

vLLM holds one adapter. `AdapterWorker` replaces the adapter in place, and `ThroughAdapter` routes all requests through
it. The first adapter is all zeros, so before the trainer's first version the server answers as the model without an
adapter does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gristmill_model.cache import built, locked

NAME: Final = "lora"
"""vLLM's name for the adapter. Clients still send the model's name."""


def arguments(rank: int, adapter: Path) -> list[str]:
    """Returns vLLM's options for one adapter of at most rank `rank`, which at first is the adapter in `adapter`."""
    return [
        *("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1"),
        *("--lora-modules", json.dumps({"name": NAME, "path": str(adapter)})),
        *("--middleware", "gristmill_model.through_adapter.ThroughAdapter"),
        *("--worker-extension-cls", "gristmill_model.adapter_worker.AdapterWorker"),
    ]


def first_adapter(weights: Path, models_dir: Path) -> Path:
    """Returns the folder with an all-zero adapter for the model in `weights`. The first call makes the adapter."""
    with locked(models_dir):
        return built(models_dir, f"{weights.name}-adapter", lambda folder: _write(weights, folder))


def _write(weights: Path, folder: Path) -> None:
    """Writes an adapter of rank 1 on all linear layers except the head."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make(AutoConfig.from_pretrained(weights, trust_remote_code=False), trust_remote_code=False)
    head = model.get_output_embeddings()
    tensors: dict[str, torch.Tensor] = {}
    names: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            names.add(name.rpartition(".")[2])
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(1, module.in_features)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(module.out_features, 1)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": sorted(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
