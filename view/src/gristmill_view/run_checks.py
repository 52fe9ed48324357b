"""Checks of a run's files after its training: settings, archive, the trainer's records, steps, publications."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gristmill.archive import ArchiveError, segment
from gristmill.archive.drops import read_drops
from gristmill.archive.trained import NOT_RECORDED, TrainedGroup
from gristmill.errors import GristmillError
from gristmill.folders import RunFolder
from gristmill.internal.check import Check
from gristmill.internal.lines import read_growing_jsonl
from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, failing, parse_receipts, proven
from gristmill.internal.redaction import redact_text
from gristmill.internal.trouble import CODES
from gristmill.run import RunState
from gristmill_view.trouble import differing, on_policy

_LISTED: Final = 5


def check_files(run: RunFolder) -> Iterator[Check]:
    """Yields the checks that need the run's files and no other package."""
    yield _settings(run)
    archived, archive = _archive(run)
    yield archive
    yield _records(run, archived)
    rows = run.metrics()
    yield _steps(run, rows)
    yield _agreement(rows)
    yield _publications(run)


def _settings(run: RunFolder) -> Check:
    record = run.record()
    if record is None:
        return Check("settings", "warning", "run.json is missing or not readable: the settings of the run are unknown")
    return Check("settings", "ok", f"run {record.run_id} is {record.state}, version {record.version or 'unknown'}")


def _archive(run: RunFolder) -> tuple[set[str], Check]:
    """Returns the ids of the archived groups, and the check of the archive."""
    created_ms = _created_ms(run)
    ids, problems = _group_ids(run.archive_segments(), created_ms)
    if problems:
        return ids, Check("archive", "failed", "; ".join(problems))
    if not ids:
        text = (
            "no group is archived: the rollouts cannot be read or trained on again. Set GRISTMILL_RUNS_DIR of the API"
        )
        return ids, Check("archive", "failed", text)
    gone: Counter[str] = Counter()
    for path in run.drops():
        gone.update(
            drop.reason or "unknown"
            for drop, _ in read_drops(path)
            if drop.what == "let_go" and created_ms in (None, drop.creation)
        )
    if gone:
        why = ", ".join(f"{count} as {reason}" for reason, count in gone.items())
        text = f"{len(ids)} groups, and {gone.total()} trained groups are not kept ({why})"
        more = "only the other steps can be trained again. Raise API_ARCHIVE_MAX_BYTES, or free disk space"
        return ids, Check("archive", "warning", f"{text}: {more}")
    return ids, Check("archive", "ok", f"{len(ids)} groups, and each checksum is right")


def _created_ms(run: RunFolder) -> int | None:
    """Returns the time of the run's creation as archives and drops have it; None if run.json is missing."""
    record = run.record()
    return None if record is None else record.created_ms


def _group_ids(paths: Sequence[Path], created_ms: int | None) -> tuple[set[str], list[str]]:
    """Returns the ids of the groups in whole segments and in the beginnings of damaged ones, and the damages.

    `created_ms`: the creation that counts; None for all.
    """
    ids: set[str] = set()
    problems = []
    for path in paths:
        try:
            for _, frames, head_size, _ in segment.read_segment(path, created_ms):
                ids.add(segment.parse_id(frames, head_size))
        except ArchiveError as error:
            problems.append(error.report())
    return ids, problems


def _records(run: RunFolder, archived: set[str]) -> Check:
    """Checks that each archived group has a record of the trainer, with its step and its log-probabilities."""
    recorded: set[str] = set()
    brief: set[str] = set()
    try:
        for path in run.trained_segments():
            for _, frames, head_size, _ in segment.read_segment(path, _created_ms(run)):
                group = TrainedGroup.decode(segment.parse(frames, head_size).body)
                (brief.add if group.outcome == NOT_RECORDED else brief.discard)(group.group_id)
                recorded.add(group.group_id)
    except GristmillError as error:
        return Check("trainer's records", "failed", error.report())
    if not recorded:
        return Check(
            "trainer's records", "warning", "none: the steps of the groups are unknown (record_rollouts: true)"
        )
    without = archived - recorded
    if without or brief:
        text = f"{len(without)} archived groups have no record, and {len(brief)} a record without tokens"
        return Check("trainer's records", "warning", f"{text} ({_listed(without or brief)}): the disk was full or slow")
    return Check("trainer's records", "ok", f"{len(recorded)} groups, with step, outcome and log-probabilities")


def _steps(run: RunFolder, rows: Sequence[dict[str, Any]]) -> Check:
    if not rows:
        return Check("steps", "failed", "metrics.jsonl is missing or empty: no step was trained")
    record = run.record()
    numbers = [int(row["step"]) for row in rows]
    known = set(numbers)
    count = numbers[-1] - sum(1 <= number <= numbers[-1] for number in known)
    if count:
        some = list(itertools.islice((step for step in range(1, numbers[-1] + 1) if step not in known), _LISTED + 1))
        return Check("steps", "failed", f"metrics.jsonl has no row of {count} steps ({_listed(some)})")
    skipped = [row["step"] for row in rows if row.get("skipped")]
    if skipped:
        text = f"{len(skipped)} of {len(rows)} steps changed no weights ({_listed(skipped)})"
        return Check("steps", "warning", text, code="step_skipped")
    wanted = None if record is None else record.training_steps
    if wanted is not None and record is not None and record.state == RunState.FINISHED and numbers[-1] < wanted:
        return Check("steps", "warning", f"the run ended after step {numbers[-1]} of {wanted}")
    return Check("steps", "ok", f"{len(rows)} steps, and each changed the weights")


def _agreement(rows: Sequence[dict[str, Any]]) -> Check:
    """Checks that trainer and server agree in the steps whose groups came from the newest weights only."""
    name = "log-probabilities"
    compared = on_policy(rows)
    if not compared:
        return Check(name, "ok", "not compared here: no step trained on the newest weights only")
    bad = [step for step, _ in differing(rows)]
    largest = max(difference for _, difference in compared)
    if bad:
        text = f"trainer and model server differ by up to {largest:.2g} on average in {len(bad)} steps ({_listed(bad)})"
        return Check(name, "failed", f"{text}: {CODES['logprob_diff'].remedy}", code="logprob_diff")
    text = f"trainer and model server agree to {largest:.2g} on average, over {len(compared)} steps"
    return Check(name, "ok", text)


def _publications(run: RunFolder) -> Check:
    """Checks the last receipt of each server. A failed receipt before it is a warning, because environments did not
    sample from the server until a later publication succeeded."""
    name, path = "publications", run.own_file(RECEIPTS_FILE)
    rows = [] if path is None else read_growing_jsonl(path)
    receipts = parse_receipts(rows)
    if odd := len(rows) - len(receipts):
        return Check(name, "failed", f"{odd} rows of {path} are not receipts; another program changed the file")
    if not receipts:
        text = f"no {RECEIPTS_FILE}: the run has no proof that servers had the weights"
        return Check(name, "warning", text)
    good, count = proven(receipts)
    text = f"{good} of {count} publications are proven"
    if last := failing(receipts):
        one, more = last[0], "" if len(last) == 1 else f" (and {len(last) - 1} more servers)"
        text = f"{text}. {redact_text(one.server)}{more} did not serve version {one.version}"
        return Check(name, "failed", f"{text}: {one.detail} [{one.cause}]", code="receipt_failed")
    if failed := [one for one in receipts if one.state is ReceiptState.FAILED]:
        causes = Counter(one.cause or "unknown" for one in failed)
        why = ", ".join(f"{cause} {times} times" for cause, times in causes.items())
        text = f"{text}, after {len(failed)} failed receipts of versions {_listed({one.version for one in failed})}"
        return Check(name, "warning", f"{text}: {why}. A later publication succeeded; {failed[-1].detail}")
    if good < count:
        unproven = [one for one in receipts if one.state is ReceiptState.UNPROVEN]
        text = f"{text}; the steps of the others changed the weights too little to see"
        why = next((one.detail for one in unproven if one.detail), "")
        return Check(name, "warning", f"{text}, or the server gave no receipt: {why}" if why else text)
    return Check(name, "ok", f"all {count} publications are proven")


def _listed(values: Iterable[Any]) -> str:
    ordered = sorted(map(str, values), key=lambda text: (len(text), text))
    return ", ".join(ordered[:_LISTED]) + (", …" if len(ordered) > _LISTED else "")
