"""Submitting a group, reading its bytes, and the audit of all groups."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from redis.exceptions import RedisError

from gristmill import GROUP_MEDIA_TYPE, Example, GroupAudit, GroupError, RowResult, TrajectoryGroup
from gristmill.group_checks import check_submitted
from gristmill.internal.logs import line
from gristmill_api import errors
from gristmill_api.context import Ctx, GroupId, Name, RequestModel, RunId
from gristmill_api.errors import ApiProblem
from gristmill_api.examples import example
from gristmill_api.http.body_limit import offload
from gristmill_api.http.fast_route import FastRoute, checked, fast_path
from gristmill_api.store import Submission
from gristmill_api.store.keys import row_of

_LOG = logging.getLogger(__name__)
_ID_BYTES: Final = 16
"""Of a group id, about."""
_MOST_RESULT: Final = 4096
"""Characters of a row's result."""
router = APIRouter(prefix="/v1/runs/{run_id}/groups", tags=["groups"], route_class=FastRoute)


class Submitted(RequestModel):
    group_id: str
    stored: bool
    """False: the store already holds this group with the same bytes."""


@router.put(
    "/{group_id}",
    response_model=Submitted,
    responses={201: {"model": Submitted}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {GROUP_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
@fast_path()
async def submit(
    ctx: Ctx,
    request: Request,
    run_id: RunId,
    group_id: GroupId,
    holder: Annotated[Name, Query()],
    result: Annotated[str | None, Query(max_length=_MOST_RESULT)] = None,
) -> Response:
    """Store a group under its permit: 201 stored, 200 the store already holds this group with the same bytes.

    The body is what `gristmill.TrajectoryGroup.encode` returns. The store keeps the body as it arrived. `result`: a
    `gristmill.RowResult` as JSON, in a run whose rows may rest.
    """
    row_result = None if result is None else checked(RowResult.model_validate_json, result, "query", "result")
    try:
        group = await _read(request, run_id, group_id, holder, ctx.limits.max_body_bytes)
        group = group if row_result is None else dataclasses.replace(group, result=row_result)
        stored = await ctx.store.queue.submit(run_id, holder, group)
    except (ApiProblem, RedisError) as error:
        refused = errors.from_redis(error) if isinstance(error, RedisError) else error
        ctx.metrics.submits.labels(refused.code if refused else "internal").inc()
        raise
    ctx.metrics.submits.labels("stored" if stored else "duplicate").inc()
    if stored:
        size = len(group.body)
        _LOG.info(line("submit", run=run_id, group=group_id, env=group.env_id, sequences=group.sequences, bytes=size))
    answer = Submitted(group_id=group_id, stored=stored).model_dump_json()
    return Response(answer, 201 if stored else 200, media_type="application/json")


@router.get(
    "/{group_id}",
    response_class=Response,
    responses={
        200: {
            "content": {
                GROUP_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
                "application/json": {"schema": Example.model_json_schema()},
            }
        }
    },
)
async def payload(ctx: Ctx, request: Request, run_id: RunId, group_id: GroupId) -> Response:
    """A group's bytes as they are stored, while the group is ready, leased, dead or waiting to be archived.

    With `Accept: application/json` the answer is an Example of the group.
    """
    stored = await ctx.store.queue.payload(run_id, group_id)
    if stored is None:
        raise errors.group_missing(run_id, group_id)
    if "application/json" in request.headers.get("accept", "").lower():
        content = await offload(len(stored), example, stored)
        return Response(content, media_type="application/json", headers={"Vary": "Accept"})
    return Response(stored, media_type=GROUP_MEDIA_TYPE)


@router.get("", response_model=GroupAudit)
async def audit(ctx: Ctx, run_id: RunId) -> Response:
    """Every group id by its state, for audits. The cost grows with the run."""
    fates = await ctx.store.runs.audit(run_id)
    ids = sum(len(getattr(fates, name)) for name in GroupAudit.model_fields)
    return Response(await offload(ids * _ID_BYTES, fates.model_dump_json), media_type="application/json")


async def _read(request: Request, run_id: str, group_id: str, holder: str, limit: int) -> Submission:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != GROUP_MEDIA_TYPE:
        raise errors.media_type(media_type, GROUP_MEDIA_TYPE)
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        raise errors.content_encoding(encoding)
    body = await request.body()
    return await offload(len(body), _checked, run_id, group_id, holder, body)


def _checked(run_id: str, group_id: str, holder: str, body: bytes) -> Submission:
    """Returns the group of a request, after a comparison with the URL. Raises ApiProblem."""
    try:
        group = TrajectoryGroup.decode(body)
        check_submitted(group)
        row = row_of(group_id)
    except (GroupError, ValueError) as error:
        raise errors.bad_group(group_id, str(error)) from error
    for name, inside, outside in (
        ("run_id", group.run_id, run_id),
        ("group_id", group.group_id, group_id),
        ("row", group.row, row),
        ("env_id", group.env_id, holder),
    ):
        if inside != outside:
            raise errors.bad_group(group_id, f"its {name} is {inside!r}, but it was sent as {outside!r}")
    return Submission(
        group_id=group_id,
        body=body,
        digest=hashlib.sha256(body).digest(),
        sequences=group.rollout_count,
        tokens=len(group.tokens),
        env_id=group.env_id,
        versions=sorted(group.policy_versions),
    )
