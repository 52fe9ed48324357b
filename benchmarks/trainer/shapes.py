"""Models with random weights: the shapes of real models, and small shapes for a CPU."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers


@dataclass(frozen=True)
class Shape:
    """The sizes that determine a dense model's arithmetic and memory."""

    name: str
    family: Literal["Qwen2", "Qwen3"]
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = True
    lora_rank: int = 0
    """Rank of the LoRA adapters; 0 trains all weights."""


# Sizes from the models' configurations on the hub.
REAL = (
    Shape("qwen3-0.6b", "Qwen3", 151_936, 1024, 3072, 28, 16, 8, 128),
    Shape("qwen2.5-1.5b", "Qwen2", 151_936, 1536, 8960, 28, 12, 2, 128),
    Shape("qwen3-4b-lora", "Qwen3", 151_936, 2560, 9728, 36, 32, 8, 128, lora_rank=16),
)
# For a CPU: a body of 13 million parameters, and Qwen's vocabulary on a tiny body.
BODY = Shape("body", "Qwen2", 16_384, 384, 1024, 8, 6, 2, 64)
VOCABULARY = Shape("vocabulary", "Qwen2", 151_936, 256, 768, 4, 4, 2, 64)
# For trials of the script.
TINY = Shape("tiny", "Qwen3", 64, 32, 48, 2, 4, 2, 8)
TINY_LORA = Shape("tiny-lora", "Qwen2", 64, 32, 48, 2, 4, 2, 8, tied=False, lora_rank=2)

SHAPES = {shape.name: shape for shape in (*REAL, BODY, VOCABULARY, TINY, TINY_LORA)}


def save(shape: Shape, folder: Path, device: str) -> None:
    """Writes a Hugging Face folder with the same random weights at each call. On a GPU the weights are bfloat16."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{shape.family}Config")(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=65_536,
    )
    with torch.device(device):
        model = getattr(transformers, f"{shape.family}ForCausalLM")(config)
    (model.to(torch.bfloat16) if device == "cuda" else model).save_pretrained(folder)
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
