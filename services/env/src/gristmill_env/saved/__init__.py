"""Groups on disk as text: written by `process` (and `serve`, when asked), read by `replay`, `sft` and `dpo`."""

from gristmill_env.saved.group import Message, SavedCompletion, SavedGroup
from gristmill_env.saved.reader import read_groups
from gristmill_env.saved.writer import GroupSaver, GroupWriter, set_other_groups_aside

__all__ = [
    "GroupSaver",
    "GroupWriter",
    "Message",
    "SavedCompletion",
    "SavedGroup",
    "read_groups",
    "set_other_groups_aside",
]
