"""Groups on disk as text: written by `process` (and `serve`, when asked), read by `replay`, `sft` and `dpo`.

`serve` also saves the groups that it drops. `gristmill.internal.saved` has the format, which evaluations have too.
"""

from gristmill.internal.saved import Message, SavedCompletion, SavedGroup
from gristmill_env.saved.dropped import DroppedSaver
from gristmill_env.saved.group import Attempt
from gristmill_env.saved.reader import read_groups
from gristmill_env.saved.writer import GroupSaver, GroupWriter, set_other_groups_aside

__all__ = [
    "Attempt",
    "DroppedSaver",
    "GroupSaver",
    "GroupWriter",
    "Message",
    "SavedCompletion",
    "SavedGroup",
    "read_groups",
    "set_other_groups_aside",
]
