"""Small random models for these tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gristmill_model.tokenizer import VOCAB_SIZE, byte_tokenizer


def save_random(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """A one-layer Qwen2 with the byte tokenizer, as save_pretrained writes it."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(64).save_pretrained(folder)
    return folder
