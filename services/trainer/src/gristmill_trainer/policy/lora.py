"""LoRA by peft: small trained matrices next to frozen weights (Hu et al. 2021).

    W' = W + (alpha / rank) B A,     A [rank, in], B [out, rank], B = 0 at the start

The adapters are inside the model, whose class does not change. Only adapters get gradients. The server gets W', or A
and B if it was started with LoRA.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy.scoring import decoder_of

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Prefix of names in peft's files. With it, PeftModel.from_pretrained reads our files.
_PREFIX = "base_model.model."
_EXPERTS_DIMENSIONS = 3
"""Dimensions of the parameter with the weights of all experts of a layer: expert, output, input."""


@dataclass(frozen=True)
class Lora:
    """Adapters on every linear layer except the head."""

    rank: int
    alpha: float
    """The product of the adapters is multiplied by alpha / rank."""


def saved_lora(folder: Path) -> Lora | None:
    """Returns the settings of the adapters in a checkpoint folder; None for a whole model. Raises ModelError."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        saved = json.loads(file.read_text())
        return Lora(int(saved["r"]), float(saved["lora_alpha"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            "adapter_unreadable", f"{file} is not readable ({error}); resume from the checkpoint before", path=file
        ) from error


def check_saved(folder: Path, asked: Lora | None) -> None:
    """Raises ModelError if a checkpoint has other adapters than `asked`. Another alpha would scale the learned ones."""
    saved = saved_lora(folder)
    if saved == asked:
        return
    there, here = (
        "a whole model" if one is None else f"LoRA adapters of rank {one.rank} and alpha {one.alpha:g}"
        for one in (saved, asked)
    )
    remedy = "0" if saved is None else f"{saved.rank} and lora_alpha to {saved.alpha:g}"
    raise ModelError(
        "lora_mismatch",
        f"the checkpoint {folder} holds {there}, and the settings ask for {here}; set lora_rank to {remedy}",
        folder=folder,
        saved=there,
        asked=here,
    )


def attach(model: Any, lora: Lora) -> None:
    """Adds adapters to `model` and freezes its other weights.

    Raises ModelError without the peft package, or for a model without linear layers or with a mixture of experts.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(
            "package_missing",
            "lora_rank needs the peft package; pip install 'peft>=0.18', or leave lora_rank out",
            package="peft",
        ) from error
    linear = {
        name.rpartition(".")[2]
        for name, module in decoder_of(model).named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    if not linear:
        raise ModelError(
            "linear_layers_missing",
            f"{type(model).__name__} has no linear layers for LoRA; leave lora_rank out",
            model=type(model).__name__,
        )
    # transformers stores the experts of a layer as one tensor, which is not a linear layer and would stay frozen.
    experts = [
        f"{name}.{own}"
        for name, module in decoder_of(model).named_modules()
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == _EXPERTS_DIMENSIONS and not isinstance(module, torch.nn.Conv1d)
    ]
    if experts:
        raise ModelError(
            "experts_unsupported",
            f"{type(model).__name__} has a mixture of experts ({experts[0]}), which LoRA would not train; leave "
            "lora_rank out to train all weights, or take a dense model",
            model=type(model).__name__,
            parameter=experts[0],
        )
    config: Any = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # a scale may be a fraction
        target_modules=sorted(linear),
        base_model_name_or_path=model.config.name_or_path,
    )
    inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # the base may be bfloat16, in which small updates would vanish
            parameter.data = parameter.data.float()


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Disables the adapters, so that the model computes as before `attach`. Not for backward passes."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's tensors with merged adapters, by their names without LoRA.

    The live tensors do not change. Tensors without an adapter are not copied. A caller that moves each tensor to the
    CPU before it asks for the next one needs memory for one merged tensor on the model's device.
    """
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {
        f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            plain = name.replace(".base_layer.", ".")
            merged = tensor.detach()
            if plain in adapted:
                (adapter,) = adapted[plain].active_adapters
                merged = merged.float() + adapted[plain].get_delta_weight(adapter).detach()
            yield plain, merged


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns only the adapters' tensors, with the names of peft's files."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    return {f"{_PREFIX}{name}": tensor.detach() for name, tensor in tensors.items()}


def describe_adapters(model: Any, folder: Path) -> None:
    """Writes adapter_config.json into `folder`."""
    model.peft_config["default"].save_pretrained(folder)


def save_adapters(model: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes `adapter_tensors` in peft's format, which `PeftModel.from_pretrained(base, folder)` reads too."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ADAPTER_WEIGHTS
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors gives the file to its owner alone
    describe_adapters(model, folder)


def load_adapters(model: Any, folder: Path) -> None:
    """Loads saved adapters into a model that `attach` prepared with the same rank. Raises ModelError."""
    from peft import set_peft_model_state_dict

    try:
        saved = load_file(folder / ADAPTER_WEIGHTS)
        result: Any = set_peft_model_state_dict(
            model, {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items()}, adapter_name="default"
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(
            "adapter_unreadable",
            f"the adapters in {folder} do not fit the model or are not readable: {error}",
            path=folder,
        ) from error
    lost = [name for name in result.missing_keys if ".lora_" in name] + list(result.unexpected_keys)
    if lost:
        raise ModelError(
            "adapter_mismatch",
            f"the adapters in {folder} are of another model: '{lost[0]}' has no counterpart",
            path=folder,
            tensor=lost[0],
        )
