"""The training loss: a policy loss, its aggregation over tokens, corrections and penalties."""

from gristmill_trainer.objectives.aggregation import token_weights
from gristmill_trainer.objectives.losses import TrainedTokens
from gristmill_trainer.objectives.objective import Objective, Ratios

__all__ = ["Objective", "Ratios", "TrainedTokens", "token_weights"]
