"""The rules that find trouble in a run. gristmill.internal.trouble has the codes, and the rules of a run that waits.

The rules look at counts, metrics, receipts and files only, so they work live and on the files of a crashed run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gristmill.internal.archive_writer import MIN_FREE_BYTES
from gristmill.internal.metrics import number
from gristmill.internal.receipts import failing
from gristmill.internal.trouble import CODES, Live, Trouble, by_importance, delays, groups_dropped
from gristmill.policy_version import PolicyVersion
from gristmill.run import Protocol, RunState
from gristmill_view.facts import Facts, trainer_has_batch

_TRAINER_QUIET_S = 60.0
_NEWS_S = 120.0
"""Seconds after which a silent environment is not reported: another environment may have replaced it."""
_EQUAL_STEPS = 3
"""Steps in a row without a gradient from rewards."""
_FAILING_SHARE = 0.1
_MIN_GROUPS = 16
"""Groups from which a share of them means something."""
_LOGPROB_DIFF = 0.1
LOST: Final = Trouble.of("store_lost_run", CODES["store_lost_run"].meaning)
"""An API shows the files of a run that is not finished and not in its store."""

Rows = Sequence[Mapping[str, Any]]


def troubles(facts: Facts, rows: Rows) -> list[Trouble]:
    """Returns the problems of a run, the most important first. `rows`: the trainer's current metrics."""
    listed = [*_of_services(facts), *_of_groups(facts), *_of_steps(rows), *_of_disks(facts)]
    return by_importance(listed)


def _of_services(facts: Facts) -> Iterator[Trouble]:
    for receipt in failing(facts.receipts):
        text = f"the model server at {receipt.server} does not serve version {receipt.version} [{receipt.cause}]: "
        yield Trouble.of("receipt_failed", text + receipt.detail)
    status, record = facts.status, facts.record
    if status is None or facts.state != RunState.OPEN or _complete(facts):
        return
    yield from delays(
        Live(
            status=status,
            version=facts.version,
            starving=record is not None and not trainer_has_batch(record, status),
            servers=facts.servers,
            atropos=record is not None and record.protocol is Protocol.ATROPOS,
            publishes=record is None or (record.trainer or {}).get("publisher") != "none",
        )
    )
    silent = [
        service.name.removeprefix("env ")
        for service in facts.services
        if service.name.startswith("env ") and service.state == "down" and (service.heartbeat_s or _NEWS_S) < _NEWS_S
    ]
    if silent:
        text = f"no heartbeat comes from the environment {', '.join(silent)}: it was killed, or it hangs"
        yield Trouble.of("environment_silent", text)
    wanted, oldest = record.groups_per_step if record is not None else None, status.oldest_ready_s or 0.0
    if not status.leased and status.ready >= (wanted or 1) and oldest >= _TRAINER_QUIET_S:
        text = f"{status.ready} groups are ready, and no trainer has leased one for {oldest:.0f} s"
        yield Trouble.of("no_trainer", text)


def _of_groups(facts: Facts) -> Iterator[Trouble]:
    failed, finished = facts.dropped.get("reward_error", 0), facts.accepted + sum(facts.dropped.values())
    if failed >= max(_FAILING_SHARE * finished, 1) and finished >= _MIN_GROUPS:
        yield Trouble.of("rewards_failing", f"rewards failed on {failed} of {finished} groups, which were dropped")
    if facts.status is None:
        return
    yield from groups_dropped(facts.dropped, facts.accepted, _MIN_GROUPS)
    if dead := facts.status.dead:
        text = f"{dead} groups were leased again and again without an ack, and are dead letters"
        yield Trouble.of("dead_letters", text, run=facts.run)


def _of_steps(rows: Rows) -> Iterator[Trouble]:
    last = rows[-_EQUAL_STEPS:]
    if len(last) == _EQUAL_STEPS and all((number(row.get("zero_advantage_share")) or 0.0) >= 1 for row in last):
        text = f"in the last {len(last)} steps all completions of each group scored the same, so nothing is learned"
        yield Trouble.of("scores_equal", text)
    if rows and rows[-1].get("skipped"):
        yield Trouble.of("step_skipped", f"step {rows[-1]['step']} changed no weights: {rows[-1]['skipped']}")
    for _, difference in differing(rows[-1:]):
        text = f"trainer and model server disagree: their log-probabilities differ by {difference:.2g} on average"
        yield Trouble.of("logprob_diff", text)


def on_policy(rows: Rows) -> list[tuple[int, float]]:
    """Returns step and `rollout_logprob_diff_mean` of the steps whose groups came from the newest weights only."""
    return [
        (row["step"], row["rollout_logprob_diff_mean"])
        for row in rows
        if not row.get("staleness_mean") and isinstance(row.get("rollout_logprob_diff_mean"), int | float)
    ]


def differing(rows: Rows) -> list[tuple[int, float]]:
    """Returns the items of `on_policy` in which trainer and model server disagree."""
    return [(step, difference) for step, difference in on_policy(rows) if not difference < _LOGPROB_DIFF]


def _of_disks(facts: Facts) -> Iterator[Trouble]:
    if facts.status is not None and (lost := facts.status.archive_lost):
        text = f"{lost} trained groups were not archived: the disk is nearly full or failed"
        yield Trouble.of("archive_lost", text)
    if facts.free_bytes is not None and facts.free_bytes < MIN_FREE_BYTES and facts.state == RunState.OPEN:
        text = f"{facts.free_bytes / 1024**3:.1f} GiB are free on the disk of the run's files"
        yield Trouble.of("disk_floor", text)


def _complete(facts: Facts) -> bool:
    """Returns whether the trainer has all groups that it needs."""
    if facts.steps is None or facts.version is None:
        return False
    return PolicyVersion.parse(facts.version).step >= facts.steps
