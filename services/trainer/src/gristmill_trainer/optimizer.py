"""AdamW and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from gristmill import Hyperparameters
from gristmill_trainer.errors import OptimizerError

Schedule = Literal["constant", "linear", "cosine"]


def build_optimizer(settings: Hyperparameters, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns AdamW over all `parameters`, biases and norms included (Loshchilov & Hutter 2019).

    Raises OptimizerError without parameters.
    """
    trained = list(parameters)
    if not trained:
        raise OptimizerError("parameters_missing", "the model has no parameters to train; see lora_rank")
    betas = (settings.adam_beta1, settings.adam_beta2)
    # The fused version makes one pass over the parameters, and takes about half the time of the others on CPU too.
    return torch.optim.AdamW(
        trained, lr=settings.learning_rate, betas=betas, weight_decay=settings.weight_decay, fused=True
    )


def build_schedule(optimizer: torch.optim.Optimizer, settings: Hyperparameters, training_steps: int) -> LambdaLR:
    """Returns the schedule of `learning_rate_factor`. Step it once per training step."""
    return LambdaLR(
        optimizer,
        lambda done: learning_rate_factor(done, settings.lr_schedule, settings.warmup_steps, training_steps),
    )


def load_schedule(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Sets `schedule` to the step of `state`, which another schedule wrote.

    The learning rate follows this schedule, because an extended run has a different curve than before.
    """
    schedule.load_state_dict(state)
    if isinstance(schedule, LambdaLR):
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        rates = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates


def learning_rate_factor(done: int, schedule: Schedule, warmup_steps: int, training_steps: int) -> float:
    """Returns the learning rate's factor in the step after `done` steps; W = warmup_steps, N = training_steps.

        done < W:  (done + 1) / (W + 1)
        then, with p = (done - W) / (N - W), at most 1:
        constant:  1
        linear:    1 - p
        cosine:    (1 + cos(pi p)) / 2

    No step has the factor 0: the factor rises from 1 / (W + 1), and reaches 0 only after all N steps.
    """
    if done < warmup_steps:
        return (done + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (done - warmup_steps) / max(1, training_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    return (1.0 + math.cos(math.pi * progress)) / 2


@contextmanager
def kept_hyperparameters(optimizer: torch.optim.Optimizer, *, keep: bool) -> Iterator[None]:
    """Keeps this optimizer's learning rate, betas and other settings while another state is loaded, if `keep`."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    if keep:
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)
