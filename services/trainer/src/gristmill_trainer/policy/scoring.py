"""The module that computes the policy's scores of a micro-batch's trained tokens, and its check before training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.types import MicroBatch, Sample
from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy.attention import PACKED, packed_arguments, refusing_masks, register
from gristmill_trainer.policy.head import Entropy, Scores, head_scores

_LOG = logging.getLogger(__name__)
# Nats, largest difference of a token. Kernels differ by about 1e-5 in float32. In a trained model, attention to another
# sequence or an unknown scale of the head makes a much larger difference.
_TOLERANCE = 1e-3
# Nats, root mean square over the tokens, in bfloat16. Rounding makes differences of about 0.1 in a trained model.
_TOLERANCE_BFLOAT16 = 0.25
_LENGTHS = (12, 9, 2)
_SHARED = 7
"""Tokens that the first two of the compared sequences share from their beginning."""
_SHARING_DEVICES = frozenset({"cpu"})
"""Devices on which shared prefixes were tested. CUDA needs a kernel whose keys have other lengths than its queries."""
_FLOAT32_BYTES = 4


class Scorer(torch.nn.Module):
    """A causal language model whose forward pass returns scores instead of logits.

    `forward` contains the whole computation, including the head. With `fully_shard` on `layers()` and on this module,
    FSDP therefore gathers every parameter before its use.
    """

    def __init__(self, model: Any, *, packing: bool) -> None:
        """`model`: a transformers causal LM. Raises ModelError if the scorer cannot compute the model's head exactly,
        or its attention with `packing`. `check` finds differences that the configuration does not show."""
        super().__init__()
        self.model = model
        self.packing = packing
        self.sharing = False
        """Whether a prefix that samples of a group share may be computed once. `check` finds out."""
        self._scale = logit_scale(model)
        self.compiled = False
        """Whether torch.compile compiles the layers and the head."""
        self._own_attention = model.config._attn_implementation
        if packing:
            register()
            try:
                model.set_attn_implementation(PACKED)
            except ValueError as error:
                raise _packing_unsupported(model, error) from error

    def forward(self, micro: MicroBatch, *, entropy: Entropy = "none") -> Scores:
        """Scores the micro-batch's M targets.

        The entropy's value costs almost nothing; its gradient costs a pass over the logits in the backward pass.
        Raises ModelError for a layout that the model was not prepared for.
        """
        layout = micro.layout
        if (layout.starts is not None) != self.packing:
            has, wants = ("padded", "packed") if self.packing else ("packed", "padded")
            raise ModelError(
                "packing_mismatch",
                f"the batch is {has}, but the model was prepared for {wants} rows; set packing in one place",
                batch=has,
                model=wants,
            )
        extra = packed_arguments(layout) if self.packing else {"attention_mask": layout.attention}
        try:
            hidden: torch.Tensor = decoder_of(self.model)(
                input_ids=layout.tokens, position_ids=layout.positions, use_cache=False, **extra
            ).last_hidden_state
        except ValueError as error:
            if not self.packing:
                raise
            raise _packing_unsupported(self.model, error) from error
        states = hidden.flatten(0, 1).index_select(0, micro.sources)
        return head_scores(
            states,
            self.model.get_output_embeddings().weight,
            micro.targets,
            self._scale / micro.temperatures,
            micro.teacher_ids,
            entropy=entropy,
            compiled=self.compiled,
        )

    def own_logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns float32[L - 1]: the log-probabilities of tokens[1:] by the model's own attention and logits.

        `tokens`: int[L].
        """
        attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(self._own_attention)
        try:
            logits: torch.Tensor = self.model(input_ids=tokens[None].long(), use_cache=False).logits[0, :-1].float()
        finally:
            self.model.set_attn_implementation(attention)
        return logits.log_softmax(dim=1).gather(1, tokens[1:, None].long()).squeeze(1)

    def layers(self) -> torch.nn.ModuleList:
        """Returns the decoder's layers in order. Raises ModelError if the decoder has no `layers` list."""
        layers = getattr(decoder_of(self.model), "layers", None)
        if not isinstance(layers, torch.nn.ModuleList):
            raise ModelError(
                "decoder_layers_missing",
                f"{type(self.model).__name__} has no list of decoder layers; train it without compile and without FSDP",
                model=type(self.model).__name__,
            )
        return layers

    def checkpoint_layers(self, *, offload: bool = False) -> None:
        """Enables gradient checkpointing: only layer inputs are kept, and the backward pass recomputes the layers.

        `offload`: keeps the inputs in pinned main memory. Raises ModelError.
        """
        try:
            self.model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload)
        except ValueError as error:
            raise ModelError(
                "gradient_checkpointing_unsupported",
                f"{error}; train with --gradient_checkpointing false",
                model=type(self.model).__name__,
            ) from error
        # transformers checkpoints a layer in training only. The layer's parts stay as they are, and its dropout is off.
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True
                vars(module).update((name, 0.0) for name, value in vars(module).items() if _is_dropout(name, value))

    def compile_layers(self) -> None:
        """Lets torch.compile compile each layer and the head's chunks at their first call, once for all lengths."""
        for layer in self.layers():
            layer.compile(dynamic=True)
        self.compiled = True

    def run_eagerly(self) -> None:
        """Ends the use of compiled layers."""
        for layer in self.layers():
            layer._compiled_call_impl = None
        self.compiled = False


def logit_scale(model: Any) -> float:
    """Returns the factor on the head's output: logit_scale for Cohere, 1 / logits_scaling for Granite.

    Raises ModelError for a head with a bias or capped logits.
    """
    config = model.config
    if getattr(config, "final_logit_softcapping", None):
        raise ModelError(
            "logits_capped",
            f"'{config.name_or_path}' caps its logits, which the chunked head does not; take another model",
            model=config.name_or_path,
        )
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ModelError(
            "head_unsupported",
            f"the head of '{config.name_or_path}' is not a plain matrix, which the chunked head needs; take another "
            "model",
            model=config.name_or_path,
        )
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def fix_rotary(model: Any, longest: int) -> None:
    """Makes the rotary embedding of a token the same beside any other tokens, and the same as in vLLM.

    With longrope, transformers takes other frequencies for rows beyond the original context, and vLLM takes these for
    every sequence if it serves sequences beyond it. `longest`: tokens of the longest sequence that vLLM serves. Raises
    ModelError if an embedding depends on the row's length even so, as with dynamic scaling.
    """
    device = next(model.parameters()).device
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str) or (kind != "longrope" and "dynamic" not in kind):
                continue
            of_layer = {} if layer is None else {"layer_type": layer}

            def first(*positions: int, module: Any = module, of_layer: dict[str, str] = of_layer) -> torch.Tensor:
                numbers = torch.tensor([positions], device=device)
                found = module(torch.zeros((), device=device), numbers, **of_layer)
                parts = [found] if isinstance(found, torch.Tensor) else [*found]
                return torch.cat([part[..., 0, :].flatten() for part in parts])

            first(longest - 1)  # takes the frequencies of this length
            if kind == "longrope":
                module.rope_type = "default" if layer is None else {**module.rope_type, layer: "default"}
            if not torch.equal(first(1), first(1, longest - 1)):
                raise ModelError(
                    "rotary_depends_on_length",
                    f"the rotary embedding ({kind}) of '{model.config.name_or_path}' depends on the length of a row, so"
                    " log-probabilities would depend on the micro-batch; set MODEL_MAX_LENGTH to the model's original "
                    "context or less, or take another model",
                    model=model.config.name_or_path,
                    kind=kind,
                    longest=longest,
                )


def check(scorer: Scorer, seq_len: int = 0, compute: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """Compares the scores of three short sequences with the model's own logits.

    `seq_len`: tokens of the longest sequence to score. `compute`: context of the training's forward passes. The
    comparison is exact if the model can compute in float32. If the training computes in bfloat16, a second comparison
    runs through the kernels that train. Raises ModelError if the scores differ, or if packed rows do not support a
    sequence of this length. If only the scores of a shared prefix differ, sharing stays off. It draws no random
    numbers. Every rank calls it for a sharded model.
    """
    model, packing = scorer.model, scorer.packing
    weight = model.get_output_embeddings().weight
    device = weight.device
    # The tokens are arbitrary, but the sequences must differ.
    sequences = [(np.arange(length, dtype=np.int32) * 7 + 3 * length + 1) % len(weight) for length in _LENGTHS]
    sequences[1][:_SHARED] = sequences[0][:_SHARED]

    def batch(*, sharing: bool) -> MicroBatch:
        samples = [Sample.scored(tokens, np.arange(len(tokens)) > 0) for tokens in sequences]
        micro = collate(
            samples, range(len(samples)), np.ones(len(samples)), packing=packing, sharing=sharing, device=device
        )
        return _as_long(micro, seq_len) if packing else micro

    micro = batch(sharing=False)
    with compute():
        rounds = torch.is_autocast_enabled(device.type)
    # FSDP gathers a layer's weights in the dtype of the training.
    exact = weight.dtype.itemsize >= _FLOAT32_BYTES and not (isinstance(weight, DTensor) and rounds)
    masks = refusing_masks(micro.layout.longest) if packing else nullcontext()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), masks:
        with nullcontext() if exact else compute():
            wanted = torch.cat([scorer.own_logprobs(torch.from_numpy(tokens).to(device)) for tokens in sequences])
        if exact:
            _compare(model, float((wanted - scorer(micro).logprobs).abs().max()), _TOLERANCE, packing=packing)
        with compute():
            if not exact or rounds:
                difference = float((wanted - scorer(micro).logprobs).square().mean().sqrt())
                _compare(model, difference, _TOLERANCE_BFLOAT16, packing=packing)
        if packing:
            reason = f"shared prompts are not tested on {device.type}"
            if exact and device.type in _SHARING_DEVICES:
                difference = float((wanted - scorer(batch(sharing=True)).logprobs).abs().max())
                scorer.sharing = difference <= _TOLERANCE
                reason = f"log-probabilities of {type(model).__name__} after a shared prompt differ by {difference:.2g}"
            if not scorer.sharing:
                _LOG.info("each sequence computes its own prompt: %s", reason)


def decoder_of(model: Any) -> Any:
    """Returns the model without its head. transformers takes the whole text model of Llama 4 for its decoder."""
    found = model.get_decoder()
    return found.model if hasattr(found, "lm_head") else found


def _is_dropout(name: str, value: object) -> bool:
    return "drop" in name and isinstance(value, float)


def _packing_unsupported(model: Any, error: ValueError) -> ModelError:
    name = type(model).__name__
    return ModelError(
        "packing_unsupported", f"{name} takes no packed rows ({error}); train with --packing false", model=name
    )


def _compare(model: Any, difference: float, tolerance: float, *, packing: bool) -> None:
    """Raises ModelError if the difference is larger than the tolerance, or no number."""
    if difference <= tolerance:
        return
    if not math.isfinite(difference):
        remedy = "the weights give no numbers; start from an earlier checkpoint, or take another model"
    elif packing:
        remedy = "train with --packing false, or take another model"
    else:
        remedy = "take another model"
    raise ModelError(
        "logprobs_differ",
        f"log-probabilities of '{model.config.name_or_path}' ({type(model).__name__}) computed our way differ by "
        f"{difference:.2g} from the model's own; {remedy}",
        model=model.config.name_or_path,
        difference=difference,
    )


def _as_long(micro: MicroBatch, seq_len: int) -> MicroBatch:
    """Sets the longest sequence to `seq_len`, so that an attention without support for this length fails now."""
    return replace(micro, layout=replace(micro.layout, longest=max(micro.layout.longest, seq_len)))
