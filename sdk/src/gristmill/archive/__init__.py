"""The rollouts of a run on disk: every group that was trained on, in the order in which it was acked.

    for group in gristmill.read_rollouts("runs/quickstart"):
        print(group.group_id, group.rewards)

The trajectory API writes them; `segment` has the format, `reader` reads it.
"""

from gristmill.archive.reader import read_archive, read_rollouts, segments
from gristmill.archive.segment import ArchivedGroup, ArchiveError

__all__ = ["ArchiveError", "ArchivedGroup", "read_archive", "read_rollouts", "segments"]
