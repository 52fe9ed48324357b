"""Model FLOPs of a step and peak FLOPS of a device, for MFU.

MFU (model FLOPs utilisation) follows PaLM (Chowdhery et al. 2022, appendix B): the FLOPs of the model's mathematics,
divided by the device's peak. Recomputation to save memory does not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Dense bfloat16 TFLOPS from the makers' data sheets (without sparsity). The first entry whose name is in the device's
# name counts, so longer names come first.
PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 150.0),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.0),
    ("RTX A6000", 155.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Returns the peak of a device by its torch.cuda.get_device_name; None if the table does not contain it."""
    return next((peak for name, peak in PEAK_TFLOPS if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True)
class ModelFlops:
    """Floating point operations of a forward and backward pass.

        sum_s [ (6 N_trained + 4 N_frozen) L_s  +  6 layers heads head_dim L_s^2 ]  +  6 V D M   (4 if frozen)

    L_s: tokens of sequence s; M: trained tokens, the only tokens that reach the head. A multiply-add is 2 operations.
    Forward pass, input gradient and weight gradient make 6 per weight and token; without the weight gradient, 4.
    PaLM's attention term has the factor 12 instead of 6, because it includes the half that a causal mask removes. The
    kernels here do not compute that half.
    """

    trained: int
    """Weights with a gradient between embedding table and head. The table needs lookups, not multiplications."""
    frozen: int
    head: int
    """V x D, for tied and separate heads."""
    head_is_trained: bool
    attention: int
    """layers x heads x head_dim."""

    @classmethod
    def of(cls, model: Any) -> ModelFlops | None:
        """Reads a transformers causal LM. Returns None for mixtures of experts, which do not use every weight."""
        config = model.config.get_text_config()  # The trained part of a model that also reads images.
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        between = [parameter for parameter in model.parameters() if parameter is not table and parameter is not head]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            trained=sum(parameter.numel() for parameter in between if parameter.requires_grad),
            frozen=sum(parameter.numel() for parameter in between if not parameter.requires_grad),
            head=head.numel(),
            head_is_trained=bool(head.requires_grad),
            attention=config.num_hidden_layers * config.num_attention_heads * head_dim,
        )

    def step(self, lengths: Sequence[int], trained_tokens: int) -> int:
        """Returns the FLOPs for sequences of `lengths` tokens with `trained_tokens` tokens in the loss."""
        body = (6 * self.trained + 4 * self.frozen) * sum(lengths)
        attention = 6 * self.attention * sum(length * length for length in lengths)
        return body + attention + (6 if self.head_is_trained else 4) * self.head * trained_tokens
