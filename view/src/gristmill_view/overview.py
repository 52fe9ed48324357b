"""The state of a run for people: progress, services, waiting services, and the trouble with its remedy.

`overview(facts)` computes it. `facts.py` reads the facts from a live API or from the run's files. `to_json` returns the
answer of /view/api/runs/{run}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gristmill.internal.metrics import number as _number
from gristmill.internal.metrics import pace
from gristmill.internal.receipts import proven
from gristmill.internal.redaction import redact_text
from gristmill.internal.trouble import Trouble, asks
from gristmill.policy_version import PolicyVersion
from gristmill.run import RunState
from gristmill_view.facts import Facts, Service, row_seconds, trainer_has_batch
from gristmill_view.series import flat
from gristmill_view.trouble import troubles


class Waiting(msgspec.Struct, frozen=True):
    """One service that waits."""

    who: str
    awaits: str = msgspec.field(name="for")


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: the share of right completions (pass@1), with its 95 % interval."""

    step: int
    score: float
    n: int
    """Prompts."""
    low: float | None = None
    high: float | None = None


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of the run by state."""

    ready: int = 0
    leased: int = 0
    dead: int = 0
    trained: int = 0
    dropped: int = 0


class NewestReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The newest receipt of a model server, or of all servers together if only the metrics are here."""

    server: str
    """URL; empty for all servers together."""
    version: str
    state: str
    """ok, failed or unproven."""
    difference: float | None
    """Nats, as `change`."""
    change: float | None
    seconds: float


class Receipts(msgspec.Struct, frozen=True, kw_only=True):
    """How many publications model servers have proven (docs/reproduce.md)."""

    proven: int
    publications: int
    newest: list[NewestReceipt] = []


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run."""

    run: str
    state: str
    """open, suspended, finished, or `facts.STOPPED`."""
    protocol: str
    phase: str
    """The present work of the run, in a few words."""
    step: int
    steps: int | None
    reward: float | None
    """Mean reward of the newest step."""
    reward_parts: dict[str, float]
    logprob_diff: float | None
    tokens_per_second: float | None
    """Trained and prompt tokens per second of wall time, over the last ten steps."""
    seconds_per_step: float | None
    seconds_left: float | None
    started_ms: int | None
    seconds: float | None
    """Time of all steps so far, without pauses of the run."""
    version: str | None
    services: list[Service]
    queue: Queue
    dropped: dict[str, int]
    """Dropped groups by reason."""
    receipts: Receipts | None
    """None if the run has no receipts."""
    waiting: list[Waiting]
    trouble: Trouble | None
    """The most important trouble."""
    troubles: list[Trouble]
    settings: dict[str, Any]
    """Flat: `trainer.learning_rate` -> 0.0001. Without secrets, which records of runs never hold."""
    evaluations: list[EvaluationPoint]
    live: bool
    """Whether an API reported it."""


def overview(facts: Facts) -> Overview:
    """Returns the state of a run, computed from its facts."""
    rows = current_rows(facts)
    newest: Mapping[str, Any] = rows[-1] if rows else {}
    step = max(newest.get("step", 0), _version_step(facts))
    speed = pace(rows)
    seconds_left = None
    if facts.state == RunState.FINISHED:
        seconds_left = 0.0
    elif speed is not None and facts.steps is not None and facts.state == RunState.OPEN:
        seconds_left = max(facts.steps - step, 0) * speed.seconds_per_step
    found = troubles(facts, rows)
    status, record = facts.status, facts.record
    return Overview(
        run=facts.run,
        state=str(facts.state),
        protocol=str(record.protocol) if record is not None else "gristmill",
        phase=_phase(facts, step),
        step=step,
        steps=facts.steps,
        reward=_number(newest.get("reward_mean")),
        reward_parts={
            name: number
            for name, value in newest.get("reward_parts", {}).items()
            if (number := _number(value)) is not None
        },
        logprob_diff=_number(newest.get("rollout_logprob_diff_mean")),
        tokens_per_second=speed.tokens_per_second if speed is not None else None,
        seconds_per_step=speed.seconds_per_step if speed is not None else None,
        seconds_left=seconds_left,
        started_ms=None if facts.started is None else round(facts.started * 1000),
        seconds=_seconds(facts, rows),
        version=facts.version,
        services=list(facts.services),
        queue=Queue(
            ready=status.ready if status else 0,
            leased=status.leased if status else 0,
            dead=status.dead if status else 0,
            trained=status.trained if status else facts.accepted,
            dropped=sum(facts.dropped.values()),
        ),
        dropped=dict(facts.dropped),
        receipts=_receipts(facts, rows),
        waiting=_waiting(facts, step),
        trouble=found[0] if found else None,
        troubles=found,
        settings=dict(flat(facts.settings)),
        evaluations=[point for row in facts.evaluations if (point := evaluation_point(row)) is not None],
        live=status is not None,
    )


def _seconds(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> float | None:
    if facts.seconds is not None and len(rows) == len(facts.rows):
        return facts.seconds
    return sum(map(row_seconds, rows)) if rows else None


def to_json(found: Overview) -> dict[str, Any]:
    """Returns the overview as JSON values; a number that JSON cannot hold is null."""
    values: dict[str, Any] = msgspec.to_builtins(found)
    return {name: _finite(value) for name, value in values.items()}


def current_rows(facts: Facts) -> list[Mapping[str, Any]]:
    """Returns the trainer's rows without the rows of steps that a resumed trainer has not repeated yet."""
    if facts.status is None or facts.version is None:
        return list(facts.rows)
    return [row for row in facts.rows if row["step"] <= _version_step(facts) + 1]


def _receipts(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> Receipts | None:
    """Counts publications by the run's receipts, else by the rows of metrics, which count the step before."""
    if facts.receipts:
        found = proven(facts.receipts)
        last = {receipt.server: receipt for receipt in facts.receipts}
        newest = [
            NewestReceipt(
                server=redact_text(server),
                version=receipt.version,
                state=str(receipt.state),
                difference=receipt.difference,
                change=receipt.change,
                seconds=receipt.seconds,
            )
            for server, receipt in sorted(last.items())
        ]
        return Receipts(proven=found.proven, publications=found.publications, newest=newest)
    counted = [(row, states) for row in rows if (states := _receipt_states(row))]
    if not counted:
        return None
    row, states = counted[-1]
    together = NewestReceipt(
        server="",
        version="",
        state=states[0],
        difference=_number(row.get("receipt_difference")),
        change=_number(row.get("receipt_change")),
        seconds=_number(row.get("receipt_seconds")) or 0.0,
    )
    good = sum(states == ["ok"] for _, states in counted)
    return Receipts(proven=good, publications=len(counted), newest=[together])


def _receipt_states(row: Mapping[str, Any]) -> list[str]:
    """Returns the states of a row's receipts, the worst first."""
    counts = row.get("receipts") or {name.partition(".")[2] for name in row if name.startswith("receipts.")}
    return [state for state in ("failed", "unproven", "ok") if state in counts]


def _version_step(facts: Facts) -> int:
    return PolicyVersion.parse(facts.version).step if facts.version else 0


# --- What happens now ------------------------------------------------------------------------------------------
def _phase(facts: Facts, step: int) -> str:
    if facts.phase:
        return facts.phase
    if facts.state != RunState.OPEN:
        return str(facts.state)
    if facts.record is not None and facts.record.trainer is None:
        return "waits for a trainer"
    if facts.record is not None and facts.version is None:
        return "the trainer publishes the first weights"
    return f"training step {step + 1}" if facts.steps is None or step < facts.steps else "finishing"


def _waiting(facts: Facts, step: int) -> list[Waiting]:
    status, record = facts.status, facts.record
    if status is None or record is None or facts.state != RunState.OPEN:
        return []
    if record.trainer is None:
        return [Waiting("environment", "a trainer that takes the run")]
    if facts.version is None:
        return [Waiting("environment", "the first weights, which the trainer loads and publishes")]
    if facts.steps is not None and step >= facts.steps:
        return []
    reasons = []
    if not trainer_has_batch(record, status):
        wanted = f" of {record.groups_per_step}" if record.groups_per_step else ""
        reasons.append(Waiting("trainer", f"groups: {status.ready}{wanted} are ready"))
        if status.outstanding:
            reasons.append(Waiting("environment", f"completions and scores of {status.outstanding} rows"))
    elif status.outstanding == 0 and asks(status):
        reasons.append(Waiting("environment", "the next weights, which the trainer computes"))
    return reasons


# --- Evaluations -----------------------------------------------------------------------------------------------
def evaluation_point(row: Mapping[str, Any]) -> EvaluationPoint | None:
    """Returns the point of a row of the source `eval`, or None if nothing was judged.

    The point of several evaluations with names is the mean of theirs, without an interval.
    """
    score = _number(row.get("pass@1"))
    if score is None:
        named = {key.removesuffix("/pass@1"): _number(row[key]) for key in row if key.endswith("/pass@1")}
        values = {name: value for name, value in named.items() if value is not None}
        if not values:
            return None
        prompts = sum(int(_number(row.get(f"{name}/prompts")) or 0) for name in values)
        return EvaluationPoint(step=int(row["step"]), score=sum(values.values()) / len(values), n=prompts)
    prompts = int(_number(row.get("prompts")) or 0)
    low, high = _interval(score, _number(row.get("pass@1_stderr")), prompts)
    return EvaluationPoint(step=int(row["step"]), score=score, n=prompts, low=low, high=high)


def _interval(score: float, error: float | None, prompts: int) -> tuple[float | None, float | None]:
    """Returns the 95 % interval as `evaluate` defines it: Wilson's at exactly 0 and 1, else 1.96 standard errors."""
    if score in (0.0, 1.0) and prompts > 0:
        z2 = 1.96**2
        edge = z2 / (prompts + z2)
        return (0.0, edge) if score == 0 else (1 - edge, 1.0)
    if error is None:
        return None, None
    return max(0.0, score - 1.96 * error), min(1.0, score + 1.96 * error)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value
