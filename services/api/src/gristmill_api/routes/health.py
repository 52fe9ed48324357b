"""Is it up, is it ready, how is it doing."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError

from gristmill_api import errors
from gristmill_api.context import Ctx

router = APIRouter(tags=["health"])


@router.get("/healthz")
@router.head("/healthz", include_in_schema=False)
async def healthz() -> dict[str, str]:
    """200 while the process serves requests, whatever Redis does: restarting the API would not repair Redis."""
    return {"status": "ok"}


@router.get("/readyz")
@router.head("/readyz", include_in_schema=False)
async def readyz(ctx: Ctx) -> dict[str, str]:
    """200 when groups can be stored and leased; 503 with the reason while Redis is down or still loading."""
    try:
        await ctx.store.ping()
    except RedisError as error:
        raise errors.store_unavailable(error) from error
    return {"status": "ready"}


@router.get("/metrics", response_class=Response)
async def metrics(ctx: Ctx) -> Response:
    """Prometheus text. 200 also while Redis is down: `gristmill_api_redis_up 0` is the news then."""
    try:
        ctx.metrics.store.runs = await ctx.store.runs.open_statuses()
        ctx.metrics.store.redis_info = await ctx.store.redis_info()
        ctx.metrics.redis_up.set(1)
    except RedisError:
        ctx.metrics.store.hide()
        ctx.metrics.redis_up.set(0)
    return Response(ctx.metrics.text(), media_type=CONTENT_TYPE_LATEST)
