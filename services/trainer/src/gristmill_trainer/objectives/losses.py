"""The policy losses of the objectives.

Each function takes the trained tokens of a micro-batch and returns a loss for each token, which `aggregation` weighs.
`kept` is bool[M]: the tokens whose importance weight is above 0. The others have no loss, because their ratio may be
infinite and 0 x inf is NaN. docs/trainer.md has the formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gristmill import Hyperparameters
from gristmill.hyperparameters import ObjectiveName
from gristmill_trainer.errors import TrainerError


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The M trained tokens of a micro-batch's S sequences, flat. Tensors are float32[M] unless documented otherwise."""

    logprobs: torch.Tensor
    """log pi, with its gradient."""
    old_logprobs: torch.Tensor
    """log pi_old: the policy before the step's first update."""
    rollout_logprobs: torch.Tensor
    """log mu: the model server's log-probabilities at sampling."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """The token's weight in the update's loss, which is a sum over micro-batches and ranks."""
    sequence: torch.Tensor
    """int64[M]: the token's sequence, 0 to S - 1. The branches of a rollout are one sequence."""
    sequences: int
    """S."""
    entropy: torch.Tensor | None = None
    """Entropy of the distribution that the token was drawn from, in nats; with gradient if the objective needs it."""
    entropy_weight: float = 0.0
    """1 / trained tokens of the update, over all micro-batches and ranks."""
    ref_logprobs: torch.Tensor | None = None
    """log pi_ref."""
    teacher_logprobs: torch.Tensor | None = None
    """float32[M, K]: the teacher's log-probabilities of the teacher's tokens."""
    student_logprobs: torch.Tensor | None = None
    """float32[M, K]: the policy's log-probabilities of the same tokens, with gradient. Absent entries are 0 here and
    -inf in `teacher_logprobs`."""


class Clip(NamedTuple):
    """Bounds on the ratio rho = pi / pi_old."""

    low: float
    """rho below 1 - low counts as 1 - low. `low` is below 1. cispo has no lower bound."""
    high: float
    """rho above 1 + high counts as 1 + high. cispo: rho above high counts as high."""


class TokenLosses(NamedTuple):
    """The losses of the tokens, and the effect of the clip on all tokens, kept or not: [M] each."""

    losses: torch.Tensor
    """float32, with the gradient."""
    log_ratio: torch.Tensor
    """float32: log rho with its gradient."""
    clipped_low: torch.Tensor
    """bool: the lower clip bounded the ratio."""
    clipped_high: torch.Tensor


PolicyLoss = Callable[[TrainedTokens, torch.Tensor, Clip], TokenLosses]
"""(tokens, kept, clip) -> losses."""


def grpo(tokens: TrainedTokens, kept: torch.Tensor, clip: Clip) -> TokenLosses:
    """Clips the ratio of each token. Shao et al. 2024 (DeepSeekMath), eq. 3.

    dapo differs in the upper clip and the aggregation (Yu et al. 2025, eq. 8). bnpo and dr_grpo differ in the
    aggregation (as in TRL; Liu et al. 2025, section 3).
    """
    return clipped(token_log_ratio(tokens), tokens, kept, clip)


def cispo(tokens: TrainedTokens, kept: torch.Tensor, clip: Clip) -> TokenLosses:
    """Weighs the likelihood of each token by its clipped ratio. MiniMax 2025 (MiniMax-M1), eq. 4 and 5."""
    return weighted_likelihood(token_log_ratio(tokens), tokens, kept, clip)


def gspo(tokens: TrainedTokens, kept: torch.Tensor, clip: Clip) -> TokenLosses:
    """Clips the ratio of each sequence. Zheng et al. 2025 (GSPO), eq. 5 and 7, and the clips of its section 5.1."""
    return clipped(sequence_log_ratio(tokens), tokens, kept, clip)


POLICY_LOSSES: dict[ObjectiveName, PolicyLoss] = {
    "grpo": grpo,
    "dapo": grpo,
    "bnpo": grpo,
    "dr_grpo": grpo,
    "cispo": cispo,
    "gspo": gspo,
}
_CLIPS: dict[ObjectiveName, Clip] = {
    "grpo": Clip(0.2, 0.2),
    "dapo": Clip(0.2, 0.28),
    "bnpo": Clip(0.2, 0.2),
    "dr_grpo": Clip(0.2, 0.2),
    "cispo": Clip(0.2, 5.0),
    "gspo": Clip(3e-4, 4e-4),
}


def of_user(function: Callable[[TrainedTokens], torch.Tensor], name: str) -> PolicyLoss:
    """Returns the policy loss of a user's function of the trained tokens, float32[M]. `name`: for errors.

    A token that the importance correction masks has no loss. The ratio is reported and has no clip. Raises
    TrainerError if the function returns something else, or losses without a gradient.
    """

    def losses(tokens: TrainedTokens, kept: torch.Tensor, clip: Clip) -> TokenLosses:
        loss = function(tokens)
        wanted = tokens.logprobs.shape
        if not isinstance(loss, torch.Tensor) or loss.shape != wanted or not loss.requires_grad:
            described = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:80]
            raise TrainerError(
                "policy_loss_invalid",
                f"policy_loss {name} returned {described}; it must return the loss of each trained token, a tensor of "
                f"shape {list(wanted)} with a gradient to tokens.logprobs",
                policy_loss=name,
            )
        nowhere = torch.zeros_like(kept)
        return TokenLosses(loss.where(kept, 0.0), token_log_ratio(tokens), nowhere, nowhere)

    return losses


def clip_of(settings: Hyperparameters) -> Clip:
    """Returns the clip of the settings, with the paper's value for each bound that is not set.

    If a paper has one value for both bounds, the upper bound follows a lower bound in the settings.
    """
    paper = _CLIPS[settings.objective]
    low, high = settings.clip_epsilon, settings.clip_epsilon_high
    if high is None:
        high = low if low is not None and paper.low == paper.high else paper.high
    return Clip(paper.low if low is None else low, high)


def token_log_ratio(tokens: TrainedTokens) -> torch.Tensor:
    """Returns float32[M]: log rho of each token."""
    return tokens.logprobs - tokens.old_logprobs


def sequence_log_ratio(tokens: TrainedTokens) -> torch.Tensor:
    """Returns float32[M]: at each token, the mean of log rho over its sequence. Zheng et al. 2025 (GSPO), eq. 7."""
    return sequence_means(token_log_ratio(tokens), tokens)


def sequence_sums(values: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
    """Returns float32[M] from float32[M]: at each token, the sum over the trained tokens of its sequence."""
    return _sums(values, tokens)[tokens.sequence]


def sequence_means(values: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
    """Returns float32[M] from float32[M]: at each token, the mean over the trained tokens of its sequence."""
    return (_sums(values, tokens) / _sums(torch.ones_like(values), tokens))[tokens.sequence]


def clipped(log_ratio: torch.Tensor, tokens: TrainedTokens, kept: torch.Tensor, clip: Clip) -> TokenLosses:
    """Computes -min(rho A, clip(rho, 1 - low, 1 + high) A).

    Schulman et al. 2017 (PPO), eq. 7; separate low and high (clip-higher): Yu et al. 2025 (DAPO), eq. 10.
    """
    # The minimum is A min(rho, 1 + high) for a positive advantage, and A max(rho, 1 - low) for a negative one. Bounds
    # come before exp. Otherwise a clipped ratio beyond float32's range would give 0 x inf in the gradient.
    low, high = math.log1p(-clip.low), math.log1p(clip.high)
    masked = log_ratio.where(kept, 0.0)
    bounded = torch.where(tokens.advantages >= 0, masked.clamp(max=high), masked.clamp(min=low))
    return TokenLosses(
        losses=-tokens.advantages * bounded.exp(),
        log_ratio=log_ratio,
        clipped_low=(log_ratio < low) & (tokens.advantages < 0),
        clipped_high=(log_ratio > high) & (tokens.advantages > 0),
    )


def weighted_likelihood(log_ratio: torch.Tensor, tokens: TrainedTokens, kept: torch.Tensor, clip: Clip) -> TokenLosses:
    """Computes -sg[min(rho, high)] A log pi; sg stops the gradient.

    Every token has a gradient, even if its ratio is clipped.
    """
    high = math.log(clip.high)
    ratio = log_ratio.where(kept, 0.0).detach().clamp(max=high).exp()
    clipped_high = (log_ratio > high) & (tokens.advantages != 0)
    return TokenLosses(
        losses=-ratio * tokens.advantages * tokens.logprobs,
        log_ratio=log_ratio,
        clipped_low=torch.zeros_like(clipped_high),
        clipped_high=clipped_high,
    )


def _sums(values: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
    return values.new_zeros(tokens.sequences).index_add(0, tokens.sequence, values)
