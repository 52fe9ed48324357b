"""A model's tensors by the names, and in the pieces, that they have in its files. Servers read no others."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_Revert = Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def tied_head(model: Any) -> str | None:
    """Name of the head's weight where that is the embedding table; None for a head of its own."""
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        return None
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def in_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` itself if it has the type. Else a copy on the CPU, converted before it leaves its device."""
    return tensor if tensor.dtype == dtype or not tensor.is_floating_point() else tensor.to(dtype).cpu()


def as_in_files(model: Any, tensors: dict[str, torch.Tensor], tied: str | None) -> dict[str, torch.Tensor]:
    """`tensors`: all of the model's, by their names in memory. `tied`: its `tied_head`, which is written out, as in the
    copy of such a model that the model server makes.

    transformers 5 joins some tensors when it loads them, such as those of experts, and renames others. What is joined
    is taken apart on the CPU: beside the model there would be no room for it.
    """
    revert = _revert() if getattr(model, "_weight_conversions", None) else None
    found = tensors if revert is None else revert(model, {name: tensor.cpu() for name, tensor in tensors.items()})
    return found if tied is None else {**found, "lm_head.weight": tensors[tied].clone()}


def _revert() -> _Revert | None:
    """None before transformers 5, which has the files' names in memory, too."""
    try:
        found: _Revert = import_module("transformers.core_model_loading").revert_weight_conversion
    except ImportError:
        return None
    return found
