"""Rows: their sources, their order, and the fields that prompts and rewards receive."""

from gristmill_env.data.dataset import Item, PromptDataset

__all__ = ["Item", "PromptDataset"]
