"""Creation of the learner: every rank builds the same learner, and with several ranks holds a part of its state."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import ModelError, OutOfMemoryError, TrainerError
from gristmill_trainer.learner import Learner, seed_all
from gristmill_trainer.memory import Memory, gigabytes
from gristmill_trainer.model_state import LearnerState, check_shardable, shard
from gristmill_trainer.optimizer import build_optimizer
from gristmill_trainer.out_of_memory import MemoryLimits
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.settings import TrainerSettings

_LOG = logging.getLogger(__name__)
_LOWEST_ADAPTER_RATE = 5e-6


@dataclass(frozen=True)
class LearnerPlan:
    """Inputs for building the learner; rank 0 sends them to every rank."""

    source: ModelSource
    weights: str | None
    """Folder of the checkpoint to resume from; None: the source's weights. Every rank can read the folder."""
    settings: TrainerSettings
    max_completion_length: int | None
    """Most tokens of a completion in this run, or None if unknown."""
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    """Of earlier starts with several ranks."""


def build_learner(plan: LearnerPlan, dist: DistContext) -> tuple[Learner, LearnerState]:
    """Loads the model, shards it if there are several ranks, and builds the optimizer. Every rank calls it.

    Raises TrainerError on every rank for settings that the run or the number of ranks does not allow.
    """
    settings = plan.settings
    if settings.objective == "dr_grpo" and (settings.max_completion_length or plan.max_completion_length) is None:
        raise TrainerError(
            "max_completion_length_missing",
            "objective dr_grpo divides by the longest completion, and this run does not report its max_tokens; set "
            "max_completion_length in the trainer's settings",
            objective=settings.objective,
        )
    if dist.is_main and settings.objective == "dr_grpo" and settings.advantage_scale != "none":
        _LOG.warning(
            "advantages are divided by a standard deviation (advantage_scale: %s), which Dr. GRPO leaves out; for the "
            "method of the paper set advantage_scale: none next to objective: dr_grpo",
            settings.advantage_scale,
        )
    if dist.size > 1:
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
        dist=dist,
    )
    memory = _memory(policy, settings, dist)
    if dist.is_main:
        needed = "an unknown amount, because the model's config does not give its shape" if memory is None else memory
        _LOG.info("memory: the training needs %s (docs/gpu.md has the parts)", needed)
        if settings.lora_rank:
            _advise_on_adapters(settings, policy)
    if memory is not None:
        _check_state(memory, policy.device, dist, servers_sleep=plan.source.sleeps(settings))
    reference = _reference(plan, policy, dist)
    if dist.size > 1:
        shard(policy, dist, _longest(plan))
    optimizer = build_optimizer(settings, policy.trained_parameters())
    learner = Learner(
        policy,
        optimizer,
        settings,
        max_completion_length=plan.max_completion_length,
        budget=partial(_budget, policy, settings, dist),
        limits=plan.limits,
        copied_key=0.0 if memory is None else memory.per_copied_key / memory.per_token,
        reference=reference,
        dist=dist,
    )
    return learner, LearnerState(policy, optimizer, dist)


def _advise_on_adapters(settings: TrainerSettings, policy: Policy) -> None:
    """Logs settings with which LoRA works, but not as it is usually meant."""
    if settings.learning_rate < _LOWEST_ADAPTER_RATE:
        _LOG.warning(
            "learning_rate is %g, which is low for LoRA: adapters usually need 1e-5 to 1e-4, because they start at 0",
            settings.learning_rate,
        )
    if settings.publisher != "none" and not policy.publishes_adapters:
        _LOG.info(
            "the model server was started without LORA_RANK, so each publication has all weights, with the adapters "
            "merged; LORA_RANK=%d there publishes the adapters alone",
            settings.lora_rank,
        )


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes of a GPU that this process has or may still take; None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _room(device: torch.device, dist: DistContext) -> int | None:
    """Returns the least memory that a rank has for itself, in bytes; None on a CPU."""
    return min((room for room in dist.gather(free_memory(device)) if room is not None), default=None)


def _check_state(memory: Memory, device: torch.device, dist: DistContext, *, servers_sleep: bool) -> None:
    """Raises OutOfMemoryError on every rank if the state is larger than a GPU's memory beside servers that are awake.

    A publication has copies of the weights. If the servers sleep, no activations leave room for the copies.
    """
    room = _room(device, dist)
    needed = memory.state + (memory.published if servers_sleep else 0)
    if room is not None and needed > room:
        raise OutOfMemoryError(
            "model_too_large",
            f"weights, gradients and optimizer state take {gigabytes(needed)}, and the GPU has {gigabytes(room)} "
            "for the trainer; set lora_rank, take a smaller model or more GPUs, or lower GPU_MEMORY_UTILIZATION if "
            "the model server has the same GPU",
            needed=needed,
            room=room,
        )


def _memory(policy: Policy, settings: TrainerSettings, dist: DistContext) -> Memory | None:
    parameters = sum(one.numel() for one in policy.model.parameters())
    settings = settings.model_copy(update={"compile": policy.scorer.compiled})  # It may have failed meanwhile.
    return Memory.of(policy.model.config, parameters, settings, cuda=policy.device.type == "cuda", gpus=dist.size)


def _budget(policy: Policy, settings: TrainerSettings, dist: DistContext) -> int | None:
    """Returns the most tokens of a micro-batch that fit in every rank's GPU, as `Memory.planned`; None on a
    CPU, and if the model's config does not give its shape."""
    room = _room(policy.device, dist)
    memory = None if room is None else _memory(policy, settings, dist)
    if room is None or memory is None:
        return None
    tokens = memory.planned(room)
    if dist.is_main:
        _LOG.info(
            "micro-batches of up to %d tokens fit in %s; token_budget sets another number", tokens, gigabytes(room)
        )
    return max(tokens, 1)


def _longest(plan: LearnerPlan) -> int:
    """Returns the most tokens of a sequence."""
    return plan.settings.seq_len or plan.source.max_model_len


def _reference(plan: LearnerPlan, policy: Policy, dist: DistContext) -> Policy | None:
    """Returns the reference model, which is never trained. With several ranks it is sharded as the policy is.

    None without a KL penalty, or if the reference is the base model of the LoRA adapters.
    """
    named = plan.settings.ref_model
    if plan.settings.kl_beta == 0 or (plan.settings.lora_rank and named is None):
        return None
    source = plan.source if named is None else replace(plan.source, weights=named)
    reference = Policy(source, plan.settings.device, packing=plan.settings.packing, seq_len=_longest(plan), dist=dist)
    if reference.vocabulary < policy.vocabulary:
        raise ModelError(
            "reference_vocabulary",
            f"the reference model '{source.weights}' has {reference.vocabulary} tokens, and the policy has "
            f"{policy.vocabulary}; set ref_model to a model with the policy's tokenizer",
            model=source.weights,
            vocabulary=reference.vocabulary,
            of_policy=policy.vocabulary,
        )
    reference.freeze()
    if dist.size > 1:
        shard(reference, dist, _longest(plan))
    return reference
