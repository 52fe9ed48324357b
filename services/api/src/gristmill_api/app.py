"""The application, which `python -m gristmill_api` serves."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from redis.exceptions import RedisError
from starlette.middleware import Middleware

from gristmill.internal import logs
from gristmill.internal.signals import stop_on_hangup
from gristmill_api import access, atropos, routes, view
from gristmill_api.access.guard import HostCheck
from gristmill_api.archive.archiver import Archiver
from gristmill_api.archive.reports import RunReports
from gristmill_api.archive.run_files import RunFiles
from gristmill_api.background import Supervisor, keep_retention, report_addresses
from gristmill_api.context import Context
from gristmill_api.http import error_handlers
from gristmill_api.http.body_limit import Bodies, BodyLimit
from gristmill_api.http.fast_route import hot_routes
from gristmill_api.metrics import CountRequests, Metrics
from gristmill_api.notifications import Notifications, listen_to_redis
from gristmill_api.settings import Settings
from gristmill_api.store import Store
from gristmill_api.store.connection import check_server, connect
from gristmill_view.app import PageFiles, api_routes, called_on_stop
from gristmill_view.run_source import RunSource

_LOG = logging.getLogger(__name__)
_CHECK_S = 2.0
"""Longest wait for Redis' version at the start, which does not wait for Redis."""


def create_app(settings: Settings) -> FastAPI:
    """The API over the Redis of `settings`. It starts, and answers 503, also while that Redis is away."""
    context_redis = connect(settings.redis_url, settings.redis_login)
    metrics = Metrics(settings.archive_dir)
    store = Store(context_redis, settings.limits, archive=settings.archive_dir is not None)
    context = Context(settings.limits, store, Notifications(), metrics)
    live = view.LiveRuns(store, settings.view_servers)
    page = RunSource(settings.roots, live)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        _log_as_one()
        stop_on_hangup()
        listener = connect(settings.redis_url, settings.redis_login)
        # If Redis is away, the task that listens to it checks it later.
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_CHECK_S):
                await check_server(listener)
        tasks = Supervisor(metrics)
        tasks.start("watch-redis", functools.partial(listen_to_redis, listener, context.notifications, metrics))
        archiver = Archiver(store.archive, context.notifications, metrics, settings.archive_dir, settings.limits)
        tasks.start("archive", archiver.run, archiver.stop)
        if settings.archive_dir is not None:
            run_files = RunFiles(store.runs, settings.archive_dir, metrics)
            tasks.start("run-files", run_files.run, run_files.stop)
            reports = RunReports(store, functools.partial(RunSource, settings.roots, live), settings.archive_dir)
            tasks.start("reports", reports.run)
        tasks.start("retention", functools.partial(keep_retention, store, settings.limits.run_retention_s))
        reporting = asyncio.create_task(report_addresses(settings.access), name="report-addresses")
        where = settings.archive_dir or "off"
        _LOG.info(logs.line("api", redis=settings.redis_address, archive=where, state="up"))
        if warning := settings.access.hosts.warning():
            _LOG.warning(warning)
        try:
            # All objects that exist now stay. The garbage collector need not visit them at each run.
            gc.freeze()
            loop = asyncio.get_running_loop()
            with called_on_stop(lambda: loop.call_soon_threadsafe(context.notifications.close)):
                yield
        finally:
            reporting.cancel()
            page.close()
            await tasks.stop()
            await listener.aclose()
            await context_redis.aclose()

    # /metrics has the metrics. To ask for each request whether OpenTelemetry listens would cost time.
    silent: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    # FastAPI's pages of documentation run a script of another site on the API's origin.
    app = FastAPI(
        title="Gristmill trajectory API",
        version="1",
        lifespan=lifespan,
        telemetry=silent,
        docs_url=None,
        redoc_url=None,
        middleware=_middlewares(settings, metrics),
    )
    app.state.context = context
    app.state.atropos = atropos.AtroposContext(context, settings.atropos_run)
    access.install_openapi(app, settings.access.tokens is not None)
    error_handlers.install(app)
    app.router.routes += hot_routes([*routes.all_routes, *atropos.router.routes])
    app.router.routes += api_routes(page, stopping=lambda: context.notifications.closed)
    app.include_router(routes.native)
    app.include_router(atropos.router)
    return app


def _middlewares(settings: Settings, metrics: Metrics) -> list[Middleware]:
    """Returns the middlewares in the order in which a request passes them."""
    limits, bodies = settings.limits, Bodies(settings.limits.max_concurrent_body_bytes)
    metrics.body_bytes.set_function(lambda: bodies.held)
    return [
        Middleware(CountRequests, metrics=metrics),
        Middleware(HostCheck, hosts=settings.access.hosts, atropos_paths=atropos.paths),
        Middleware(PageFiles),  # The page's files hold no data and need no token.
        *access.middlewares(settings.access),
        Middleware(BodyLimit, limit=limits.max_body_bytes, bodies=bodies, timeout=limits.request_timeout_s),
    ]


def _log_as_one() -> None:
    """Write uvicorn's lines in our format, without its line per request: /metrics counts the requests."""
    logs.setup("api")
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)


app = create_app(Settings.read(os.environ))
