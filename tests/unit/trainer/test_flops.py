"""The FLOPs that MFU counts equal the FLOPs of a real forward and backward pass."""

from __future__ import annotations

import pytest
import torch
from tests.unit.trainer.policy.models import sequences, tiny
from torch.utils.flop_counter import FlopCounterMode

from gristmill_trainer.metrics import ModelFlops, peak_tflops
from gristmill_trainer.policy.lora import Lora, attach


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_flops_formula_matches_torch_counts(tied: bool, lora: bool) -> None:
    model = tiny(tied=tied, attn_implementation="eager", attention_bias=False)
    if lora:
        attach(model, Lora(2, 2.0))
    length, trained = 40, 24
    flops = ModelFlops.of(model)
    assert flops is not None
    with FlopCounterMode(display=False) as counter:
        hidden = model.get_decoder()(input_ids=torch.tensor(sequences((length,))), use_cache=False).last_hidden_state
        model.get_output_embeddings()(hidden[0, :trained]).sum().backward()
    # Eager attention also computes the half that the mask removes.
    masked = 6 * flops.attention * length * length
    # Norms and biases are not products; the first layer's inputs get no gradient under LoRA.
    assert flops.step(length, length**2, trained) + masked == pytest.approx(
        counter.get_total_flops(), rel=0.08 if lora else 0.02
    )


def test_flops_formula_counts_attention_per_sequence() -> None:
    flops = ModelFlops(trained=1000, frozen=0, head=50, head_is_trained=True, attention=10)
    assert flops.step(3 + 5, 9 + 25, 4) == 6 * 1000 * 8 + 6 * 10 * (9 + 25) + 6 * 50 * 4
    assert ModelFlops(0, 1000, 50, False, 10).step(8, 34, 4) == 4 * 1000 * 8 + 6 * 10 * 34 + 4 * 50 * 4


def test_peak_flops_are_found_by_device_name() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("NVIDIA H200") == 989
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert peak_tflops("NVIDIA L40S") == 362
    assert peak_tflops("NVIDIA L4") == 121
    assert [peak_tflops(name) for name in ("NVIDIA RTX A4000", "NVIDIA RTX A1000", "Some CPU")] == [None] * 3
