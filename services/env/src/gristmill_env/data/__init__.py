"""Rows: where they come from, in which order, and what of them prompts and rewards get."""

from gristmill_env.data.dataset import Item, PromptDataset

__all__ = ["Item", "PromptDataset"]
