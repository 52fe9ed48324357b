"""The hyperparameters of a run: its `trainer:` block.

A run may set these and nothing else, because an environment's token is enough to open a run. Plug-ins, paths, URLs,
uploads and experiment tracking belong to the machine of the trainer: trainer.yaml and the trainer's command line set
them (`gristmill_trainer.settings`). The environment, `check`, the API and the trainer all validate the block here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gristmill.errors import ConfigError
from gristmill.internal.settings import Settings, parse

ObjectiveName = Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "gspo"]

TRAINER_ONLY = frozenset(
    {
        "atropos_run",
        "base_url",
        "checkpoints_kept",
        "device",
        "metrics_address",
        "model_name",
        "on_step",
        "peak_tflops",
        "policy_loss",
        "publisher",
        "push_to_hub",
        "record_rollouts",
        "ref_model",
        "resume",
        "rollout_server_url",
        "stop_grace_seconds",
        "tensorboard",
        "use_wandb",
        "wandb_name",
        "wandb_project",
    }
)
"""Settings of the trainer that no run may carry."""


_TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def _steps_or_time(value: Any) -> Any:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    above_0 = float(match["number"]) > 0 if match else isinstance(value, int) and value > 0
    if not above_0 or isinstance(value, bool):
        raise PydanticCustomError(
            "interval_invalid",
            "must be a number of steps from 1, such as 5, or a time above 0, such as 90s, 10min or 2h, not {value}",
            {"value": repr(value)},
        )
    return value


Interval = Annotated[int | str, BeforeValidator(_steps_or_time)]
"""A number of steps as an int, or a time as a text with its unit."""


class Hyperparameters(Settings):
    """The settings that a run may give its trainer. They override trainer.yaml."""

    training_steps: int = Field(default=20, ge=1)
    """Optimizer steps; the run is finished after them."""
    max_staleness: int = Field(default=0, ge=0)
    """How many steps the environment may run ahead of the trainer. 0 is synchronous."""
    checkpoint_interval: Interval = "5min"
    """Time between checkpoints (90s, 5min, 2h), or a number of steps. A kill costs at most this time, or a step if a
    step takes longer. With a number of steps, it costs these steps and those that began while the last checkpoint was
    written."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """Consecutive steps that may train nothing or leave out an update whose loss or gradient is not finite. The step
    after them ends the training."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)
    """Seed of the trainer's random numbers."""

    batch_size: int = Field(default=8, ge=1)
    """Sequences per micro-batch. A step takes batch_size x gradient_accumulation_steps sequences. A rollout with
    branches counts as one sequence of a step. The step takes as many groups as have these sequences when the groups are
    whole. A rollout that was left out of its group is missing in the step, and the loss counts the sequences that are
    there."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step."""
    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence, in tokens; tokens beyond it are not trained on. Default: the longest that the server takes."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the batch of a step. The old policy is the policy before the first pass."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per pass over the batch, at most one for each group of the step."""

    advantage_scale: Literal["group", "batch", "none"] = "group"
    """Divisor of a reward's distance from the mean of its group: the group's standard deviation (GRPO), the standard
    deviation of all rewards of the step, or none (Dr. GRPO). Advantages from an environment are used unchanged."""
    overlong: Literal["keep", "filter"] = "keep"
    """filter: a completion that was truncated at max_tokens is not trained on (DAPO)."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Soft length penalty (DAPO): within this many tokens of the completion's limit the reward falls linearly, by
    overlong_penalty at the limit."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward subtracted at the limit, see overlong_buffer."""

    objective: ObjectiveName = "dapo"
    """Surrogate and aggregation over tokens: grpo, dapo, bnpo, dr_grpo, cispo, gspo. See docs/trainer.md."""
    clip_epsilon: float | None = Field(default=None, gt=0)
    """Lower clip of the policy ratio: 1 - clip_epsilon. Default: 0.2; gspo 0.0003."""
    clip_epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip of the policy ratio: 1 + clip_epsilon_high; cispo: its largest ratio. Default: clip_epsilon; dapo
    0.28, gspo 0.0004, cispo 5."""
    ratio_policy: Literal["old", "rollout"] = "old"
    """Denominator of the policy ratio: the policy before the step's first update, or the policy that sampled the
    tokens. With rollout the clip also bounds stale tokens, and the loss has no importance weights."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """Divisor of dr_grpo. Default: the run's max_tokens."""
    importance_correction: Literal["truncate", "mask", "none"] = "truncate"
    """Correction for a rollout policy that differs from the trainer's policy: weights outside importance_floor and
    importance_cap are moved to the bound, or their tokens are masked, or no weights are used."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Whether each token or each sequence has an importance weight: of a sequence the product over its tokens, or their
    geometric mean. The branches of a rollout are one sequence."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Upper bound C of the importance weight that corrects for the rollout policy."""
    importance_floor: float = Field(default=0.0, ge=0)
    """Lower bound of the importance weight. With importance_correction: mask, both bounds make IcePop."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference model; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence per token."""
    kl_bias_correction: bool = False
    """Multiply a token's KL term by its policy ratio: with k3 its gradient is then the unbiased gradient of the
    divergence."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    distill_coef: float = Field(default=1.0, ge=0)
    """Weight of the distillation loss, for groups that carry a teacher's tokens."""
    distill_divergence: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || policy); reverse: KL(policy || teacher)."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """AdamW's highest learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: it stays constant, or falls to 0 at training_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to learning_rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's beta 1."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's beta 2."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters on all linear layers except the head; 0 trains all weights. Needs the peft package."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """LoRA's scale: alpha / rank."""

    token_budget: int | None = Field(default=None, ge=2)
    """Most tokens that go through the model at once, instead of batch_size sequences. A longer sequence is dropped and
    counted; the budget changes no other result. Default on CUDA: what fits in the GPU's free memory, at most 32768, and
    no sequence is dropped."""
    packing: bool = True
    """Sequences of a micro-batch share one row without padding, and each attends only to itself. false: padded rows,
    for models whose attention does not support packing."""
    gradient_checkpointing: bool | Literal["offload"] = False
    """Compute layers again in the backward pass instead of keeping their activations: less memory, more time.
    offload: keep the inputs of the layers in main memory, not on the GPU."""
    compile: bool | None = None
    """Compile the model's layers and head with torch.compile. Default: on CUDA."""

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per batch; more than one needs the old policy's log-probabilities."""
        return self.num_epochs * self.minibatches

    @property
    def checkpoint_seconds(self) -> float | None:
        """The checkpoint interval in seconds; None if it is a number of steps."""
        if isinstance(self.checkpoint_interval, int):
            return None
        match = _TIME.fullmatch(self.checkpoint_interval)
        assert match is not None
        return float(match["number"]) * _SECONDS[match["unit"]]

    @property
    def joins_branches(self) -> bool:
        """Whether a ratio or weight has a sum over all trained tokens of a rollout, so that the branches of a rollout
        must be in one micro-batch."""
        return self.objective == "gspo" or self.importance_level != "token"

    @model_validator(mode="after")
    def _clip_is_below_one(self) -> Self:
        if self.clip_epsilon is not None and self.clip_epsilon >= 1:
            raise PydanticCustomError(
                "clip_epsilon_too_large", "clip_epsilon must be below 1: the lower clip is 1 - clip_epsilon"
            )
        return self

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> Self:
        if self.importance_floor >= self.importance_cap:
            raise PydanticCustomError(
                "importance_floor_too_large",
                "importance_floor ({floor}) must be below importance_cap ({cap})",
                {"floor": self.importance_floor, "cap": self.importance_cap},
            )
        return self

    @model_validator(mode="after")
    def _budget_holds_a_sequence(self) -> Self:
        if self.token_budget is not None and self.seq_len is not None and self.token_budget < self.seq_len:
            raise PydanticCustomError(
                "token_budget_too_small",
                "token_budget ({token_budget}) must hold one sequence of seq_len ({seq_len})",
                {"token_budget": self.token_budget, "seq_len": self.seq_len},
            )
        return self

    def check_whole_groups(self, group_size: int, where: str) -> None:
        """Raises ConfigError when a step does not take whole groups of `group_size` sequences."""
        if self.sequences_per_step % group_size:
            raise ConfigError(
                "partial_groups",
                f"{where}: batch_size {self.batch_size} x gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} = {self.sequences_per_step} sequences per step, which is not "
                f"divisible by group_size {group_size}. Change one of the three.",
                sequences=self.sequences_per_step,
                group_size=group_size,
            )


def completed_block(block: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> Hyperparameters:
    """Returns the hyperparameters of a run whose block is completed by `defaults`, the contents of trainer.yaml.

    Raises ConfigError, as `parse`.
    """
    shared = {key: value for key, value in {**defaults, **block}.items() if key not in TRAINER_ONLY}
    return parse(Hyperparameters, shared, where)


def check_run_block(block: Any, group_size: int, where: str) -> None:
    """Checks the `trainer:` block of a run whose groups have `group_size` sequences.

    The block may be partial: trainer.yaml and the trainer's command line complete it. So the block is compared with
    the group size only if it says both how many sequences a micro-batch has and how many micro-batches a step takes.

    Raises ConfigError if the block is not a mapping, or has a key of TRAINER_ONLY, an unknown key or a wrong value. The
    message has a line per mistake, which names `where` and the key, and the nearest match of an unknown key.
    """
    if not isinstance(block, Mapping):
        raise ConfigError("not_a_mapping", f"{where}: must be a mapping of hyperparameters to values, not {block!r}.")
    forbidden = sorted(TRAINER_ONLY.intersection(block))
    if forbidden:
        raise ConfigError(
            "trainer_only_key",
            "\n".join(
                f"{where}: '{key}' cannot be set by a run, which may set hyperparameters only. Set it in trainer.yaml "
                "or on the trainer's command line."
                for key in forbidden
            ),
            keys=forbidden,
        )
    settings = parse(Hyperparameters, block, where)
    if {"batch_size", "gradient_accumulation_steps"} <= settings.model_fields_set:
        settings.check_whole_groups(group_size, where)
