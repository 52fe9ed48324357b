"""TRL's GRPO loss on a small random model, with which tests compare our objectives."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 48
MAX_COMPLETION_LENGTH = 16

Gradient = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One of the losses that both TRL and Gristmill implement."""

    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo"]
    level: Literal["token", "sequence"] = "token"
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    cap: float = 2.0
    floor: float | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    kl_bias_correction: bool = False
    entropy_coef: float = 0.0
    temperature: float = 1.0
    old_given: bool = True
    micro_batches: int = 1


@dataclass(frozen=True)
class PaddedBatch:
    """B prompts, padded on the left to P tokens, with completions, padded on the right to T."""

    prompts: torch.Tensor
    """int64[B, P]."""
    prompt_mask: torch.Tensor
    completions: torch.Tensor
    """int64[B, T]."""
    completion_mask: torch.Tensor
    tool_mask: torch.Tensor
    """int64[B, T]: 0 in the holes that the policy did not write."""
    advantages: torch.Tensor
    """float32[B]; float64 is also possible in our code, as for all following fields."""
    old: torch.Tensor
    """float32[B, T]: log pi_old; used if the variant says that it is given."""
    rollout: torch.Tensor
    """float32[B, T]: log mu."""
    ref: torch.Tensor
    """float32[B, T]: log pi_ref."""

    @property
    def mask(self) -> torch.Tensor:
        return self.completion_mask * self.tool_mask

    def rows(self, part: slice) -> PaddedBatch:
        return PaddedBatch(**{name: value[part] for name, value in vars(self).items()})


def save_model(folder: Path) -> Path:
    """A random model of two layers, with weights large enough that its distributions are not flat."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.25,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def trl_loss(variant: Variant, batch: PaddedBatch, model_dir: Path) -> tuple[float, Gradient]:
    """Returns the loss of all micro-batches, and its gradient, as TRL computes them."""
    trainer = _trainer(variant, model_dir)
    size = len(batch.prompts) // variant.micro_batches
    total = 0.0
    for first in range(0, len(batch.prompts), size):
        inputs = _inputs(variant, batch.rows(slice(first, first + size)), batch.mask.sum())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # means over zero tokens, in TRL's log
            loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    return total, gradient(trainer.model)


def gradient(model: torch.nn.Module) -> Gradient:
    """Returns the gradient of every parameter; 0 for a parameter without one."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def _inputs(variant: Variant, batch: PaddedBatch, items: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = {
        "prompt_ids": batch.prompts,
        "prompt_mask": batch.prompt_mask,
        "completion_ids": batch.completions,
        "completion_mask": batch.completion_mask,
        "tool_mask": batch.tool_mask,
        "advantages": batch.advantages,
        "num_items_in_batch": items,
    }
    if variant.old_given:
        inputs["old_per_token_logps"] = batch.old
    if variant.beta:
        inputs["ref_per_token_logps"] = batch.ref
    if variant.correction != "none":
        inputs["importance_sampling_ratio"] = _importance(variant, (batch.old - batch.rollout) * batch.mask)
    return inputs


def _importance(variant: Variant, difference: torch.Tensor) -> torch.Tensor:
    """Computes what TRL's _generate_and_score_completions computes from the difference; that method needs a vLLM."""
    level, how = variant.correction.split("_")
    ratio = torch.exp(difference.sum(-1, keepdim=True) if level == "sequence" else difference)
    if how == "truncate":
        return ratio.clamp(min=variant.floor, max=variant.cap)
    return ratio.masked_fill((ratio > variant.cap) | (ratio < (variant.floor or 0.0)), 0.0)


def _trainer(variant: Variant, model_dir: Path) -> Any:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = GRPOConfig(
        output_dir=str(model_dir / "trl"),
        loss_type=variant.loss_type,
        importance_sampling_level=variant.level,
        epsilon=variant.epsilon,
        epsilon_high=variant.epsilon_high,
        beta=variant.beta,
        use_bias_correction_kl=variant.kl_bias_correction,
        entropy_coef=variant.entropy_coef,
        temperature=variant.temperature,
        max_completion_length=MAX_COMPLETION_LENGTH,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=variant.micro_batches,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0")),
        unk_token="t0",
        eos_token="t1",
        pad_token="t2",
    )
    trainer: Any = GRPOTrainer(
        model=str(model_dir),
        reward_funcs=_no_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["t3"] * 8}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = variant.micro_batches
    # The correction depends on use_vllm, which would look for a server when the trainer is created.
    trainer.use_vllm = variant.correction != "none"
    trainer.model.train()
    return trainer


def _no_reward(completions: list[str], **_: object) -> list[float | None]:
    return [0.0] * len(completions)
