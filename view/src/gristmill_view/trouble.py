"""The rules that find trouble in a run, with a remedy for each code. docs/troubleshooting.md lists the codes.

The rules look at counts and metrics only, so they work live and on the files of a crashed run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gristmill.group import PolicyVersion
from gristmill.receipts import UNPROVEN, failing
from gristmill.run import RunState
from gristmill_view.facts import Facts

ASKS_WITHIN: Final = 45.0
"""Seconds. An environment that needs permits asks again at least every 20 s."""
_QUIET_S = 120.0
"""Seconds without a submit, after which generation counts as stuck."""
_TRAINER_QUIET_S = 60.0
_NEWS_S = 120.0
"""Seconds after which a silent environment is no news: another one may have taken its place."""
_EQUAL_STEPS = 3
"""Steps in a row without a gradient from rewards."""
_DROPPED_SHARE = 0.5
_FAILING_SHARE = 0.1
_MIN_GROUPS = 16
"""Groups from which a share of them means something."""
_BEHIND_STEPS = 2
"""A server is published to after each step, and with asynchronous publication one step later."""
LOADED: Final = "default"
"""vLLM's label of weights that it loaded from disk."""
LOGPROB_DIFF = 0.1
FLOOR_BYTES: Final = 2 * 1024**3
"""Free space below which the API archives no more groups, by default (API_ARCHIVE_MIN_FREE_BYTES)."""


class Trouble(msgspec.Struct, frozen=True):
    """One problem of a run."""

    code: str
    text: str
    remedy: str


LOST: Final = Trouble(
    "store_lost_run",
    "the run's files say that the run has not ended, and the API's store does not have the run",
    "docs/troubleshooting.md, 'Redis has lost a run'; remove the run's folder if the run is from another store",
)
"""An API shows the files of a run that is not finished and not in its store."""

Rows = Sequence[Mapping[str, Any]]


def troubles(facts: Facts, rows: Rows) -> list[Trouble]:
    """Returns the problems of a run, the most important first. `rows`: the trainer's current metrics."""
    return [found for rule in _RULES if (found := rule(facts, rows)) is not None]


def _no_trainer(facts: Facts, rows: Rows) -> Trouble | None:
    status = facts.status
    if status is None or facts.state != RunState.OPEN or status.leased or not status.ready:
        return None
    wanted = facts.record.groups_per_step if facts.record is not None else None
    enough = wanted is None or status.ready >= wanted
    if not enough or status.oldest_ready_s is None or status.oldest_ready_s < _TRAINER_QUIET_S:
        return None
    return Trouble(
        "no_trainer",
        f"{status.ready} groups are ready, and no trainer has leased one for {status.oldest_ready_s:.0f} s",
        "start the trainer, or look at its log: it may have ended with an error",
    )


def _no_environment(facts: Facts, rows: Rows) -> Trouble | None:
    status = facts.status
    if status is None or facts.state != RunState.OPEN or _complete(facts):
        return None
    asks = status.last_asked_s is not None and status.last_asked_s <= ASKS_WITHIN
    if status.outstanding or asks or facts.version is None or _atropos(facts):
        return None
    last = "none ever did" if status.last_asked_s is None else f"the last request was {status.last_asked_s:.0f} s ago"
    return Trouble(
        "no_environment",
        f"the trainer starves: no environment asks for permits ({last})",
        "start an environment, or look at its log: it may have ended with an error",
    )


def _environment_silent(facts: Facts, rows: Rows) -> Trouble | None:
    if facts.status is None or facts.state != RunState.OPEN or _complete(facts):
        return None
    silent = [
        service.name.removeprefix("env ")
        for service in facts.services
        if service.name.startswith("env ") and service.state == "down" and (service.heartbeat_s or _NEWS_S) < _NEWS_S
    ]
    if not silent:
        return None
    return Trouble(
        "environment_silent",
        f"no heartbeat comes from the environment {', '.join(silent)}: it was killed, or it hangs",
        "look at its log and start it again; other environments work on its rows when its permits expire",
    )


def _server_away(facts: Facts, rows: Rows) -> Trouble | None:
    # A busy server answers late. It is in trouble only if no group comes either.
    came = facts.status.last_submit_s if facts.status is not None else None
    quiet = came is None or came >= _QUIET_S
    away = [server for server in facts.servers if server.problem is not None and (quiet or not server.busy)]
    if not away or facts.state != RunState.OPEN or facts.version is None:
        return None
    return Trouble(
        "model_server_unreachable",
        f"the model server at {away[0].url} does not answer: {away[0].problem}",
        "look at its log; the environment waits for it and continues",
    )


def _server_paused(facts: Facts, rows: Rows) -> Trouble | None:
    paused = next((server for server in facts.servers if server.paused), None)
    quiet = facts.status is not None and (facts.status.last_submit_s or 0.0) > _TRAINER_QUIET_S
    if paused is None or not quiet or facts.state != RunState.OPEN:
        return None
    return Trouble(
        "model_server_paused",
        f"the model server at {paused.url} is paused",
        f"curl -X POST {paused.url}/resume",
    )


def _server_behind(facts: Facts, rows: Rows) -> Trouble | None:
    publishes = facts.record is None or (facts.record.trainer or {}).get("publisher") != "none"
    if facts.version is None or facts.state != RunState.OPEN or not publishes:
        return None
    newest = PolicyVersion.parse(facts.version)
    for server in facts.servers:
        if server.problem is not None or server.version is None:
            continue
        try:
            behind = newest.step - PolicyVersion.parse(server.version).step
        except ValueError:  # the weights that it loaded from disk, or a label during a publication
            behind = newest.step if server.version == LOADED else 0
        if behind >= _BEHIND_STEPS:
            return Trouble(
                "server_behind",
                f"the model server at {server.url} has version {server.version}, and the run is at {facts.version}",
                "the trainer publishes to a restarted server by itself; if it does not, look at the trainer's log",
            )
    return None


def _receipt_failed(facts: Facts, rows: Rows) -> Trouble | None:
    """A server's last receipt failed; or, without the run's files, a server has the label of a failed receipt."""
    for receipt in failing(facts.receipts):
        return Trouble(
            "receipt_failed",
            f"the model server at {receipt.server} does not serve version {receipt.version} [{receipt.cause}]: "
            f"{receipt.detail}",
            f"docs/reproduce.md, '{receipt.cause}'",
        )
    left_out = [server for server in facts.servers if server.version == UNPROVEN]
    if not left_out or facts.state != RunState.OPEN:
        return None
    return Trouble(
        "receipt_failed",
        f"the model server at {left_out[0].url} is left out, because it does not serve the weights that were published",
        "the trainer's log and the run's receipts.jsonl name the cause; docs/reproduce.md has the remedy",
    )


def _no_groups(facts: Facts, rows: Rows) -> Trouble | None:
    status = facts.status
    if status is None or facts.state != RunState.OPEN or _complete(facts) or not status.outstanding:
        return None
    if status.last_submit_s is None or status.last_submit_s < _QUIET_S:
        return None
    if status.last_registered_s is not None and status.last_registered_s < _QUIET_S:
        return None  # the environment has just started
    return Trouble(
        "no_groups_come",
        f"the environment works on {status.outstanding} rows, and the last group came {status.last_submit_s:.0f} s ago",
        "completions are long, or a reward hangs: look at the environment's log; lower max_tokens",
    )


def _rewards_failing(facts: Facts, rows: Rows) -> Trouble | None:
    failed, finished = facts.dropped.get("reward_error", 0), _finished_groups(facts)
    if failed < _FAILING_SHARE * finished or finished < _MIN_GROUPS or not failed:
        return None
    return Trouble(
        "rewards_failing",
        f"rewards failed on {failed} of {finished} groups, which were dropped",
        "the environment's log has the first error with its traceback; test the reward with `gristmill-env try`",
    )


def _groups_dropped(facts: Facts, rows: Rows) -> Trouble | None:
    dropped, finished = sum(facts.dropped.values()), _finished_groups(facts)
    if dropped < _DROPPED_SHARE * finished or finished < _MIN_GROUPS or facts.status is None:
        return None
    reasons = ", ".join(
        f"{reason} {count}" for reason, count in sorted(facts.dropped.items(), key=lambda pair: -pair[1])
    )
    return Trouble(
        "groups_dropped",
        f"{dropped} of {finished} groups were dropped: {reasons}",
        "docs/troubleshooting.md, 'Groups are dropped', has the remedy for each reason",
    )


def _equal_scores(facts: Facts, rows: Rows) -> Trouble | None:
    last = rows[-_EQUAL_STEPS:]
    if not last or any(row.get("zero_advantage_share", 0.0) < 1 for row in last):
        return None
    return Trouble(
        "scores_equal",
        f"in the last {len(last)} steps all completions of each group scored the same, so nothing is learned",
        "use a reward that grades completions, other rows, a higher temperature, or a larger group_size",
    )


def _skipped(facts: Facts, rows: Rows) -> Trouble | None:
    if not rows or not rows[-1].get("skipped"):
        return None
    return Trouble(
        "step_skipped",
        f"step {rows[-1]['step']} changed no weights: {rows[-1]['skipped']}",
        "the groups and the reason are in the run's folder aside/; lower learning_rate if it happens again",
    )


def _logprob_diff(facts: Facts, rows: Rows) -> Trouble | None:
    staleness = rows[-1].get("staleness_mean", 0.0) if rows else 0.0
    difference = rows[-1].get("rollout_logprob_diff_mean") if rows else None
    if staleness or not isinstance(difference, int | float) or difference < LOGPROB_DIFF:
        return None
    return Trouble(
        "logprob_diff",
        f"trainer and model server disagree: their log-probabilities differ by {difference:.2g} on average",
        "docs/troubleshooting.md, '`logprob_diff` is large'",
    )


def _dead_letters(facts: Facts, rows: Rows) -> Trouble | None:
    if facts.status is None or not facts.status.dead:
        return None
    return Trouble(
        "dead_letters",
        f"{facts.status.dead} groups were leased again and again without an ack, and are dead letters",
        f"read them: GET /v1/runs/{facts.run}/dead; then replay or purge them (docs/api.md, 'Dead letters')",
    )


def _archive(facts: Facts, rows: Rows) -> Trouble | None:
    if facts.status is None or not facts.status.archive_lost:
        return None
    return Trouble(
        "archive_lost",
        f"{facts.status.archive_lost} trained groups were not archived: the disk is nearly full or failed",
        "free some space; training continues. API_ARCHIVE_MIN_FREE_BYTES is the floor",
    )


def _disk(facts: Facts, rows: Rows) -> Trouble | None:
    if facts.free_bytes is None or facts.free_bytes >= FLOOR_BYTES or facts.state != RunState.OPEN:
        return None
    return Trouble(
        "disk_floor",
        f"{facts.free_bytes / 1024**3:.1f} GiB are free on the disk of the run's files",
        "free some space: below 2 GiB the API archives no groups, and Redis stops on a full disk",
    )


def _finished_groups(facts: Facts) -> int:
    return facts.accepted + sum(facts.dropped.values())


def _complete(facts: Facts) -> bool:
    """Returns whether the trainer has all groups that it needs."""
    if facts.steps is None or facts.version is None:
        return False
    return PolicyVersion.parse(facts.version).step >= facts.steps


def _atropos(facts: Facts) -> bool:
    return facts.record is not None and facts.record.protocol == "atropos"


_RULES: Final[tuple[Callable[[Facts, Rows], Trouble | None], ...]] = (
    _receipt_failed,
    _rewards_failing,
    _server_away,
    _server_paused,
    _environment_silent,
    _no_environment,
    _no_trainer,
    _no_groups,
    _equal_scores,
    _groups_dropped,
    _server_behind,
    _skipped,
    _logprob_diff,
    _archive,
    _disk,
    _dead_letters,
)
"""The order is the importance: a rule that explains others comes first."""
