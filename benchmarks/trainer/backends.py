"""The compared backends: Gristmill's learner and TRL's GRPOTrainer, with the same weights, batch and objective."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from benchmarks.trainer.batch import Load, Sequence, padded, samples
from benchmarks.trainer.shapes import Shape

from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.settings import TrainerSettings

Name = Literal["ours", "eager", "whole", "trl"]
"""eager: ours without torch.compile, which is the default on CUDA. whole: ours without shared prompts."""
_LEARNING_RATE = 1e-6
_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Setting:
    """The inputs of both backends."""

    shape: Shape
    folder: str
    """Folder of the shape's weights."""
    load: Load
    device: Literal["cpu", "cuda"]
    checkpointing: bool = False


@dataclass(frozen=True)
class Stepped:
    """The results of a step. If they differ, the two backends computed different things."""

    loss: float
    grad_norm: float
    """Gradient norm before clipping."""


class Backend(Protocol):
    model: Any

    def step(self) -> Stepped:
        """Takes one optimizer step on the batch."""


def missing(name: Name, shape: Shape) -> str | None:
    """Returns the package that this backend lacks, or None."""
    wanted = ["trl", "datasets"] if name == "trl" else []
    if shape.lora_rank:
        wanted.append("peft")
    return next((package for package in wanted if importlib.util.find_spec(package) is None), None)


def build(name: Name, setting: Setting, batch: list[Sequence]) -> Backend:
    return Trl(setting, batch) if name == "trl" else Ours(setting, batch, eager=name == "eager", whole=name == "whole")


class Ours:
    """Gristmill's backend: `Learner.step`, from samples in numpy to the step's measures."""

    def __init__(self, setting: Setting, batch: list[Sequence], *, eager: bool = False, whole: bool = False) -> None:
        load = setting.load
        settings = TrainerSettings.model_validate(
            {
                "device": setting.device,
                "batch_size": load.micro_batch,
                "gradient_accumulation_steps": load.sequences // load.micro_batch,
                "objective": "dapo",
                "importance_correction": "none",
                "learning_rate": _LEARNING_RATE,
                "max_grad_norm": _MAX_GRAD_NORM,
                "gradient_checkpointing": setting.checkpointing,
                "compile": False if eager else None,
                "lora_rank": setting.shape.lora_rank,
            }
        )
        served = "bfloat16" if setting.device == "cuda" else "float32"
        source = ModelSource(setting.folder, setting.folder, None, max(2, load.tokens), served_dtype=served)
        self.settings = settings
        self.learner, _ = build_learner(LearnerPlan(source, None, settings, None), DistContext())
        self.learner.sharing = self.learner.sharing and not whole
        self._samples = samples(batch)
        self._steps = 0
        self.model = self.learner.policy.model

    def step(self) -> Stepped:
        self._steps += 1
        result = self.learner.step(self._samples, self._steps)
        return Stepped(result.loss, result.grad_norm)


class Trl:
    """TRL's backend: `GRPOTrainer._compute_loss` on micro-batches of the padded batch, and TRL's optimizer."""

    def __init__(self, setting: Setting, batch: list[Sequence]) -> None:
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        load, shape = setting.load, setting.shape
        # The benchmark cuts the micro-batches itself and does not use TRL's batching.
        config = GRPOConfig(
            output_dir=str(Path(setting.folder) / "trl"),
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=_LEARNING_RATE,
            per_device_train_batch_size=2,
            num_generations=2,
            use_cpu=setting.device == "cpu",
            bf16=setting.device == "cuda",
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        )
        trainer: Any = GRPOTrainer(
            model=setting.folder,
            reward_funcs=_no_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["t3"] * 2}),
            processing_class=_tokenizer(),
            peft_config=_adapters(shape.lora_rank) if shape.lora_rank else None,
        )
        trainer.create_optimizer()
        self._trainer: Any = trainer
        self.model: Any = trainer.model
        if setting.checkpointing:
            self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        # TRL divides the loss by all tokens of the batch, `num_items_in_batch`, and by the ratio of these two.
        self._trainer.current_gradient_accumulation_steps = self._trainer.args.steps_per_generation
        whole = {name: tensor.to(self._trainer.accelerator.device) for name, tensor in padded(batch, pad=2).items()}
        items = whole["completion_mask"].sum()
        self._micro_batches = [
            {name: tensor[first : first + load.micro_batch] for name, tensor in whole.items()}
            | {"num_items_in_batch": items}
            for first in range(0, load.sequences, load.micro_batch)
        ]

    def step(self) -> Stepped:
        total = 0.0
        for inputs in self._micro_batches:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # TRL logs means over zero tokens
                loss = self._trainer._compute_loss(self.model, inputs)
            loss.backward()
            total += loss.item()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, _MAX_GRAD_NORM))
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad(set_to_none=True)
        self._trainer._metrics["train"].clear()
        return Stepped(total, norm)


def _tokenizer() -> Any:
    """Returns a minimal tokenizer, because TRL requires a tokenizer. The benchmark tokenizes no text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(4)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        unk_token="t0",
        eos_token="t1",
        pad_token="t2",
    )


def _adapters(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def _no_reward(completions: list[str], **_: object) -> list[float | None]:
    return [0.0] * len(completions)
