"""Names of Redis keys, and the row that a group's id names. The top of lua/_keys.lua lists the keys' contents and makes
the same names."""

from __future__ import annotations

RUNS = "gm:runs"
OPEN = "gm:open"
FINISHED = "gm:finished"
STACKS = "gm:stacks"
DELETING = "gm:deleting"
BYTES = "gm:bytes"
JOURNAL = "gm:journal"
JOURNALS = "gm:journals"
EXAMPLES = "gm:examples"
EVENTS = "gm:events"
ARCHIVER = "gm:archiver"


def prefix(run_id: str) -> str:
    """All keys of a run start so. The braces would keep them in one slot of a Redis Cluster. The scripts also
    use keys of all runs, so a Cluster is refused (connection.py)."""
    return f"gm:{{{run_id}}}:"


def record(run_id: str) -> str:
    return prefix(run_id) + "record"


def deletion(run_id: str) -> tuple[str, str]:
    """Returns two keys. The first exists while the run is being deleted, the second for days afterwards (an hour
    if no trainer had taken the run)."""
    return prefix(run_id) + "deleted", prefix(run_id) + "fence"


def payload(run_id: str, group_id: str) -> str:
    return f"{prefix(run_id)}payload:{group_id}"


def sent(run_id: str, name: str) -> str:
    """For bytes on their way to a script: the name is used once."""
    return f"{prefix(run_id)}sent:{name}"


def example(run_id: str, group_id: str) -> str:
    return f"{prefix(run_id)}example:{group_id}"


def group(run_id: str, group_id: str) -> str:
    return f"{prefix(run_id)}group:{group_id}"


def row_of(group_id: str) -> int:
    """Returns the permit's row: 12 for "g00000012". Raises ValueError for an id that no permit has."""
    if not group_id.startswith("g") or not group_id[1:].isdecimal():
        raise ValueError(f"{group_id!r} is not a permit's group id such as 'g00000012'")
    return int(group_id[1:])


def archive(run_id: str) -> str:
    return f"{prefix(run_id)}archive"


def fates(run_id: str) -> str:
    return f"{prefix(run_id)}fates"


def metrics(run_id: str, source: str) -> str:
    return f"{prefix(run_id)}metrics:{source}"


OPEN_TOPIC = "open"
"""Published on EVENTS when a run opens."""


def ready_topic(run_id: str) -> str:
    """Published on EVENTS when a lease may have become possible."""
    return f"ready {prefix(run_id)}"


def permits_topic(run_id: str) -> str:
    """Published on EVENTS when a permit may have come free, or the run finished."""
    return f"permits {prefix(run_id)}"


def events_topic(run_id: str) -> str:
    """Published on EVENTS when the run's event stream has grown and no other topic is published."""
    return events_topic_of(prefix(run_id))


def events_topic_of(start: str) -> str:
    """`events_topic` of the run whose keys start so."""
    return f"events {start}"


ARCHIVE_TOPIC = "archive"
"""The first word of the topic that is published on EVENTS when groups of a run wait to be archived."""


def milliseconds(seconds: float) -> int:
    """Returns a duration as the scripts take it, at least 1."""
    return max(1, int(seconds * 1000))
