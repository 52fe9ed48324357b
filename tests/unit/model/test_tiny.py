"""The shipped weights of `tiny` follow from the recipe that is shipped with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from gristmill_model import tiny
from gristmill_model.quickstart import split
from gristmill_model.tokenizer import byte_tokenizer
from gristmill_model.warmstart import IGNORED, WarmStart, _batches


def test_shipped_weights_name_the_current_recipe() -> None:
    with safe_open(tiny.WEIGHTS, framework="pt") as file:
        found = file.metadata()["recipe"]
    assert found == tiny.recipe(), "the recipe changed: train the weights again with python -m gristmill_model.tiny"


def test_build_writes_a_model_that_transformers_loads(tmp_path: Path) -> None:
    tiny.build(tmp_path)
    model: Any = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer: Any = byte_tokenizer(tiny.MAX_LENGTH)
    asked = [{"role": "user", "content": "What is 17 + 8?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "25" in tokenizer.decode(answer)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_recipe_trains_the_shipped_weights(tmp_path: Path) -> None:
    """Equal bytes on one kind of processor. Rounding differs on other processors, so there the test compares the loss
    on lessons."""
    tiny.build(tmp_path)
    shipped, trained = Qwen2ForCausalLM.from_pretrained(tmp_path), tiny.train()
    assert _loss(trained) == pytest.approx(_loss(shipped), abs=0.02)
    assert set(trained.state_dict()) == set(shipped.state_dict())


@torch.no_grad()
def _loss(model: Qwen2ForCausalLM) -> float:
    """Returns the mean negative log-likelihood per trained token of held-out lessons, in nats."""
    plan = WarmStart(steps=4, seed=11)
    total, count = 0.0, 0
    for tokens, targets in _batches(byte_tokenizer(tiny.MAX_LENGTH), split()[1], plan):
        logits = model(input_ids=tokens).logits.flatten(0, 1)
        total += functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
        count += int((targets != IGNORED).sum())
    return total / count
