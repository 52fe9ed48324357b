"""A model's tensors with the names and shapes of its files, the only format that servers read."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_Revert = Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def tied_head(model: Any) -> str | None:
    """Returns the name of the head's weight if it is the embedding table; None for a separate head."""
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        return None
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def in_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `tensor` itself if it has the type, else a CPU copy that is converted on the tensor's device."""
    return tensor if tensor.dtype == dtype or not tensor.is_floating_point() else tensor.to(dtype).cpu()


def as_in_files(model: Any, tensors: dict[str, torch.Tensor], tied: str | None) -> dict[str, torch.Tensor]:
    """Returns the model's tensors as in its files.

    `tensors`: all tensors of the model, by their names in memory. `tied`: its `tied_head`. The result has a copy of
    the tied weight as lm_head.weight, like the model server's copy of such a model.

    transformers 5 joins some tensors at loading, such as expert weights, and renames others. Joined tensors are split
    on the CPU, because the device may have too little memory for them next to the model.
    """
    revert = _revert() if getattr(model, "_weight_conversions", None) else None
    found = tensors if revert is None else revert(model, {name: tensor.cpu() for name, tensor in tensors.items()})
    return found if tied is None else {**found, "lm_head.weight": tensors[tied].clone()}


def _revert() -> _Revert | None:
    """Returns the conversion of transformers 5; None for older versions, which use the files' names in memory."""
    try:
        found: _Revert = import_module("transformers.core_model_loading").revert_weight_conversion
    except ImportError:
        return None
    return found
