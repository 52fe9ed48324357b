"""A small random model, with tied weights as in Qwen2.5."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gristmill_trainer.policy import ModelSource, Policy


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    source = ModelSource(str(model_dir), str(model_dir), None, 512)
    return Policy(source, "cpu")
