"""The page as a Starlette application: its files, and the JSON that it reads.

    /view/static/...       the files in static/
    /view, /view/...       index.html, whose script shows the run that the path names
    /view/api/...          JSON, server-sent events and downloads, from a `RunSource`

`create_app` is the whole application, for a reader of run folders. The API mounts the two parts: `PageFiles`, which
needs no token because it holds no data, and `api_routes`, which its guard protects.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import logging
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.resources import files
from types import FrameType, SimpleNamespace
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.internal import hosts
from gristmill_view.feed import Feeds
from gristmill_view.run_source import RunSource
from gristmill_view.source import ORDERS, OUTCOMES, Download, RolloutQuery, ViewError, in_thread

_LOG = logging.getLogger(__name__)
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_DATA_HEADERS: Final = {**_HEADERS, "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
"""Of answers that hold text of a model: a browser that opens one by itself shows it as data."""
_MEDIA_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_GZIPPED: Final = {"Content-Encoding": "gzip"}
_PACKED_FROM: Final = 4096
"""Bytes of a body that is sent in gzip."""
_LEVEL: Final = 4
_MOST_POINTS: Final = 5000
_MOST_ROWS: Final = 500
_MOST_NAMES: Final = 100
_MOST_RUNS: Final = 24

Handler = Callable[[Request], Awaitable[Response]]


def create_app(source: RunSource) -> Starlette:
    """Returns the page over `source`, for a server that serves nothing else. It has no tokens: listen on 127.0.0.1.

    It answers for the hosts that API_ALLOWED_HOSTS allows, so that no page of another site reads runs by DNS rebinding.
    """
    stopping = threading.Event()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.stopping = stopping
        with called_on_stop(stopping.set):
            yield

    routes = api_routes(source, stopping.is_set)
    return Starlette(routes=routes, middleware=[Middleware(_HostCheck), Middleware(PageFiles)], lifespan=lifespan)


@contextlib.contextmanager
def called_on_stop(call: Callable[[], object]) -> Iterator[None]:
    """Calls `call` as soon as the process receives a signal to stop, before uvicorn's handler.

    uvicorn waits until all requests have ended before it shuts the application down. So streams of events and long
    polls must end first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: FrameType | None) -> None:
        call()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    replaced = [number for number, handler in before.items() if callable(handler)]
    for number in replaced:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, before[number])


class _HostCheck:
    """ASGI middleware that answers 421 to requests for other hosts, as the API does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._hosts = hosts.AllowedHosts.read(os.environ)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = self._hosts.refused(scope["headers"]) if scope["type"] == "http" else None
        if host is None:
            await self._app(scope, receive, send)
            return
        error = {"code": hosts.CODE, "message": hosts.message(host), "remedy": hosts.REMEDY}
        await _json({"error": error}, hosts.STATUS)(scope, receive, send)


class PageFiles:
    """ASGI middleware that answers GET of the page and its files, and passes on all other requests.

    At `/` it answers browsers only, by their `Accept`: other clients of the API read JSON there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _file(scope) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        await (response or self._app)(scope, receive, send)


def _file(scope: Scope) -> Response | None:
    path, headers = scope["path"].removeprefix(scope.get("root_path", "")), Headers(scope=scope)
    if path == "/":
        return _static("index.html", headers) if accepts_html(headers) else None
    if path.startswith("/view/static/"):
        return _static(path.removeprefix("/view/static/"), headers)
    if path == "/view" or (path.startswith("/view/") and not path.startswith("/view/api/")):
        return _static("index.html", headers)
    return None


def accepts_html(headers: Headers) -> bool:
    """Returns whether `Accept` names text/html. Every browser names it. `*/*` does not count."""
    for accepted in headers.get("accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
        if kind == "text/html":
            return "q=0" not in parameters
    return False


def _static(name: str, asked: Headers) -> Response:
    packed = _accepts_gzip(asked)
    content = _content(name, packed)
    if content is None:
        return Response("no such file", 404, media_type="text/plain", headers=_HEADERS)
    suffix = name[name.rfind(".") :]
    headers = {**_HEADERS, "Vary": "Accept, Accept-Encoding", **(_GZIPPED if packed else {})}
    return Response(content, media_type=_MEDIA_TYPES.get(suffix, "text/plain"), headers=headers)


def _accepts_gzip(headers: Headers) -> bool:
    return "gzip" in headers.get("accept-encoding", "")


@functools.cache
def static_files() -> dict[str, bytes]:
    """Returns the files of the page by their path below static/."""
    found: dict[str, bytes] = {}
    folders = [("", files("gristmill_view") / "static")]
    for prefix, folder in folders:
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            else:
                found[prefix + entry.name] = entry.read_bytes()
    return found


@functools.cache
def _packed_files() -> dict[str, bytes]:
    return {name: gzip.compress(content, mtime=0) for name, content in static_files().items()}


def _content(name: str, packed: bool) -> bytes | None:
    # A look-up, not a path: no name can leave the folder.
    return (_packed_files() if packed else static_files()).get(name)


def api_routes(source: RunSource, stopping: Callable[[], bool] = lambda: False) -> list[Route]:
    """Returns the routes below /view/api. `stopping`: True when the server ends, so that streams of events end."""
    api = _Api(source, stopping)
    handlers: dict[str, Handler] = {
        "/view/api/runs": api.runs,
        "/view/api/runs/{run}": api.overview,
        "/view/api/runs/{run}/series": api.series,
        "/view/api/runs/{run}/steps/{step}": api.step,
        "/view/api/runs/{run}/steps/{step}/timeline": api.timeline,
        "/view/api/runs/{run}/groups/{group}": api.group,
        "/view/api/runs/{run}/groups/{group}/prompt": api.prompt,
        "/view/api/runs/{run}/rollouts": api.rollouts,
        "/view/api/runs/{run}/events": api.events,
        "/view/api/runs/{run}/download": api.download,
        "/view/api/compare": api.compare,
    }
    return [Route(path, _answering(path, handler), methods=["GET"]) for path, handler in handlers.items()]


def _answering(path: str, handler: Handler) -> Handler:
    route = SimpleNamespace(path=path)

    async def answer(request: Request) -> Response:
        request.scope["route"] = route  # under this name a server counts the request
        try:
            return await _packed(request, await handler(request))
        except ViewError as error:
            body = {"error": {"code": error.code, "message": str(error), "remedy": error.remedy}}
            return _json(body, error.status)
        except Exception as error:  # noqa: BLE001  the page shows the code; the log has the cause
            _LOG.exception("%s %s failed", request.method, request.url.path)
            text = f"The server could not read this ({type(error).__name__})."
            return _json({"error": {"code": "internal", "message": text, "remedy": "Read the server's log."}}, 500)

    return answer


async def _packed(request: Request, response: Response) -> Response:
    """Returns the response with its body in gzip, if it is large and the client reads gzip."""
    if isinstance(response, StreamingResponse) or len(response.body) < _PACKED_FROM:
        return response
    if not _accepts_gzip(request.headers):
        return response
    body = await in_thread(gzip.compress, response.body, _LEVEL)
    headers = {**_DATA_HEADERS, **_GZIPPED, "Vary": "Accept-Encoding"}
    return Response(body, response.status_code, media_type=response.media_type, headers=headers)


def _json(body: Any, status: int = 200) -> Response:
    # msgspec writes NaN and infinity as null.
    return Response(msgspec.json.encode(body), status, media_type="application/json", headers=_DATA_HEADERS)


class _Api:
    def __init__(self, source: RunSource, stopping: Callable[[], bool]) -> None:
        self._source = source
        self._feeds = Feeds(source)
        self._stopping = stopping

    async def runs(self, _: Request) -> Response:
        return _json(await self._source.runs())

    async def overview(self, request: Request) -> Response:
        return _json(await self._source.overview(_run(request)))

    async def series(self, request: Request) -> Response:
        given = request.query_params
        names = [name for name in [*given.get("names", "").split(","), *given.getlist("name")] if name]
        if len(names) > _MOST_NAMES:
            raise _invalid("name", f"{len(names)} names", f"at most {_MOST_NAMES} names")
        points = _whole(request, "points", 500, least=10, most=_MOST_POINTS)
        found = await self._source.series(_run(request), names, points)
        series = {
            name: {way: _rounded(values) for way, values in band.items()} for name, band in found["series"].items()
        }
        sums, phases = ({name: _rounded(values) for name, values in found[kind].items()} for kind in ("sums", "phases"))
        return _json({**found, "sums": sums, "series": series, "phases": phases})

    async def step(self, request: Request) -> Response:
        return _json(await self._source.step(_run(request), _step(request)))

    async def timeline(self, request: Request) -> Response:
        return _json(await self._source.timeline(_run(request), _step(request)))

    async def group(self, request: Request) -> Response:
        return _json(await self._source.group(_run(request), request.path_params["group"]))

    async def prompt(self, request: Request) -> Response:
        of = _run(request)
        return _json(await self._source.prompt(request.query_params.get("in") or of, request.path_params["group"], of))

    async def rollouts(self, request: Request) -> Response:
        return _json(await self._source.rollouts(_run(request), rollout_query(request)))

    async def events(self, request: Request) -> Response:
        run = _run(request)
        after = _whole(request, "after", -1, least=-1, most=2**53)
        await self._source.overview(run)  # an unknown run is 404, not an empty stream
        stream = self._feeds.of(run, after).events(after, self._stopping)
        headers = {**_DATA_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def download(self, request: Request) -> Response:
        text = request.query_params.get("format", Download.JSONL)
        if text not in list(Download):
            raise _invalid("format", text, f"one of {', '.join(Download)}")
        kind, run = Download(text), _run(request)
        parts = self._source.download(run, rollout_query(request), kind)
        first = await anext(parts, b"")  # an error before the first byte is an answer with a status
        media_type = "application/x-ndjson" if kind is Download.JSONL else "application/vnd.apache.parquet"
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in run)
        headers = {**_DATA_HEADERS, "Content-Disposition": f'attachment; filename="{name}-rollouts.{kind}"'}
        return StreamingResponse(_chained(first, parts), media_type=media_type, headers=headers)

    async def compare(self, request: Request) -> Response:
        runs = [run for run in request.query_params.get("runs", "").split(",") if run]
        if not 1 <= len(runs) <= _MOST_RUNS:
            raise _invalid("runs", ",".join(runs), f"1 to {_MOST_RUNS} runs, separated by commas")
        return _json(await self._source.compare(runs))


def _rounded(values: Any) -> list[float | None]:
    """Returns six significant digits: half the bytes, and more than a screen shows."""
    return [value if value is None else float(f"{value:.6g}") for value in values]


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


def _run(request: Request) -> str:
    return str(request.path_params["run"])


def _step(request: Request) -> int:
    text = request.path_params["step"]
    if not text.isdecimal() or len(text) > 12:
        raise ViewError("step_missing", f"{text!r} is not a step.", remedy="A step is a whole number.")
    return int(text)


def rollout_query(request: Request) -> RolloutQuery:
    """Returns the filters of a request. Raises ViewError for a value that is not valid."""
    given = request.query_params
    order = given.get("order", RolloutQuery.order)
    if order.removeprefix("-") not in ORDERS:
        raise _invalid("order", order, f"one of {', '.join(ORDERS)}, with - for the highest first")
    step = given.get("step") or None
    step_from, _, step_to = (step or "").partition("-")
    if step is not None and not (step_from.isdecimal() and (step_to or step_from).isdecimal() and len(step) < 30):
        raise _invalid("step", step, "a step, or two steps such as 10-20")
    if step is not None and int(step_to or step_from) < int(step_from):
        raise _invalid("step", step, "a range from the lower to the higher step")
    if (outcome := given.get("outcome") or None) not in (None, *OUTCOMES):
        raise _invalid("outcome", str(outcome), f"one of {', '.join(OUTCOMES)}")
    for name in ("part_min", "part_max"):
        if given.get(name) and not given.get("part"):
            raise _invalid(name, given[name], "a bound of the reward that `part` names, which is missing")
    return RolloutQuery(
        step_from=int(step_from) if step else None,
        step_to=int(step_to or step_from) if step else None,
        group=given.get("group") or None,
        env=given.get("env") or None,
        outcome=outcome,
        reward_min=_number(request, "reward_min"),
        reward_max=_number(request, "reward_max"),
        finish_reason=given.get("finish_reason") or None,
        text=given.get("text") or None,
        part=given.get("part") or None,
        part_min=_number(request, "part_min"),
        part_max=_number(request, "part_max"),
        order=order,
        limit=_whole(request, "limit", RolloutQuery.limit, least=1, most=_MOST_ROWS),
        offset=_whole(request, "offset", 0, least=0, most=2**40),
    )


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _invalid(name, text, "a number")
    return value


def _whole(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise _invalid(name, text, f"a whole number from {least} to {most}")
    return value


def _invalid(name: str, value: str, wanted: str) -> ViewError:
    return ViewError("bad_request", f"{name}={value[:80]!r} is not valid.", status=400, remedy=f"It is {wanted}.")
