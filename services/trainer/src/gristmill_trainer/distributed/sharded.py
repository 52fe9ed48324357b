"""A policy whose parameters, gradients and optimizer state are shared out among the ranks (FSDP2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gristmill_trainer.distributed.world import World
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.optimizer import own_settings
from gristmill_trainer.policy import Policy

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def shard(policy: Policy, world: World) -> None:
    """Share the policy out: a layer at a time, and what is left as one. Every rank has loaded the same weights.

    Before the optimizer is built, which is to hold the shares. Gradients are means over the ranks, in float32.
    """
    if policy.lora is not None:
        raise TrainerError("LoRA trains in one process; leave torchrun out, or set lora_rank to 0")
    mesh = init_device_mesh(policy.device.type, (world.size,))
    cuda = policy.device.type == "cuda"
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
    for layer in policy.scorer.layers():
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy.scorer, mesh=mesh, mp_policy=precision)


class Sharded:
    """What a checkpoint and a publication take from a policy that is shared out. Every rank calls the same; only rank
    0 gets what there is to get. The files are those of one process: a run may go on with another number of ranks."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        world: World,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._schedule = schedule
        self._world = world

    def served_tensors(self) -> dict[str, torch.Tensor]:
        """On rank 0, all tensors on the CPU, the head written out although it may be tied; elsewhere nothing."""
        tensors: dict[str, Any] = get_model_state_dict(self._policy.model, options=_WHOLE)
        if tensors and "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = tensors[_embeddings_name(self._policy.model)].clone()
        return tensors

    def save_model(self, folder: Path) -> None:
        """Rank 0 writes a Hugging Face model folder."""
        tensors = get_model_state_dict(self._policy.model, options=_WHOLE)
        if self._world.leads:
            self._policy.model.save_pretrained(folder, state_dict=tensors, safe_serialization=True)

    def save_whole(self, folder: Path) -> None:
        """The same: there are no adapters."""
        self.save_model(folder)

    def state(self) -> dict[str, Any]:
        """As one process has it: parameters by number, not by name."""
        found: dict[str, Any] = get_optimizer_state_dict(self._policy.model, self._optimizer, options=_WHOLE)
        if not self._world.leads:
            return {}
        names = [name for name, _ in self._policy.model.named_parameters()]
        (group,) = found["param_groups"]
        state = {number: found["state"][name] for number, name in enumerate(names) if name in found["state"]}
        groups = [{**group, "params": list(range(len(names)))}]
        return {"optimizer": {"state": state, "param_groups": groups}, "schedule": self._schedule.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Rank 0 brings what `state` gave, the others nothing."""
        names = [name for name, _ in self._policy.model.named_parameters()]
        named: dict[str, Any] = {}
        if self._world.leads:
            one = state["optimizer"]
            (group,) = one["param_groups"]
            named = {
                "state": {names[number]: values for number, values in one["state"].items()},
                "param_groups": [{**group, "params": names}],
            }
        schedule = self._world.share(state.get("schedule", {}) if self._world.leads else None)
        with own_settings(self._optimizer, keep=not schedule):
            set_optimizer_state_dict(self._policy.model, self._optimizer, named, options=_FROM_RANK_0)
        if schedule:
            self._schedule.load_state_dict(schedule)


def _embeddings_name(model: Any) -> str:
    table = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is table)
