"""The table of objectives, one row per objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from gristmill.hyperparameters import ObjectiveName
from gristmill_trainer.objectives.surrogate import (
    Clip,
    Stops,
    clipped,
    clipped_stops,
    weighted_likelihood,
    weighted_likelihood_stops,
)
from gristmill_trainer.objectives.tokens import TrainedTokens


@dataclass(frozen=True)
class Surrogate:
    """A surrogate's functions of log rho (float32[M]), the tokens and the clip."""

    loss: Callable[[torch.Tensor, TrainedTokens, Clip], torch.Tensor]
    """Returns float32[M]: the loss of each token."""
    stops: Callable[[torch.Tensor, TrainedTokens, Clip], Stops]


CLIPPED = Surrogate(clipped, clipped_stops)
WEIGHTED_LIKELIHOOD = Surrogate(weighted_likelihood, weighted_likelihood_stops)


class Level(Enum):
    """The level of a ratio: token or sequence."""

    TOKEN = "token"
    """pi / pi_old of the token."""
    SEQUENCE = "sequence"
    """Geometric mean of the token ratios of a sequence."""


class Aggregation(Enum):
    """The aggregation of token losses to one loss. Every mean is over the whole optimizer update."""

    TOKENS = "tokens"
    """Mean over all trained tokens."""
    SEQUENCES = "sequences"
    """Mean over sequences of their token means."""
    LOCAL_BATCHES = "local batches"
    """Mean over local batches of their token means."""
    FIXED_LENGTH = "fixed length"
    """Sum over tokens, divided by sequences x the longest completion allowed."""


@dataclass(frozen=True)
class Recipe:
    """The components of an objective."""

    level: Level
    surrogate: Surrogate
    aggregation: Aggregation
    clip: Clip
    """Default for clip settings that are not set."""
    high_follows_low: bool = False
    """Whether the upper clip follows a lower clip in the settings."""


RECIPES: dict[ObjectiveName, Recipe] = {
    # Shao et al. 2024 (DeepSeekMath), eq. 3.
    "grpo": Recipe(Level.TOKEN, CLIPPED, Aggregation.SEQUENCES, Clip(0.2, 0.2), high_follows_low=True),
    # Yu et al. 2025, eq. 8: token mean over the batch, and clip-higher.
    "dapo": Recipe(Level.TOKEN, CLIPPED, Aggregation.TOKENS, Clip(0.2, 0.28)),
    # The token mean of the local batch, as in TRL.
    "bnpo": Recipe(Level.TOKEN, CLIPPED, Aggregation.LOCAL_BATCHES, Clip(0.2, 0.2), high_follows_low=True),
    # Liu et al. 2025 (Understanding R1-Zero-like training), section 3: no bias towards long wrong answers.
    "dr_grpo": Recipe(Level.TOKEN, CLIPPED, Aggregation.FIXED_LENGTH, Clip(0.2, 0.2), high_follows_low=True),
    # MiniMax 2025 (MiniMax-M1), eq. 4.
    "cispo": Recipe(Level.TOKEN, WEIGHTED_LIKELIHOOD, Aggregation.TOKENS, Clip(0.2, 5.0)),
    # Zheng et al. 2025 (GSPO), eq. 5 and 7, and the clips of its section 5.1.
    "gspo": Recipe(Level.SEQUENCE, CLIPPED, Aggregation.SEQUENCES, Clip(3e-4, 4e-4)),
}
