"""Rows: their sources, their order, and the fields that prompts and rewards receive."""

from gristmill_env.data.dataset import Item, Message, PromptDataset, assistant, system, user

__all__ = ["Item", "Message", "PromptDataset", "assistant", "system", "user"]
