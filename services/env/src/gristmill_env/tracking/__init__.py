"""Metrics of a run to where people look at them."""

from gristmill_env.tracking.rollouts import in_words
from gristmill_env.tracking.tracker import NoTracker, ScoredPrompt, Tracker
from gristmill_env.tracking.wandb_tracker import WandbTracker

__all__ = ["NoTracker", "ScoredPrompt", "Tracker", "WandbTracker", "in_words"]
