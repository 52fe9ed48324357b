"""The state of the policy and its optimizer, for checkpoints and publications: whole, or sharded by FSDP2."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from gristmill import Hyperparameters
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import TrainerError, WeightsError
from gristmill_trainer.policy import Policy
from gristmill_trainer.policy.lora import adapter_tensors, save_adapters
from gristmill_trainer.policy.model import gathered
from gristmill_trainer.policy.scoring import Scorer, check

_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class SavedState(Protocol):
    """The part of a learner's state that a checkpoint contains."""

    dist: DistContext

    def save_model(self, folder: Path) -> None:
        """Writes a folder that a later policy loads as its weights: a Hugging Face model, or adapters."""

    def state(self) -> dict[str, Any]:
        """Returns the other state as dicts and lists of tensors, numbers and strings, on rank 0."""


class LearnerState:
    """The state of a learner: its policy and its optimizer.

    Every rank calls the methods. Rank 0 alone returns the tensors, and writes the files, which have the format of one
    process. So a run may continue with another number of ranks.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        dist: DistContext | None = None,
    ) -> None:
        self.dist = dist or DistContext()
        self._policy = policy
        self._optimizer = optimizer
        self._copies: dict[str, Any] = {}
        """The last result of `_host_copy`, whose memory the next one uses again."""

    def staged(self) -> SavedState | None:
        """Returns a copy in host memory, which later steps do not change. The next call overwrites the copy.

        None with several processes: the copy of the whole state would need too much memory on rank 0.
        """
        if self.dist.size > 1:
            return None
        policy = self._policy
        tensors = policy.model.state_dict() if policy.lora is None else adapter_tensors(policy.model)
        self._copies = _host_copy({"model": tensors, "other": self.state()}, self._copies, {})
        return StagedState(policy, self._copies["model"], self._copies["other"])

    def check_finite(self, step: int) -> None:
        """Raises WeightsError on every rank if a weight is NaN or infinite. `step`: steps done, for the message.

        Checks the trained parameters in the dtypes of checkpoint and server. Each rank checks its own parts.
        """
        largest = {}
        for name, parameter in self._policy.model.named_parameters():
            if parameter.requires_grad:
                part = parameter.detach()
                part = part.to_local() if isinstance(part, DTensor) else part
                low, high = part.aminmax() if part.numel() else (part.new_zeros(()),) * 2  # NaN if one value is NaN.
                largest[name] = torch.maximum(-low, high)
        allowed = torch.finfo(self._policy.served_dtype).max
        # One copy to the host for all tensors, because each one waits for the device.
        on_host = torch.stack([*largest.values()]).tolist()
        wrong = {
            name: "NaN" if math.isnan(value) else f"{value:.3g}"
            for name, value in zip(largest, on_host, strict=True)
            if not value <= allowed
        }
        values = {name: value for share in self.dist.gather(wrong) for name, value in share.items()}
        if values:
            tensor, value = next(iter(values.items()))
            raise WeightsError(
                "weights_not_finite",
                f"after step {step}, {len(values)} tensors hold numbers that {self._policy.served_dtype} cannot; "
                f"first: {tensor} has {value}. These weights are neither published nor saved. Begin a run from the "
                "last checkpoint (RUN_ID=..., --resume PATH) with a lower learning_rate or max_grad_norm",
                step=step,
                tensor=tensor,
                value=value,
                tensors=len(values),
            )

    def save_model(self, folder: Path) -> None:
        """Writes a folder that a later policy loads as its weights."""
        self._policy.save(folder)

    def state(self) -> dict[str, Any]:
        """Returns the state of the optimizer, with parameters by number. Empty except on rank 0."""
        found = self._optimizer.state_dict()
        states: dict[int, dict[str, Any]] = {}
        for number, values in found["state"].items():
            whole = {name: gathered(value) for name, value in values.items()}
            if self.dist.is_main:
                # The GPU may not have room for all moments of all ranks.
                states[number] = {name: value.cpu() for name, value in whole.items()} if self.dist.size > 1 else whole
        return {"optimizer": {**found, "state": states}} if self.dist.is_main else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores rank 0's `state`, a result of `state`. Its learning rate and other settings are left out. The
        model is loaded separately.

        Other ranks' values are ignored. Raises ValueError for the state of another model.
        """
        (own,) = self._optimizer.param_groups
        saved = state["optimizer"] if self.dist.is_main else {"state": {}}
        if self.dist.is_main and (there := len(saved["param_groups"][0]["params"])) != len(own["params"]):
            raise ValueError(f"it has {there} parameters, the model {len(own['params'])}")
        states = saved["state"] if self.dist.size == 1 else self._shared(saved["state"])
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})

    def _shared(self, whole: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, Any]]:
        """Returns this rank's part of rank 0's state of the parameters."""
        # In place of each tensor that the ranks share, its dtype.
        small = {
            number: {name: value.dtype if value.dim() else value for name, value in values.items()}
            for number, values in whole.items()
        }
        small = self.dist.on_main(lambda: small)
        (own,) = self._optimizer.param_groups
        for number, values in small.items():
            parameter = own["params"][number]
            for name, value in values.items():
                if isinstance(value, torch.dtype):
                    tensor = whole[number][name] if self.dist.is_main else torch.empty(parameter.shape, dtype=value)
                    tensor = tensor.to(parameter.device)
                    values[name] = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        return small


class StagedState:
    """A copy of a `LearnerState` at one step, for a checkpoint that is written while the policy trains on."""

    def __init__(self, policy: Policy, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """`tensors`: of the model by their names in memory, or of the adapters by their names in files."""
        self.dist = DistContext()
        self._policy = policy
        self._tensors = tensors
        self._state = state

    def save_model(self, folder: Path) -> None:
        if self._policy.lora is None:
            self._policy.model.save_pretrained(folder, state_dict=dict(self._tensors), safe_serialization=True)
        else:
            save_adapters(self._policy.model, self._tensors, folder)

    def state(self) -> dict[str, Any]:
        return self._state


def _host_copy(value: Any, kept: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """Returns a copy of nested dicts, lists and tuples, with every tensor in host memory.

    `kept`: an earlier result. Its tensors are overwritten if they fit, because the kernel needs several times as
    long to provide new memory as the copy takes. `copies`: made so far, by the place of their original, so that tied
    tensors stay tied, and by their own id.
    """
    if isinstance(value, torch.Tensor):
        place = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else object()
        if place not in copies:
            fits = isinstance(kept, torch.Tensor) and (kept.dtype, kept.shape) == (value.dtype, value.shape)
            free = fits and id(kept) not in copies
            copy = kept.copy_(value.detach()) if free else value.detach().to("cpu", copy=True)
            copies[place] = copies[id(copy)] = copy
        return copies[place]
    if isinstance(value, dict):
        before = kept if isinstance(kept, dict) else {}
        return {key: _host_copy(item, before.get(key), copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        there = kept if isinstance(kept, list | tuple) and len(kept) == len(value) else [None] * len(value)
        return type(value)(_host_copy(item, before, copies) for item, before in zip(value, there, strict=True))
    return value


def check_shardable(settings: Hyperparameters) -> None:
    """Raises TrainerError for settings that need a single process."""
    if settings.lora_rank:
        raise TrainerError(
            "one_process_only",
            f"lora_rank is {settings.lora_rank}, and LoRA trains in one process; start it without torchrun, or set "
            "lora_rank to 0",
            setting="lora_rank",
        )


def shard(policy: Policy, dist: DistContext, seq_len: int = 0) -> None:
    """Shards the policy. Then rank 0 sends every rank its part of the weights, and all ranks check the scores
    (`scoring.check`, with this `seq_len`). Raises ModelError.

    Main memory holds the weights on rank 0 only, and a GPU at most one layer that is not sharded yet. Call it before
    building the optimizer, which must get the shards.
    """
    weights = policy.model.state_dict() if dist.is_main else {}
    whole = shard_parameters(policy.scorer, dist, policy.arithmetic)
    set_model_state_dict(policy.model, weights, options=_FROM_RANK_0)
    check(policy.scorer, seq_len, policy.compute)
    whole.reshard()


def shard_parameters(scorer: Scorer, dist: DistContext, arithmetic: torch.dtype) -> FSDPModule:
    """Shards each layer, then the remaining parameters together. Gradients are means over the ranks, in float32.

    The ranks compute as one process does under autocast to `arithmetic`. They gather layers in this dtype, to which
    autocast would cast the weights of products. So only the weights of a layer's norms lose digits, and a model server
    in this dtype does not have these digits either. Norms of queries and keys, as in Qwen3, have results in this dtype.
    Embeddings, head and residual stream are float32. FSDP casts no inputs: bfloat16 cannot represent a temperature of
    0.7 exactly.
    """
    parameters = list(scorer.parameters())
    mesh = init_device_mesh(parameters[0].device.type, (dist.size,))
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in scorer.layers():
        fully_shard(layer, mesh=mesh, mp_policy=replace(precision, param_dtype=arithmetic))
    # Only a backward pass would free the gathered embeddings and head of a policy.
    frozen = not any(parameter.requires_grad for parameter in parameters)
    whole = fully_shard(scorer, mesh=mesh, mp_policy=precision, reshard_after_forward=frozen or None)
    register_fsdp_forward_method(scorer, "own_logprobs")
    return whole
