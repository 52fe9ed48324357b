"""Sends a run's metrics to tracking services."""

from gristmill_env.tracking.observers import Observers
from gristmill_env.tracking.rollouts import in_words
from gristmill_env.tracking.tracker import ScoredPrompt, Tracker
from gristmill_env.tracking.wandb_tracker import WandbTracker

__all__ = ["Observers", "ScoredPrompt", "Tracker", "WandbTracker", "in_words"]
