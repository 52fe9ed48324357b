"""AdamW and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gristmill import Hyperparameters


def build_optimizer(settings: Hyperparameters, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns AdamW over all `parameters`, biases and norms included (Loshchilov & Hutter 2019)."""
    betas = (settings.adam_beta1, settings.adam_beta2)
    # The fused version makes one pass over the parameters, and takes about half the time of the others on CPU too.
    return torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=betas, weight_decay=settings.weight_decay, fused=True
    )


def learning_rate(settings: Hyperparameters, step: int) -> float:
    """Returns the learning rate of optimizer step `step`; W = warmup_steps, N = training_steps.

        step <= W:  step / (W + 1) of learning_rate
        then, with p = (step - 1 - W) / (N - W), at most 1:
        constant:   1
        linear:     1 - p
        cosine:     (1 + cos(pi p)) / 2

    No step has the factor 0: the factor rises from 1 / (W + 1), and reaches 0 only after all N steps.
    """
    warmup, highest = settings.warmup_steps, settings.learning_rate
    if step <= warmup:
        return highest * (step / (warmup + 1))
    if settings.lr_schedule == "constant":
        return highest
    progress = min(1.0, (step - 1 - warmup) / max(1, settings.training_steps - warmup))
    if settings.lr_schedule == "linear":
        return highest * (1.0 - progress)
    return highest * ((1.0 + math.cos(math.pi * progress)) / 2)
