"""How the trainer calls a CUDA kernel for packed rows. An implementation in plain torch replaces the kernel."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.policy.models import checked_scorer, micro_batch, sequences, tiny
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy import attention
from gristmill_trainer.policy.attention import packed_attention
from gristmill_trainer.policy.scoring import Scorer


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """The whole row's scores, with a mask."""
    places = torch.arange(query.shape[0])
    sequence = torch.bucketize(places, ends[1:], right=True)
    mask = (sequence[:, None] == sequence) & (places[:, None] >= places)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_on_card", lambda query: True)
    monkeypatch.setattr(attention, "_fused", _kernel)
    torch._dynamo.reset()
    counters.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    torch._dynamo.reset()


def _gradients(scorer: Scorer, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    scorer.zero_grad()
    logprobs = scorer(micro_batch(sequences(lengths), packing=True)).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])


def test_packed_kernel_matches_one_call_per_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(tiny(), packing=True)
    called: list[int] = []

    def counted(*arguments: Any) -> torch.Tensor:
        called.append(1)
        return _kernel(*arguments)

    monkeypatch.setattr(attention, "_fused", counted)
    fused = _gradients(scorer, (7, 2, 19))
    assert len(called) == len(scorer.layers())
    monkeypatch.setattr(attention, "_fused", None)
    apart = _gradients(scorer, (7, 2, 19))
    for one, other in zip(fused, apart, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.02  # bfloat16


def test_kernel_that_mixes_sequences_is_found_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaks(q: Any, k: Any, v: Any, ends: torch.Tensor, longest: int, scale: float | None) -> torch.Tensor:
        return _kernel(q, k, v, ends[[0, -1]], longest, scale)

    def half() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    with torch.autocast("cpu", enabled=False):
        checked_scorer(tiny(), packing=True, compute=half)
        checked_scorer(tiny().to(torch.bfloat16), packing=True, compute=half)
        monkeypatch.setattr(attention, "_fused", leaks)
        checked_scorer(tiny(), packing=True)
        for model in (tiny(), tiny().to(torch.bfloat16)):  # The second as LoRA's frozen weights.
            with raises(ModelError, "logprobs_differ"):
                checked_scorer(model, packing=True, compute=half)


@pytest.mark.parametrize("card", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("installed", ["no", "other", "works"])
def test_flash_attention_3_is_used_if_it_is_installed_on_its_card(
    card: tuple[int, int], installed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "_fused", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    activated: list[str] = []
    if installed != "no":
        module = ModuleType("flash_attn_interface")
        module.__spec__ = ModuleSpec("flash_attn_interface", None)
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    if installed == "works":
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    caplog.set_level(logging.INFO)
    attention.register()
    hopper = card == (9, 0)
    assert activated == (["FA3"] if hopper and installed == "works" else [])
    assert ("one call of FlashAttention 3" in caplog.text) == bool(activated)
    refused = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(refused) == (hopper and installed == "other"), "torch refuses a module without kernels"
    assert attention._fused is not None


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_with_the_kernel_are_one_graph(checkpointing: bool) -> None:
    """A break would leave recomputed layers without any graph."""
    scorer = Scorer(tiny(), packing=True)
    plain = _gradients(scorer, (7, 2, 19))
    if checkpointing:
        scorer.checkpoint_layers()
    for layer in scorer.layers():
        layer.compile(dynamic=True, backend="aot_eager")
    for lengths in ((7, 2, 19), (3, 21), (5, 5, 5, 5)):
        compiled = _gradients(scorer, lengths)
        if lengths == (7, 2, 19):
            assert float((compiled[1] - plain[1]).norm() / plain[1].norm()) < 0.02
    assert counters["stats"]["unique_graphs"] > 0
    assert dict(counters["graph_break"]) == {}


@pytest.mark.parametrize(("keys", "values"), [(8, 4), (12, 12), (264, 264)])
def test_heads_that_the_kernel_refuses_use_another_implementation(
    keys: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> torch.Tensor:
        raise AssertionError("it was called")

    monkeypatch.setattr(attention, "_fused", refuses)
    q, k = (torch.randn(1, 2, 6, keys, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, 2, 6, values, dtype=torch.bfloat16)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    found, _ = packed_attention(torch.nn.Module(), q, k, v, None, cu_seq_lens_q=ends, max_length_q=4)
    assert found.shape == (1, 6, 2, values)
