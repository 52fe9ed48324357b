"""Causal attention for packed rows: each sequence attends only to itself.

Registered with transformers under `PACKED`. The model's keyword arguments pass the ends of the segments, with the
names of transformers' flash attention (FlashAttentionKwargs). `packed_arguments` creates these arguments. A segment is
a whole sequence, or follows a prefix that it shares with other sequences. Then it attends to the prefix too.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from gristmill_trainer.data.types import Layout
from gristmill_trainer.errors import ModelError

_LOG = logging.getLogger(__name__)
PACKED = "gristmill_packed"
_AMPERE = (8, 0)  # First compute capability that the kernels support.
_HOPPER = 9  # Major compute capability of the cards that FlashAttention 3 was written for.
# Attention arguments of some models beyond q, k, v and a scale: capped scores, sinks, learned biases.
_UNKNOWN = ("softcap", "s_aux", "position_bias")

Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None], torch.Tensor]
"""(query [T, H, E], key [T, H_kv, E], value [T, H_kv, E], ends int32[S + 1], longest, scale) -> [T, H, E]."""


_fused: Varlen | None = None
"""The kernel for this process' GPU. `register` finds it once, because compiled layers cannot search for it."""


def register() -> None:
    """Registers `PACKED` with transformers. A repeated call changes nothing."""
    global _fused
    AttentionInterface.register(PACKED, packed_attention)
    if _fused is None and torch.cuda.is_available():
        card = torch.cuda.get_device_capability()
        kernel = "FlashAttention 3" if card[0] == _HOPPER and _use_flash_attention_3() else "a fused kernel"
        _fused = _varlen() if card >= _AMPERE else None
        name = f"one call of {kernel}" if _fused else "one call a sequence: this torch or card has no fused kernel"
        _LOG.info("attention of packed rows: %s", name)


def packed_arguments(layout: Layout) -> dict[str, Any]:
    """Returns the model's keyword arguments for a packed layout."""
    arguments: dict[str, Any] = {
        "cu_seq_lens_q": layout.starts,
        "cu_seq_lens_k": layout.starts,
        "max_length_q": layout.longest,
        "max_length_k": layout.longest,
    }
    if layout.parents is not None:
        arguments |= {"segment_parents": layout.parents, "segment_mask": _segment_mask(layout)}
    return arguments


def _segment_mask(layout: Layout) -> torch.Tensor:
    """Returns float32[C, B + C]: 0 for the keys of a segment's queries, else -inf.

    C: tokens of the longest segment with a parent. B: the most tokens before a segment. A shorter segment, or one with
    fewer tokens before it, takes a part of the mask. So the mask exists once for all segments and layers.
    """
    assert layout.starts is not None
    assert layout.parents is not None
    lengths = layout.starts.diff()
    before = layout.positions[0, layout.starts[:-1]]
    rows = int(lengths[layout.parents >= 0].max())
    most = int(before.max())
    mask = torch.full((rows, most + rows), -torch.inf, device=layout.tokens.device)
    return mask.triu_(most + 1)


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
    segment_parents: torch.Tensor | None = None,
    segment_mask: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers: query [1, H, T, E], key and value [1, H_kv, T, E] -> [1, T, H, E].

    Raises ModelError for arguments that it cannot compute exactly.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ModelError(
            "packing_unsupported",
            f"{type(module).__name__} does not hand on where the packed sequences end; train with --packing false",
            model=type(module).__name__,
        )
    _check_window(sliding_window, max_length_q)
    unknown = [name for name in _UNKNOWN if rest.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ModelError(
            "packing_unsupported",
            f"{type(module).__name__} asks for {', '.join(unknown) or 'a mask'} in its attention, "
            "which packed rows do not have; train with --packing false",
            model=type(module).__name__,
            asks_for=unknown,
        )
    varlen = _fused if _on_card(query) and _heads_fit(query, value) and segment_parents is None else None
    half = _half(query)
    if varlen is None or half is None:
        return _by_segment(query, key, value, cu_seq_lens_q, scaling, segment_parents, segment_mask), None
    # Rotary embeddings leave queries and keys in float32 under autocast.
    q, k, v = (tensor[0].transpose(0, 1).to(half) for tensor in (query, key, value))
    return varlen(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None


@contextmanager
def refusing_masks(longest: int) -> Iterator[None]:
    """Raises ModelError for a mask whose window or chunk has fewer than `longest` tokens.

    Some models (Llama 4, Qwen2-MoE) limit attention in their masks only. Packed rows have no masks, so outside of this
    context transformers makes none.
    """

    def mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
        _check_window(local_size, longest)

    AttentionMaskInterface.register(PACKED, mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[PACKED]  # Nothing public removes it.


def _check_window(window: int | None, longest: int) -> None:
    """`window`: the most tokens that a token attends to; None or 0: all before it. Raises ModelError."""
    if window and window < longest:
        raise ModelError(
            "sequence_over_window",
            f"sequences of up to {longest} tokens are longer than the model's attention window of {window}, which "
            "packed rows do not have; train with --packing false, or with --seq_len up to the window",
            longest=longest,
            window=window,
        )


def _on_card(query: torch.Tensor) -> bool:
    return query.is_cuda


def _heads_fit(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels support these head sizes (mha_varlen_fwd in torch's flash_api.cpp, which does not pad)."""
    size = query.shape[-1]
    return size % 8 == 0 and size <= 256 and value.shape[-1] == size


def _half(query: torch.Tensor) -> torch.dtype | None:
    """Returns the 16-bit type for attention; None if the model does not compute in 16 bits."""
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype if query.dtype.itemsize == 2 else None


# The ends are data: a compiled layer leaves its graph here, because otherwise each batch would be compiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    parents: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Calls a fused attention per segment.

    The backward pass of `split` is one concatenation. With slices, each slice would need a tensor of the whole row.
    """
    lengths = ends.diff().tolist()
    queries, keys, values = (list(torch.split(tensor, lengths, dim=2)) for tensor in (query, key, value))
    attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    if parents is None or mask is None:
        outputs = [attend(q, k, v, is_causal=True) for q, k, v in zip(queries, keys, values, strict=True)]
        return torch.cat(outputs, dim=2).transpose(1, 2)
    outputs = []
    most = mask.shape[1] - mask.shape[0]
    mask = mask.to(query.dtype)
    for place, (parent, length) in enumerate(zip(parents.tolist(), lengths, strict=True)):
        own = None
        if parent >= 0:
            before = keys[parent].shape[2]
            keys[place], values[place] = (torch.cat((of[parent], of[place]), dim=2) for of in (keys, values))
            own = mask[:length, most - before : most + length]
        outputs.append(attend(queries[place], keys[place], values[place], attn_mask=own, is_causal=own is None))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _use_flash_attention_3() -> bool:
    """Lets torch use the kernels of FlashAttention 3 from now on. Returns False if its package is not installed, or if
    this torch cannot use it."""
    activate = _import("torch.nn.attention", "activate_flash_attention_impl")
    if activate is None or find_spec("flash_attn_interface") is None:
        return False
    try:
        activate("FA3")
    except (ImportError, OSError, RuntimeError) as error:
        _LOG.warning("torch %s cannot use the FlashAttention 3 that is installed: %s", torch.__version__, error)
        return False
    return True


def _varlen() -> Varlen | None:
    """Returns the fused kernel for packed rows: from torch, else from the flash-attn package, else None."""
    own: Any = _import("torch.nn.attention.varlen", "varlen_attn")
    options = inspect.signature(own).parameters if own is not None else {}
    # The kernel of torch 2.10 has another argument for causal attention. In 2.12 and 2.13, grouped heads need a flag.
    if "enable_gqa" in options:
        return lambda q, k, v, ends, longest, scale: own(
            q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1]
        )
    if "window_size" in options:
        return lambda q, k, v, ends, longest, scale: own(
            q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0)
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
