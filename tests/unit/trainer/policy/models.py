"""Small random models of the architectures that users train, and micro-batches in both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gristmill_trainer.data.types import Layout, MicroBatch
from gristmill_trainer.policy.scoring import Scorer, check

VOCABULARY = 61
ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def tiny(name: str = "qwen2", *, tied: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Returns a model with the same weights at every call. The weights are large, so that errors show."""
    config_class, model_class = ARCHITECTURES[name]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    return model_class(config_class(**(shape | changes))).to(dtype).train()


def checked_scorer(model: Any, *, packing: bool, **options: Any) -> Scorer:
    """Returns the scorer that a policy uses, after its check. Raises ModelError if the check fails."""
    scorer = Scorer(model, packing=packing)
    check(scorer, **options)
    return scorer


def sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def micro_batch(
    tokens: Sequence[Sequence[int]],
    *,
    packing: bool,
    prompt: int = 1,
    temperatures: Sequence[float] | None = None,
    teacher_ids: torch.Tensor | None = None,
) -> MicroBatch:
    """All but the first `prompt` tokens of each sequence are trained."""
    lengths = [len(one) for one in tokens]
    longest = max(lengths)
    if packing:
        layout = Layout(
            tokens=torch.tensor([[token for one in tokens for token in one]]),
            positions=torch.tensor([[place for length in lengths for place in range(length)]]),
            starts=torch.tensor([sum(lengths[:count]) for count in range(len(lengths) + 1)], dtype=torch.int32),
            parents=None,
            attention=None,
            longest=longest,
            squares=sum(length**2 for length in lengths),
        )
        first = [sum(lengths[:count]) for count in range(len(lengths))]
    else:
        layout = Layout(
            tokens=torch.tensor([[*one, *[0] * (longest - len(one))] for one in tokens]),
            positions=torch.arange(longest).expand(len(tokens), longest),
            starts=None,
            parents=None,
            attention=torch.tensor([[1] * length + [0] * (longest - length) for length in lengths]),
            longest=longest,
            squares=sum(length**2 for length in lengths),
        )
        first = [row * longest for row in range(len(lengths))]
    owner = [number for number, length in enumerate(lengths) for _ in range(prompt, length)]
    nothing = torch.zeros(len(owner))
    return MicroBatch(
        layout=layout,
        sources=torch.tensor(
            [
                begin + place - 1
                for begin, length in zip(first, lengths, strict=True)
                for place in range(prompt, length)
            ],
            dtype=torch.int64,
        ),
        targets=torch.tensor([token for one in tokens for token in one[prompt:]], dtype=torch.int64),
        sequence=torch.tensor(owner, dtype=torch.int64),
        sequences=len(tokens),
        rollout_logprobs=nothing,
        advantages=nothing,
        temperatures=torch.tensor([(temperatures or [1.0] * len(tokens))[number] for number in owner]),
        weights=nothing,
        teacher_ids=teacher_ids,
    )
