"""The training loss: a surrogate of the reward, an aggregation over tokens, corrections and penalties."""

from gristmill_trainer.objectives.aggregation import token_weights
from gristmill_trainer.objectives.objective import Measured, Objective
from gristmill_trainer.objectives.tokens import TrainedTokens

__all__ = ["Measured", "Objective", "TrainedTokens", "token_weights"]
