"""The gateway: an OpenAI- and Anthropic-compatible server through which an agent's program calls the model in training.

    http://HOST:9100/v1            with the session's key as the API key
    http://HOST:9100/s/KEY/v1      with any API key

Each path answers for Chat Completions, Responses and Messages, streaming or not, and lists the model. The session that
the key belongs to is one rollout (`sessions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gristmill.internal import hosts
from gristmill.internal.hosts import AllowedHosts
from gristmill_env.errors import EnvError
from gristmill_env.gateway.dialects import DIALECTS, ChatRequest, Dialect, Reply, RequestError
from gristmill_env.gateway.sessions import Session, Sessions

logger = logging.getLogger(__name__)

Coming = TypeVar("Coming")

PORT: Final = 9100
_LARGEST: Final = 32 * 2**20
"""Bytes of a request's body."""
_KEEP_ALIVE: Final = 5.0
"""Seconds between two signs of life of a streamed answer that is not complete."""
_IDLE: Final = 60
"""Seconds for which a connection without a request stays open: longer than clients keep one, so that the client closes
it. A server that closes it may do so while the next request is on its way."""
_RETRIES: Final = "x-stainless-retry-count"
"""OpenAI's and Anthropic's clients count the repetitions of a request in this header."""


class Gateway:
    """The server's address, and the sessions that it serves."""

    def __init__(self, sessions: Sessions, model: str, url: str) -> None:
        """`url`: the address at which agents reach the server, without a path."""
        self.sessions = sessions
        self.url = url
        self._model = model

    def base_url(self, session: Session) -> str:
        """Returns the session's URL, which an agent's client can use with any API key."""
        return f"{self.url}/s/{session.key}/v1"

    def app(self, allowed: AllowedHosts, more: Sequence[Route] = ()) -> Starlette:
        """Returns the ASGI application. `more`: further routes."""
        routes = [Route("/healthz", _health), *more]
        for prefix in ("", "/s/{key}"):
            routes.append(Route(f"{prefix}/v1/models", self._models))
            for path, dialect in DIALECTS.items():
                routes.append(Route(prefix + path, self._endpoint(dialect), methods=["POST"]))
        app = Starlette(routes=routes)
        app.add_middleware(_KnownHosts, allowed=allowed)
        return app

    async def _models(self, request: Request) -> Response:
        try:
            self.sessions.find(lambda: _keys(request))
        except RequestError as error:
            return JSONResponse(DIALECTS["/v1/chat/completions"].error(error), error.status)
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "gristmill"}
        return JSONResponse({"object": "list", "data": [card]})

    def _endpoint(self, dialect: Dialect) -> Any:
        async def answer(request: Request) -> Response:
            try:
                session = self.sessions.find(lambda: _keys(request))
                prepared = session.prepare(read_request(dialect, await read_body(request)))
                reply = session.reply(prepared, **repetition(request))
                if not prepared.request.stream:
                    return JSONResponse(dialect.answer(await unless_gone(reply, request)))
            except RequestError as error:
                logger.debug("the gateway refuses a request: %s", error)
                return JSONResponse(dialect.error(error), error.status)
            except ClientDisconnect:
                return Response(status_code=499)
            events = _events(reply, prepared.request, dialect)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

        return answer


def read_request(dialect: Dialect, body: dict[str, Any]) -> ChatRequest:
    """Reads a request. Raises RequestError, also for values of other types than the API has."""
    try:
        return dialect.read(body)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        text = f"a value of the request has another type than the API has: {error}"
        raise RequestError(400, "bad_request", text) from error


def repetition(request: Request) -> dict[str, Any]:
    """Returns what the request's headers say about repetitions, as the arguments of `Session.reply`."""
    return {
        "idempotency": request.headers.get("idempotency-key"),
        "again": request.headers.get(_RETRIES, "0") != "0",
    }


async def unless_gone(coming: Coroutine[Any, Any, Coming], request: Request) -> Coming:
    """Returns what is coming. Raises ClientDisconnect if the client closes the connection before."""
    work, gone = asyncio.create_task(coming), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(coming: Coroutine[Any, Any, Reply], request: ChatRequest, dialect: Dialect) -> AsyncIterator[bytes]:
    """Yields the reply's events, and signs of life until the reply is complete."""
    work = asyncio.create_task(coming)
    try:
        while not (await asyncio.wait([work], timeout=_KEEP_ALIVE))[0]:
            yield dialect.keep_alive
        for event in dialect.events(work.result(), request):
            yield event
    except RequestError as error:
        yield dialect.error_event(error)
    finally:
        work.cancel()


@contextlib.asynccontextmanager
async def serving(
    sessions: Sessions, model: str, address: tuple[str, int], environ: Mapping[str, str], more: Sequence[Route] = ()
) -> AsyncIterator[Gateway]:
    """Serves the gateway inside the block. `address`: host and port, 0 for a free one. `more`: further routes.

    Raises EnvError if the address cannot be opened.
    """
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With a protocol, because asyncio sends without delay (TCP_NODELAY) only on sockets that have one.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with contextlib.closing(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise EnvError(
                "gateway_address",
                f"the gateway for agents cannot listen at {host}:{port} ({error}); stop what listens there, or set "
                "the agent's address",
                host=host,
                port=port,
            ) from error
        port = listener.getsockname()[1]
        gateway = Gateway(sessions, model, f"http://{_reached(host)}:{port}")
        config = uvicorn.Config(
            gateway.app(AllowedHosts.read(environ), more), log_config=None, log_level="warning", access_log=False,
            lifespan="off", timeout_graceful_shutdown=1, timeout_keep_alive=_IDLE, ws="none",
        )  # fmt: skip
        server = _Server(config)
        task = asyncio.create_task(server.serve([listener]))
        logger.info("the gateway for agents listens at %s", gateway.url)
        try:
            yield gateway
        finally:
            server.should_exit = True
            await task


class _Server(uvicorn.Server):
    """A server in an event loop that handles the signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class _KnownHosts:
    """Refuses requests for other hosts, and requests of web pages, which take tasks from agents."""

    def __init__(self, app: Any, allowed: AllowedHosts) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = scope["headers"] if scope["type"] == "http" else []
        if (host := self._allowed.refused(headers)) is not None:
            error = {"code": hosts.CODE, "message": f"{hosts.message(host)}; {hosts.REMEDY}"}
            await JSONResponse({"error": error}, hosts.STATUS)(scope, receive, send)
        elif any(name == b"origin" for name, _ in headers):  # browsers send it, agents do not
            error = {"code": "cross_site", "message": "web pages may not use the gateway"}
            await JSONResponse({"error": error}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _reached(host: str) -> str:
    """Returns the host at which agents on this machine reach a server that listens at `host`."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return loopback.get(host, f"[{host}]" if ":" in host else host)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _keys(request: Request) -> list[str]:
    """Returns what may be the session's key: the part of the path, or else an API key in either API's header."""
    if (key := request.path_params.get("key")) is not None:
        return [key]
    return [bearer(request), request.headers.get("x-api-key", "")]


def bearer(request: Request) -> str:
    """Returns the token of the request's Authorization header; an empty text if it has none."""
    return request.headers.get("authorization", "").removeprefix("Bearer ").strip()


async def read_body(request: Request) -> dict[str, Any]:
    """Returns the request's JSON object. Raises RequestError."""
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > _LARGEST:
            raise RequestError(413, "too_large", f"a request may have {_LARGEST} bytes")
    try:
        return msgspec.json.decode(bytes(received), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "bad_request", f"the body must be a JSON object: {error}") from error
