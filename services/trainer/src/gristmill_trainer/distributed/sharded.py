"""A policy whose parameters, gradients and optimizer state are shared out among the ranks (FSDP2)."""

from __future__ import annotations

from dataclasses import replace
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
from torch.distributed.tensor import DTensor

from gristmill import Hyperparameters
from gristmill_trainer.distributed.world import World
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.optimizer import load_schedule, own_settings
from gristmill_trainer.policy import Policy
from gristmill_trainer.policy.files import as_in_files, in_type, tied_head

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def check_shardable(settings: Hyperparameters) -> None:
    """Raises TrainerError for what trains in one process only."""
    if settings.lora_rank:
        raise TrainerError(
            "one_process_only",
            f"lora_rank is {settings.lora_rank}, and LoRA trains in one process; start it without torchrun, or set "
            "lora_rank to 0",
            setting="lora_rank",
        )
    if settings.optimizer == "adamw_8bit":
        raise TrainerError(
            "one_process_only",
            "adamw_8bit trains in one process; start it without torchrun, or set optimizer to adamw: its state is "
            "shared out among the processes",
            setting="optimizer",
        )


def shard(policy: Policy, world: World) -> None:
    """Share the policy out: a layer at a time, and what is left as one. Every rank has loaded the same weights.

    Before the optimizer is built, which is to hold the shares. Gradients are means over the ranks, in float32.
    """
    mesh = init_device_mesh(policy.device.type, (world.size,))
    cuda = policy.device.type == "cuda"
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
    for layer in policy.scorer.layers():
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # What goes into the whole are a micro-batch's own numbers: a temperature of 0.7 is not one in bfloat16.
    fully_shard(policy.scorer, mesh=mesh, mp_policy=replace(precision, cast_forward_inputs=False))


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
        model = policy.model
        # As the optimizer numbers them: a tied one once, by its first name.
        self._names = [name for name, _ in model.named_parameters()]
        self._tied_head = tied_head(model)

    def served_tensors(self) -> dict[str, torch.Tensor]:
        """On rank 0, all tensors on the CPU in the type that the server computes in, the head written out although it
        may be tied; elsewhere nothing."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self._policy.model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._world.leads:
                tensors[name] = in_type(whole.detach(), self._policy.served_dtype).cpu()
        return as_in_files(self._policy.model, tensors, self._tied_head) if tensors else {}

    def save_model(self, folder: Path) -> None:
        """Rank 0 writes a Hugging Face model folder, tied as the original."""
        tensors = self._whole()
        if self._world.leads:
            if self._tied_head is not None:
                del tensors[self._tied_head]
            self._policy.model.save_pretrained(folder, state_dict=tensors, safe_serialization=True)

    def save_whole(self, folder: Path) -> None:
        """The same: there are no adapters."""
        self.save_model(folder)

    def state(self) -> dict[str, Any]:
        """As one process has it: parameters by number, not by name."""
        found: dict[str, Any] = get_optimizer_state_dict(self._policy.model, self._optimizer, options=_WHOLE)
        if not self._world.leads:
            return {}
        (group,) = found["param_groups"]
        state = {number: found["state"][name] for number, name in enumerate(self._names) if name in found["state"]}
        groups = [{**group, "params": list(range(len(self._names)))}]
        return {"optimizer": {"state": state, "param_groups": groups}, "schedule": self._schedule.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Rank 0 brings what `state` gave, here or in one process; the others nothing. Raises ValueError for the state
        of another model."""
        named: dict[str, Any] = {}
        if self._world.leads:
            one = state["optimizer"]
            (group,) = one["param_groups"]
            if len(group["params"]) != len(self._names):
                raise ValueError(f"it has {len(group['params'])} parameters, the model {len(self._names)}")
            named = {
                "state": {self._names[number]: values for number, values in one["state"].items()},
                "param_groups": [{**group, "params": self._names}],
            }
        schedule = self._world.share(state.get("schedule", {}) if self._world.leads else None)
        with own_settings(self._optimizer, keep=not schedule):
            set_optimizer_state_dict(self._policy.model, self._optimizer, named, options=_FROM_RANK_0)
        if schedule:
            load_schedule(self._schedule, schedule)

    def _whole(self) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = get_model_state_dict(self._policy.model, options=_WHOLE)
        return found
