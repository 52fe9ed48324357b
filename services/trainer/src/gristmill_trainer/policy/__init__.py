"""The model in training: its source, loading, scores, adapters and export."""

from gristmill_trainer.policy.head import Entropy, Scores
from gristmill_trainer.policy.lora import Lora
from gristmill_trainer.policy.model import Policy
from gristmill_trainer.policy.scoring import Scorer
from gristmill_trainer.policy.source import ModelSource, check_publishable, find_model

__all__ = ["Entropy", "Lora", "ModelSource", "Policy", "Scorer", "Scores", "check_publishable", "find_model"]
