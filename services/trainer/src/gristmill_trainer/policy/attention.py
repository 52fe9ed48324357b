"""Causal attention of packed rows: each sequence attends to itself, and no mask exists.

Registered with transformers under `PACKED`. The sequences' ends arrive as the model's keyword arguments, by the names
of transformers' flash attention (FlashAttentionKwargs); `packed_arguments` makes them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gristmill_trainer.data.tensors import Layout
from gristmill_trainer.errors import ModelError

_LOG = logging.getLogger(__name__)
PACKED = "gristmill_packed"
_AMPERE = (8, 0)  # the first that the kernels run on
# What some models ask of attention beyond q, k, v and a scale: capped scores, sinks, learned biases.
_UNKNOWN = ("softcap", "s_aux", "position_bias")

Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None], torch.Tensor]
"""(query [T, H, E], key [T, H_kv, E], value [T, H_kv, E], ends int32[S + 1], longest, scale) -> [T, H, E]."""


_fused: Varlen | None = None
"""The kernel of this process' card. Found once, and not in a layer: compiled layers cannot look for it."""


def register() -> None:
    """Make `PACKED` known to transformers. Doing it again changes nothing."""
    global _fused
    AttentionInterface.register(PACKED, packed_attention)
    if _fused is None and torch.cuda.is_available():
        found = _varlen() if torch.cuda.get_device_capability() >= _AMPERE else None
        name = "one call of a fused kernel" if found else "one call a sequence: this torch or card has no fused kernel"
        _LOG.info("attention of packed rows: %s", name)
        _fused = found


def packed_arguments(layout: Layout) -> dict[str, Any]:
    """The model's keyword arguments for a packed layout."""
    return {
        "cu_seq_lens_q": layout.starts,
        "cu_seq_lens_k": layout.starts,
        "max_length_q": layout.longest,
        "max_length_k": layout.longest,
    }


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, H, T, E], key and value [1, H_kv, T, E] -> [1, T, H, E].

    Raises ModelError for what it would not compute exactly.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ModelError(
            "packing_unsupported",
            f"{type(module).__name__} does not hand on where the packed sequences end; train with --packing false",
            model=type(module).__name__,
        )
    if sliding_window is not None and sliding_window < max_length_q:
        raise ModelError(
            "sequence_over_window",
            f"sequences of up to {max_length_q} tokens are longer than the model's attention window of "
            f"{sliding_window}, which packed rows do not have; train with --packing false, or with --seq_len up to the "
            "window",
            longest=max_length_q,
            window=sliding_window,
        )
    unknown = [name for name in _UNKNOWN if rest.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ModelError(
            "packing_unsupported",
            f"{type(module).__name__} asks for {', '.join(unknown) or 'a mask'} in its attention, "
            "which packed rows do not have; train with --packing false",
            model=type(module).__name__,
            asks_for=unknown,
        )
    varlen = _fused if _on_card(query) and _heads_fit(query, value) else None
    half = _half(query)
    if varlen is None or half is None:
        return _by_sequence(query, key, value, cu_seq_lens_q, scaling), None
    # Rotary embeddings leave queries and keys in float32 under autocast.
    q, k, v = (tensor[0].transpose(0, 1).to(half) for tensor in (query, key, value))
    return varlen(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None


def _on_card(query: torch.Tensor) -> bool:
    return query.is_cuda


def _heads_fit(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels take such heads (mha_varlen_fwd in torch's flash_api.cpp, which pads nothing)."""
    size = query.shape[-1]
    return size % 8 == 0 and size <= 256 and value.shape[-1] == size


def _half(query: torch.Tensor) -> torch.dtype | None:
    """The 16-bit type to attend in; None where it is not computed in one."""
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype if query.dtype.itemsize == 2 else None


# The ends are data: a compiled layer steps out here rather than being compiled for every batch.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """One fused attention a sequence. `split` rather than slices: its backward is one concatenation, where each
    slice's would be a tensor of the whole row."""
    lengths = ends.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    parts = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _varlen() -> Varlen | None:
    """The fused kernel for packed rows: torch's own, else the flash-attn package's, else None."""
    own: Any = _import("torch.nn.attention.varlen", "varlen_attn")
    # torch 2.10's has no grouped heads, and another way to say causal.
    if own is not None and "enable_gqa" in inspect.signature(own).parameters:
        return lambda q, k, v, ends, longest, scale: own(
            q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1]
        )
    package: Any = _import("flash_attn", "flash_attn_varlen_func")
    if package is None:
        return None
    return lambda q, k, v, ends, longest, scale: package(
        q, k, v, ends, ends, longest, longest, softmax_scale=scale, causal=True
    )


def _import(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None
