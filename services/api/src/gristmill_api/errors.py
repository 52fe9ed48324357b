"""Every error of the API: its code, HTTP status, message and remedy.

On the wire: `{"error": {"code": ..., "message": ..., "remedy": ...}}`. Clients act on the code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,  # noqa: A004
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,  # noqa: A004
)

from gristmill import ApiError
from gristmill.internal import hosts

_LONGEST = 1000
"""Characters of a message."""


class ApiProblem(ApiError):
    """An error response. `retry_after`: seconds after which the same request may succeed."""

    def __init__(self, code: str, status: int, message: str, remedy: str = "", retry_after: int | None = None) -> None:
        # A message may quote a part of a request, but not a body of 64 MiB.
        clipped = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
        super().__init__(code, status, clipped, remedy)
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.message, "remedy": self.remedy}}

    def detail(self) -> dict[str, str]:
        """The body at the API's root, where Atropos' clients read `detail`."""
        return {"detail": f"{self.message} {self.remedy}", "code": self.code}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def bad_request(message: str) -> ApiProblem:
    return ApiProblem("bad_request", 422, message, "GET /openapi.json lists every field; docs/api.md shows every call.")


def run_missing(run_id: str) -> ApiProblem:
    return ApiProblem("run_missing", 404, f"run {run_id!r} does not exist.", "An environment opens it: POST /v1/runs.")


@dataclass(frozen=True)
class LivingEnv:
    """An environment that is registered and alive."""

    env_id: str
    heard_s: float
    """Seconds since it last asked for permits or sent a heartbeat."""
    left_s: float
    """Seconds until it counts as dead."""


def run_open(run_id: str, other: str, stack: str, living: Sequence[LivingEnv]) -> ApiProblem:
    """`living`: environments of the other run, which keep a stack from a run that an environment opens. A trainer that
    extends a run suspends no other run, with or without environments: its refusal names none."""
    why = f"has living environments: {_names(living)}" if living else "is open"
    close = f"close it (curl -X POST <API>/v1/runs/{other}/close)"
    return _retry_when_dead(
        living,
        ApiProblem(
            "run_open",
            409,
            f"run {run_id!r} cannot start: its stack {stack!r} works on one run at a time, and run {other!r} {why}.",
            f"{_stop(living)}Run {other!r} is suspended then, and can be resumed later. Or let it finish, or {close}, "
            "or start another stack and name it (GRISTMILL_STACK)."
            if living
            else f"Let run {other!r} finish, or {close}.",
        ),
    )


def suspended(run_id: str) -> ApiProblem:
    return ApiProblem(
        "suspended",
        409,
        f"run {run_id!r} is suspended: another run took its stack while no environment of this one was alive.",
        "Nothing of it is lost. Start its environment again to resume it: POST /v1/runs with the same settings.",
    )


def _names(living: Sequence[LivingEnv]) -> str:
    return ", ".join(f"{env.env_id!r} (heard from {max(0.0, env.heard_s):.0f} s ago)" for env in living)


def _stop(living: Sequence[LivingEnv]) -> str:
    wait = max(math.ceil(env.left_s) for env in living)
    return (
        "Stop the environments first. One that ends by itself gives the run up at once; after a kill, try again in "
        f"{wait} s. "
    )


def _retry_when_dead(living: Sequence[LivingEnv], refused: ApiProblem) -> ApiProblem:
    if living:
        refused.retry_after = max(1, *(math.ceil(env.left_s) for env in living))
    return refused


def run_not_finished(run_id: str) -> ApiProblem:
    return ApiProblem(
        "run_open",
        409,
        f"run {run_id!r} is not finished.",
        f"Close it first: curl -X POST <API>/v1/runs/{run_id}/close",
    )


def archiving(run_id: str, groups: int) -> ApiProblem:
    return ApiProblem(
        "archiving",
        409,
        f"{groups} groups of run {run_id!r} wait to be written to disk: trained groups, or the fates of others.",
        "Try again in a moment. If the number stays, free some space on the archive's disk.",
        retry_after=1,
    )


def replaced_later(run_id: str, groups: int) -> ApiProblem:
    """`archiving` as a status that clients wait for: a run of other settings replaces this run in a moment."""
    refused = archiving(run_id, groups)
    refused.status = 503
    return refused


def no_permits(run_id: str) -> ApiProblem:
    return ApiProblem(
        "no_permits",
        409,
        f"run {run_id!r} is fed at the API's root (Atropos' protocol), which knows no permits.",
        "Open a run of another id.",
    )


OTHER_ATROPOS_RUN: Final = "Set ATROPOS_RUN to another run id, and restart the API."


def not_atropos(run_id: str) -> ApiProblem:
    return ApiProblem(
        "not_atropos",
        409,
        f"run {run_id!r}, which the API's root is bound to, is fed at /v1.",
        OTHER_ATROPOS_RUN,
    )


def env_missing(run_id: str, env_id: str) -> ApiProblem:
    return ApiProblem(
        "env_missing",
        404,
        f"environment {env_id!r} is not registered with run {run_id!r}.",
        f"Register it: POST /v1/runs/{run_id}/envs.",
    )


def other_registration(run_id: str, env_id: str, left_s: float) -> ApiProblem:
    """`left_s`: seconds until the registration expires; 0: it has expired, and any environment may take the name."""
    return ApiProblem(
        "other_registration",
        409,
        f"environment {env_id!r} of run {run_id!r} was registered with another word than this request has (header "
        "Gristmill-Word).",
        f"Use another name. Or register this name when the registration has expired: in {math.ceil(left_s)} s, unless "
        "its process is alive.",
        retry_after=max(1, math.ceil(left_s)),
    )


def writer_missing(run_id: str, source: str) -> ApiProblem:
    return ApiProblem(
        "env_missing",
        404,
        f"only registered environments of run {run_id!r} report metrics of the source {source!r}, and none of them has "
        "the word of this request (header Gristmill-Word).",
        f"Register the environment: POST /v1/runs/{run_id}/envs.",
    )


def run_in_use(run_id: str, why: str, retry_after: int) -> ApiProblem:
    """An environment's token may not replace, extend or suspend a run that others use. `why`: how they use it."""
    return ApiProblem(
        "run_in_use",
        409,
        f"run {run_id!r} is in use: {why}.",
        "Stop its environments first, or use the admin's token.",
        retry_after=max(1, retry_after),
    )


def too_many(what: str, message: str, remedy: str) -> ApiProblem:
    """A bound on what one run, or all runs, may hold. The code is `too_many_<what>`."""
    return ApiProblem(f"too_many_{what}", 409, f"{message}, which is the most.", remedy)


def too_long(what: str, length: int, most: int) -> ApiProblem:
    return ApiProblem("too_large", 413, f"{what}: {length} bytes as JSON; at most {most} are kept.", "Send less.")


def source_missing(run_id: str, source: str, sources: Sequence[str]) -> ApiProblem:
    """`sources`: the sources that reported metrics of the run."""
    return ApiProblem(
        "source_missing",
        404,
        f"no source {source!r} reported metrics of run {run_id!r}.",
        f"Sources of this run: {', '.join(sources) or 'none so far'}.",
    )


def group_missing(run_id: str, group_id: str) -> ApiProblem:
    return ApiProblem(
        "group_missing",
        404,
        f"run {run_id!r} holds no bytes of group {group_id!r}: it was never submitted, or is trained or dropped.",
        "Trained groups are in the run's archive.",
    )


def config_differs(
    run_id: str, half: str, old: Mapping[str, Any], new: Mapping[str, Any], living: Sequence[LivingEnv] = ()
) -> ApiProblem:
    """`half` is "environment" or "trainer"; `old` the recorded settings, `new` those that came now. `living`: the
    environments without which the run, of which no step is finished, would be replaced."""
    message = f"run {run_id!r} is recorded with other {half} settings: {'; '.join(differences(old, new))}."
    remedy = "Use the old settings, or choose another run id (RUN_ID, or --run_id) for a new run."
    if living:
        # First, because a long list of differences is cut.
        message = f"run {run_id!r} has living environments: {_names(living)}; {message}"
        remedy = f"{_stop(living)}The run has no finished step, so it is replaced then."
    return _retry_when_dead(living, ApiProblem("config_differs", 409, message, remedy))


def other_creation(run_id: str, given: str | None, current: str) -> ApiProblem:
    """The call, or the checkpoint of a trainer that takes the run, belongs to an earlier run of the same id."""
    return ApiProblem(
        "other_creation",
        409,
        f"the call is for creation {given!r} of run {run_id!r}, which was deleted; this run is creation {current!r}.",
        f"Start the process again. A trainer: move the run's folder (runs/{run_id}) away to train from the beginning, "
        "or choose another run id (RUN_ID, or --run_id).",
    )


def finished(run_id: str, remedy: str = "Choose another run id (RUN_ID, or --run_id) for a new run.") -> ApiProblem:
    return ApiProblem("finished", 409, f"run {run_id!r} is finished.", remedy)


def bad_config(message: str) -> ApiProblem:
    return ApiProblem("bad_config", 422, message, "Change the trainer's settings.")


def fenced(run_id: str, incarnation: int, current: int) -> ApiProblem:
    return ApiProblem(
        "fenced",
        409,
        f"trainer incarnation {incarnation} of run {run_id!r} was replaced by incarnation {current}.",
        "Stop this trainer, or take the run again.",
    )


def version_backwards(run_id: str, step: int, recorded: int) -> ApiProblem:
    return ApiProblem(
        "version_backwards",
        409,
        f"run {run_id!r} is at step {recorded}; its version cannot go back to step {step}.",
        "A trainer that resumes earlier takes the run again first.",
    )


def permit_lost(run_id: str, group_id: str, why: str) -> ApiProblem:
    return ApiProblem(
        "permit_lost",
        410,
        f"no permit for group {group_id!r} of run {run_id!r}: {why}.",
        "Discard it and ask for another permit.",
    )


def conflict(run_id: str, group_id: str, message: str) -> ApiProblem:
    return ApiProblem("conflict", 409, f"group {group_id!r} of run {run_id!r} {message}.", "Discard this one.")


def bad_group(group_id: str, reason: str) -> ApiProblem:
    return ApiProblem("bad_group", 400, f"group {group_id!r}: {reason}.", "Nothing was stored.")


def client_gone() -> ApiProblem:
    return ApiProblem("client_gone", 400, "the client hung up in the middle of its request.", "Nothing was stored.")


def media_type(found: str, wanted: str) -> ApiProblem:
    return ApiProblem("media_type", 415, f"a group's content type is {wanted}, not {found or 'unset'}.", "Set it.")


def content_encoding(found: str) -> ApiProblem:
    return ApiProblem(
        "content_encoding",
        415,
        f"Content-Encoding {found!r} is not known here.",
        "Send the group as it is.",
    )


def too_large(limit: int) -> ApiProblem:
    message = f"the request body is over {limit} bytes."
    return ApiProblem("too_large", 413, message, "Send less, or raise API_MAX_BODY_BYTES.")


def too_many_lists(most: int) -> ApiProblem:
    message = f"the request's JSON has more than {most} lists and objects: so many '[' and '{{', in strings too."
    return ApiProblem("too_large", 413, message, "Send less.")


def too_many_bodies(limit: int) -> ApiProblem:
    message = f"request bodies of {limit} bytes are in memory already."
    remedy = "Try again, or raise API_MAX_CONCURRENT_BODY_BYTES (and the API's memory)."
    return ApiProblem("too_many_bodies", 503, message, remedy, retry_after=1)


def body_stalled(seconds: float, received: int) -> ApiProblem:
    message = f"only {received} bytes of the request's body arrived in {seconds:.3g} s."
    return ApiProblem(
        "body_stalled", 503, message, "Send the request again. Check the network if it happens again.", retry_after=1
    )


def unauthorized(request: str, need: str, given: bool) -> ApiProblem:
    """`given`: there was an Authorization header, but no token of ours in it."""
    why = "its token is not known" if given else "it has no token"
    remedy = "Send 'Authorization: Bearer TOKEN', or Basic with the token as password (docs/security.md)."
    return ApiProblem("unauthorized", 401, f"{request} needs a token (role: {need}), and {why}.", remedy)


def forbidden(request: str, need: str, role: str) -> ApiProblem:
    message = f"{request} is for the role {need}; this token's role is {role}."
    return ApiProblem("forbidden", 403, message, "docs/security.md lists what each role may do.")


def cross_site(request: str, origin: str | None) -> ApiProblem:
    message = f"{request} was sent by a browser for a page of another site ({origin or 'origin unknown'})."
    return ApiProblem(
        "cross_site",
        403,
        message,
        "API_CORS_ORIGINS names the origins whose pages may. A program "
        "that sends a browser's headers, such as its User-Agent, may add Sec-Fetch-Site: none.",
    )


def host_not_allowed(host: str) -> ApiProblem:
    return ApiProblem("host_not_allowed", 421, hosts.message(host), hosts.REMEDY)


_ACKS: Final = "Try again once the trainer has acked, after each checkpoint: lower checkpoint_interval, or raise"


def store_full(message: str) -> ApiProblem:
    remedy = (
        f"{_ACKS} API_MAX_STORED_BYTES (and Redis' maxmemory). Groups of finished and suspended runs count too, until "
        "these runs are deleted (DELETE /v1/runs/RUN)."
    )
    return ApiProblem("store_full", 429, message, remedy, retry_after=2)


def run_full(run_id: str, held: int, groups: int) -> ApiProblem:
    message = f"run {run_id!r} holds {groups} groups of {held} bytes."
    return ApiProblem("store_full", 429, message, f"{_ACKS} API_MAX_RUN_BYTES or API_MAX_RUN_GROUPS.", retry_after=2)


def lease_lost(run_id: str, batch_ids: list[str]) -> ApiProblem:
    return ApiProblem(
        "lease_lost",
        410,
        f"run {run_id!r} holds no lease for batches {', '.join(batch_ids)}: the leases expired, and other leases may "
        "have their groups.",
        "Any other batch of this request was acked. Extend leases in time, or raise API_LEASE_TTL_S.",
    )


def lease_by_sequences(run_id: str) -> ApiProblem:
    """A group of /v1 may lack sequences, so the groups that a run may still send need not sum to an exact number."""
    return ApiProblem(
        "lease_by_sequences",
        409,
        f"run {run_id!r} is fed at /v1, where a lease by sequences could wait for ever: a group may lack sequences.",
        "Lease by groups.",
    )


def lease_too_large(run_id: str, groups: int, most: int) -> ApiProblem:
    """`most`: groups that may be ready before the trainer's next version."""
    return ApiProblem(
        "lease_too_large",
        409,
        f"{groups} groups of run {run_id!r} are never ready at once, so the lease would wait for ever: the trainer "
        f"took the run with groups_per_step x (1 + max_staleness) = {most}.",
        "Lease fewer groups, or take the run with a larger batch_size, gradient_accumulation_steps or max_staleness.",
    )


def batch_acked(run_id: str, batch_id: str) -> ApiProblem:
    return ApiProblem(
        "batch_acked", 409, f"batch {batch_id!r} of run {run_id!r} was acked already.", "Lease under a new batch id."
    )


def store_unavailable(error: RedisError) -> ApiProblem:
    return ApiProblem(
        "store_unavailable", 503, f"Redis: {error}.", "Try again; the API recovers with Redis.", retry_after=1
    )


def internal(error: Exception) -> ApiProblem:
    message = f"the API failed: {type(error).__name__}."
    return ApiProblem("internal", 500, message, "Its log has the traceback; please report it.")


def from_redis(error: RedisError) -> ApiProblem | None:
    """Returns the problem that a failure of Redis is for the client; None if it is a defect of the API."""
    if isinstance(error, OutOfMemoryError):
        return store_full("Redis is at its maxmemory.")
    if isinstance(error, (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError)):
        return store_unavailable(error)
    # redis-py has no types for these: a script that runs too long, a disk that cannot be written, ...
    if str(error).startswith(("BUSY ", "MISCONF", "NOREPLICAS", "MASTERDOWN", "NOPERM")):
        return store_unavailable(error)
    return None


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """`"a.b: 1 -> 2"` for every leaf that differs, in the keys' order. 1 and 1.0 are equal, 1 and true are not."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [] if _plain(old) == _plain(new) else [f"{at}: {_shown(old)} -> {_shown(new)}"]
    found: list[str] = []
    for key in sorted({*old, *new}):
        found += differences(old.get(key, _UNSET), new.get(key, _UNSET), f"{at}.{key}" if at else key)
    return found


_UNSET = object()


def _plain(value: object) -> str | None:
    """Returns JSON with whole numbers as integers. None: the value is not set."""
    if value is _UNSET:
        return None
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(digits: str) -> int | float:
    number = float(digits)
    return int(number) if number.is_integer() else number


def _shown(value: object) -> str:
    return "unset" if value is _UNSET else repr(value)
