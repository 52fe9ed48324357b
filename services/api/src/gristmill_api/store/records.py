"""Converts values of Redis to the SDK's types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from gristmill import PolicyVersion, Protocol, RowResult, RunRecord, RunState, RunStatus
from gristmill_api import errors

MOST_SETTINGS_BYTES = 128 * 1024
"""Of the settings of an environment, or of a trainer, as JSON."""

PLACES = ("below", "within", "above")
"""Of the mean reward of a row, compared with the band of the run's curriculum."""


def canonical(settings: dict[str, Any]) -> str:
    """Returns JSON with sorted keys, so equal settings are equal strings.

    Raises ApiProblem (422) for settings that JSON cannot hold: NaN, infinity, half a surrogate pair, more than some 200
    levels. Raises ApiProblem (413) for more than MOST_SETTINGS_BYTES.
    """
    try:
        to_json([[[[settings]]]])  # An answer wraps them: a list of records at most.
        written = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise errors.bad_request(f"settings must be plain JSON: {error}.") from error
    if len(written) > MOST_SETTINGS_BYTES:
        raise errors.too_long("the settings", len(written), MOST_SETTINGS_BYTES)
    return written


def text(value: bytes | str | None) -> str:
    """Returns a string from Redis, whose replies are bytes; "" for None."""
    return value.decode() if isinstance(value, bytes) else value or ""


def pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    """A Lua script's HGETALL (name, value, name, value, ...) as a dict."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def version(incarnation: bytes | None, step: bytes | None) -> str | None:
    """The label "1.20", or None when no version was recorded."""
    return str(PolicyVersion(int(incarnation), int(step))) if incarnation and step else None


def result_words(result: RowResult | None) -> str:
    """Returns the result of a row as lua/_difficulty.lua reads it; "" for None."""
    if result is None:
        return ""
    numbers = [result.reward, *result.band]
    return " ".join([result.row, *(f"{number:.6g}" for number in numbers), *map(str, [result.groups, *result.turns])])


def run_status(reply: Sequence[Any]) -> RunStatus:
    """From the reply of status.lua."""
    state, incarnation, step, *numbers, age, oldest_step, now, counters, drops = reply
    ready, leased, dead, outstanding, archiving, envs = map(int, numbers)
    counts = {name: int(value) for name, value in pairs(counters).items()}

    def counted(name: str) -> int:
        return counts.get(name, 0)

    def seconds_since(name: str) -> float | None:
        return (int(now) - counts[name]) / 1000 if name in counts else None

    return RunStatus(
        state=RunState(state.decode()),
        version=version(incarnation, step),
        ready=ready,
        leased=leased,
        trained=counted("trained"),
        dead=dead,
        sequences={name: counted(f"{name}_sequences") for name in ("ready", "leased", "dead")},
        bytes_by_state={name: counted(f"{name}_bytes") for name in ("ready", "leased", "dead")},
        accepted=counted("accepted"),
        outstanding=outstanding,
        dropped={reason: int(count) for reason, count in pairs(drops).items()},
        left_out={
            name.removeprefix("left_out:"): count for name, count in counts.items() if name.startswith("left_out:")
        },
        rows_issued=counted("rows") - counted("passed"),
        rows_passed_over=counted("passed"),
        rows={place: counts[f"rows_{place}"] for place in PLACES if f"rows_{place}" in counts},
        bytes=counted("bytes"),
        archiving=archiving,
        archive_lost=counted("archive_lost"),
        envs=envs,
        oldest_ready_s=None if age == b"" else int(age) / 1000,
        oldest_ready_staleness=max(0, int(step) - int(oldest_step)) if step and oldest_step else None,
        lease_expiries=counted("expiries"),
        redeliveries=counted("redeliveries"),
        last_submit_s=seconds_since("submitted_ms"),
        last_asked_s=seconds_since("asked_ms"),
        last_registered_s=seconds_since("registered_ms"),
    )


def run_record(fields: dict[str, bytes]) -> RunRecord:
    """From the HASH `record`."""

    def number(name: str) -> int | None:
        return int(fields[name]) if name in fields else None

    return RunRecord(
        run_id=fields["run_id"].decode(),
        state=RunState(fields["state"].decode()),
        digest=fields["digest"].decode(),
        group_size=int(fields["group_size"]),
        stack=fields["stack"].decode() or None,
        protocol=Protocol(fields["protocol"].decode()),
        env=json.loads(fields["env"]),
        trainer=json.loads(fields["trainer"]) if "trainer" in fields else None,
        incarnation=int(fields["incarnation"]),
        version=version(fields.get("version_incarnation"), fields.get("version_step")),
        groups_per_step=number("groups_per_step"),
        training_steps=number("training_steps"),
        max_staleness=number("max_staleness"),
        created_at=int(fields["created_ms"]) / 1000,
        creation=text(fields.get("creation")),
        taker=text(fields.get("taker")),
    )
