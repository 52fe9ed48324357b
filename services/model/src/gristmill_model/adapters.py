"""LoRA adapters in place of whole weights: what vLLM is started with, so that the trainer may bring them.

One adapter, which `AdapterWorker` replaces where it lies, and through which `ThroughAdapter` leads all requests. It
begins as zeros, which change nothing: before the trainer's first version the server answers as it does without.
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
"""Under which vLLM knows the adapter. Clients go on naming the model."""


def arguments(rank: int, adapter: Path) -> list[str]:
    """vLLM's command line for one adapter of at most `rank`, at first the one in `adapter`."""
    return [
        *("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1"),
        *("--lora-modules", json.dumps({"name": NAME, "path": str(adapter)})),
        *("--middleware", "gristmill_model.through_adapter.ThroughAdapter"),
        *("--worker-extension-cls", "gristmill_model.adapter_worker.AdapterWorker"),
    ]


def first_adapter(weights: Path, models_dir: Path) -> Path:
    """Folder with an adapter of zeros for the model in `weights`, made once."""
    with locked(models_dir):
        return built(models_dir, f"{weights.name}-adapter", lambda folder: _write(weights, folder))


def _write(weights: Path, folder: Path) -> None:
    """Rank 1, on all linear layers but the head."""
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
