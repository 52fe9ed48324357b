"""The learner, put together: the same on every rank."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill_trainer.checkpoint import SingleProcess
from gristmill_trainer.checkpoint.random_state import seed_all
from gristmill_trainer.distributed.crew import Crew, Parts
from gristmill_trainer.distributed.sharded import Sharded, check_shardable, shard
from gristmill_trainer.distributed.world import World
from gristmill_trainer.errors import ModelError, TrainerError
from gristmill_trainer.learner import Learner
from gristmill_trainer.optimizer import build_optimizer, build_schedule
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.settings import TrainerSettings

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerPlan:
    """What rank 0 found out, and every rank builds from."""

    source: ModelSource
    weights: str | None
    """Folder of the checkpoint that is resumed from; None: the source's own weights. Every rank can read it."""
    settings: TrainerSettings
    max_completion_length: int | None
    """Most tokens of a completion in this run, where that is known."""


def build_crew(plan: LearnerPlan, world: World) -> Crew:
    """Load the model, share it out where there are several ranks, and build optimizer and schedule. Raises
    TrainerError, on every rank, for settings that the run or the number of ranks does not allow."""
    settings = plan.settings
    if settings.objective == "dr_grpo" and (settings.max_completion_length or plan.max_completion_length) is None:
        raise TrainerError(
            "max_completion_length_missing",
            "objective dr_grpo divides by the longest completion, and this run does not tell its max_tokens; set "
            "max_completion_length in the trainer's settings",
            objective=settings.objective,
        )
    if world.leads and settings.objective == "dr_grpo" and settings.advantage_scale != "none":
        _LOG.warning(
            "advantages are divided by a standard deviation (advantage_scale: %s), which Dr. GRPO leaves out; for the "
            "method of the paper set advantage_scale: none next to objective: dr_grpo",
            settings.advantage_scale,
        )
    if world.size > 1:
        check_shardable(settings)
    seed_all(settings.seed)
    policy = Policy(
        plan.source,
        settings.device,
        plan.weights,
        packing=settings.packing,
        seq_len=_longest(plan),
        checkpointing=settings.gradient_checkpointing,
        compiled=settings.compile,
        lora=Lora(settings.lora_rank, settings.lora_alpha) if settings.lora_rank else None,
    )
    if plan.weights is not None and settings.lora_rank:
        _compare_alpha(Path(plan.weights), settings.lora_alpha)
    reference = _reference(plan)
    if world.size > 1:
        shard(policy, world)
    optimizer = build_optimizer(settings, policy.trained_parameters())
    schedule = build_schedule(optimizer, settings, settings.training_steps)
    learner = Learner(
        policy,
        optimizer,
        settings,
        schedule=schedule,
        max_completion_length=plan.max_completion_length,
        reference=reference,
        world=world,
    )
    parts: Parts = (
        SingleProcess(policy, optimizer, schedule) if world.size == 1 else Sharded(policy, optimizer, schedule, world)
    )
    return Crew(learner, parts, world)


def _longest(plan: LearnerPlan) -> int:
    """Tokens that a sequence may have."""
    return plan.settings.seq_len or plan.source.max_model_len


def _compare_alpha(folder: Path, asked: float) -> None:
    """Of a checkpoint of adapters that `Policy` has loaded. Another scale would make them another policy."""
    saved = float(json.loads((folder / "adapter_config.json").read_text())["lora_alpha"])
    if saved != asked:
        raise ModelError(
            "lora_alpha_mismatch",
            f"the checkpoint {folder} holds LoRA adapters of alpha {saved:g}, but lora_alpha is {asked:g}; "
            f"set lora_alpha to {saved:g}",
            folder=folder,
            saved=saved,
            lora_alpha=asked,
        )


def _reference(plan: LearnerPlan) -> Policy | None:
    """The reference model, whole on every rank; it is never trained. None without a KL penalty, and where it is the
    model that LoRA adapters began on."""
    named = plan.settings.ref_model
    if plan.settings.kl_beta == 0 or (plan.settings.lora_rank and named is None):
        return None
    source = plan.source if named is None else replace(plan.source, weights=named)
    reference = Policy(source, plan.settings.device, packing=plan.settings.packing, seq_len=_longest(plan))
    reference.model.requires_grad_(False)
    return reference
