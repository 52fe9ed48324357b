"""The rollouts of a run on disk: every trained group, in the order of the acks.

    for group in gristmill.read_rollouts("runs/quickstart"):
        print(group.group_id, group.rewards)

The trajectory API writes the rollouts. The module `segment` defines the format, and the module `reader` reads it.
"""

from gristmill.archive.reader import read_archive, read_rollouts, segments
from gristmill.archive.segment import ArchivedGroup, ArchiveError

__all__ = ["ArchiveError", "ArchivedGroup", "read_archive", "read_rollouts", "segments"]
