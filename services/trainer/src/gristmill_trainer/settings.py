"""The trainer's settings: trainer.yaml, overridden by the run's `trainer:` block, overridden by the command line.

A run may set hyperparameters only (`gristmill.hyperparameters`). The settings of this file say where things are and
how the trainer's machine may be used. They come from trainer.yaml and the command line. The environment recorded the
run's own settings when it opened the run; other clients may record anything there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gristmill import Hyperparameters, Protocol, RunRecord
from gristmill.hyperparameters import check_run_block
from gristmill.internal.config_files import load_yaml
from gristmill.internal.flags import parse_flags
from gristmill.internal.settings import merge, parse

TRAINER_CONFIG = "trainer.yaml"
MAY_CHANGE = frozenset({"checkpoint_interval", "token_budget", "packing", "gradient_checkpointing", "compile"})
"""Hyperparameters that a resumed training may change, because they do not change what is trained."""
OF_TRAINING = frozenset({"policy_loss", "publisher", "ref_model"})
"""Settings of the trainer that, like a run's hyperparameters, must not change during the run. A fork takes them over,
and no other setting of the trainer: the others say where things are and how its machine may be used."""


class TrainerSettings(Hyperparameters):
    """The settings of one training."""

    model_name: str | None = None
    """Model to train: a hub id, a folder, or the name of the served model. Default: the model that the server runs."""
    rollout_server_url: str | None = None
    """Trajectory API. Default: GRISTMILL_API_URL, else port API_PORT (8000) of this machine."""
    base_url: str | None = None
    """Model server that receives the weights, with or without /v1; several servers with commas between them. Default:
    GRISTMILL_MODEL_URL, else port MODEL_PORT (9001) of this machine."""
    atropos_run: str | None = None
    """Train on the run that Atropos' environments feed, by its id: the API's ATROPOS_RUN, usually `default`. Default:
    the run that an environment of this stack opens."""

    publisher: Literal["filesystem", "ipc", "nccl", "none"] = "filesystem"
    """How weights reach the model server. ipc: a server on the trainer's GPU copies them from the trainer's memory.
    nccl: a server on another GPU receives them over the network (docs/gpu.md). none: for a server whose weights may not
    be updated."""
    policy_loss: str | None = None
    """A loss of your own in place of the objective's, as path/to/file.py:function or package.module:function: from
    gristmill_trainer.objectives.TrainedTokens to the loss of each token (docs/trainer.md)."""
    ref_model: str | None = None
    """Reference model of the KL divergence: a hub id or a folder. Default: the run's model before any training."""
    resume: str = "auto"
    """auto: from the run's newest checkpoint, if there is one. never: from the first weights; an error if the run has
    checkpoints. A checkpoint's folder: from that checkpoint."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """How many checkpoints stay on disk."""
    push_to_hub: str | None = None
    """Hub repository that receives the finished model, as owner/name. Needs a hub token that may write."""
    stop_grace_seconds: float = Field(default=50.0, ge=0)
    """Seconds after SIGTERM that the current step and a checkpoint may take. Set it about ten seconds below the time
    after which the trainer is killed (Compose 60, Kubernetes 30). Under torchrun the value is its
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT minus ten."""

    record_rollouts: bool = True
    """Write to the run's folder what the trainer did with each group: step, outcome, and per token the trainer's
    log-probability, advantage and entropy (docs/look-at-a-run.md)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if a device is available."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak that MFU is a share of. Default: the device's peak, if it is known."""

    metrics_address: str | None = Field(default=None, coerce_numbers_to_str=True)
    """Where the trainer answers Prometheus at /metrics: PORT, which only this machine reaches, or HOST:PORT. Default:
    GRISTMILL_METRICS_ADDRESS, else nowhere; in Compose the network of the stack."""
    tensorboard: bool = False
    """Write the metrics as event files of TensorBoard as well, to tensorboard/ in the run's folder."""
    use_wandb: bool = False
    """Send the metrics to Weights & Biases as well; WANDB_MODE=offline keeps them on this machine."""
    wandb_project: str | None = None
    """W&B project. Default: gristmill."""
    wandb_name: str | None = None
    """W&B run name. Default: the run id."""
    on_step: str | None = None
    """A function that is called after every step, as path/to/file.py:function or package.module:function, with a
    gristmill_trainer.hooks.StepEvent. It is not called after the step in which the trainer is asked to stop."""

    @property
    def joins_branches(self) -> bool:
        """As for the objectives. A loss of the user's own may use sums over a rollout."""
        return self.policy_loss is not None or super().joins_branches

    @property
    def publishes_from_device(self) -> bool:
        """Whether servers get weights from the trainer's device memory."""
        return self.publisher in ("ipc", "nccl")

    def record(self) -> dict[str, Any]:
        """The trainer's half of the run record: the settings that must not change during the run."""
        fixed = {*Hyperparameters.model_fields, *OF_TRAINING} - MAY_CHANGE
        return self.model_dump(include=fixed)


def read_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the settings on the trainer's command line. Raises ConfigError for an unknown flag."""
    about = "GRPO on the groups of a trajectory API."
    return parse_flags(arguments, TrainerSettings, "python -m gristmill_trainer", about)


def read_settings(config_dir: Path, block: dict[str, Any], flags: dict[str, Any], where: str) -> TrainerSettings:
    """Merges trainer.yaml in `config_dir`, the run's block and the flags. Raises ConfigError."""
    file = config_dir / TRAINER_CONFIG
    defaults = load_yaml(file) if file.is_file() else {}
    return parse(
        TrainerSettings, merge(merge(defaults, block), flags), f"trainer settings ({file}, trainer: block, {where})"
    )


def trainer_block(run: RunRecord) -> dict[str, Any]:
    """Returns the hyperparameters that the run sets. Raises ConfigError for other settings (`check_run_block`)."""
    block: dict[str, Any] = run.env.get("trainer") or {}
    check_run_block(block, run.group_size, f"run {run.run_id}: trainer")
    return block


def longest_completion(run: RunRecord) -> int | None:
    """Returns the environment's `max_tokens`; None if unknown, as for Atropos environments."""
    limits = [dataset.get("max_tokens") for dataset in _datasets(run)]
    return max((limit for limit in limits if isinstance(limit, int)), default=None)


def dataset_name(run: RunRecord) -> str:
    """Returns the dataset's name for the card of the model."""
    found = [
        next(filter(None, map(dataset.get, ("dataset_name", "dataset_path", "rows"))), None)
        for dataset in _datasets(run)
    ]
    names = list(dict.fromkeys(map(str, filter(None, found))))
    return ", ".join(names) or ("environments of Atropos'" if run.protocol is Protocol.ATROPOS else "unknown")


def reward_names(run: RunRecord) -> list[str]:
    """Returns the names of the run's reward functions, in order. A later source repeats no name of an earlier one."""
    names: list[str] = []
    for dataset in _datasets(run):
        rewards_given = dataset.get("reward_functions")
        rewards = rewards_given if isinstance(rewards_given, list) else []
        own = [str(one.get("type") if isinstance(one, dict) else one) for one in rewards]
        names += [name for name in own if name not in names]
    return names


def _datasets(run: RunRecord) -> list[dict[str, Any]]:
    """Returns the recorded `dataset` of each source; the one of a run without `sources`."""
    sources = run.env.get("sources")
    holders = list(sources.values()) if isinstance(sources, dict) else [run.env]
    datasets = [holder.get("dataset") for holder in holders if isinstance(holder, dict)]
    return [dataset for dataset in datasets if isinstance(dataset, dict)]
