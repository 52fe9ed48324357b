"""Chooses the server for the next request, and keeps failed servers out of use until they answer again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from gristmill.internal.backoff import Backoff
from gristmill.internal.logs import line
from gristmill_env.errors import InferenceError, RequestTimeoutError
from gristmill_env.inference.http import ServerTroubleError
from gristmill_env.inference.server import ModelServer

logger = logging.getLogger(__name__)

_ASK_FOR_WEIGHTS = (0.2, 2.0)
"""Shortest and longest pause, in seconds, between checks whether the trainer has published weights."""
_NO_WEIGHTS_YET = "the trainer has not published weights to it yet; it gets no requests until then"
_LOST_WEIGHTS = (
    "has lost the weights in training (it was started again?); it gets no requests until the trainer has published them"
)
_WORTH_OF_A_PREFIX = 1.5
# Retries saved for each request, added in each second, and saved at most.
_SHARE = 0.2
_FLOOR = 10.0
_RESERVE = 100.0


class EndpointState(StrEnum):
    """Whether a server can receive requests."""

    UP = "up"
    AWAY = "away"
    """The server failed, and is checked repeatedly until it answers again."""
    UNPUBLISHED = "unpublished"
    """The server answers, but with weights that no trainer published to it."""


@dataclass(eq=False)
class Endpoint:
    """One server, its limits and its requests in flight."""

    server: ModelServer
    weight: float = 1.0
    max_requests: int = 512
    max_evaluations: int = 64
    state: EndpointState = EndpointState.AWAY
    problem: str = "not asked yet"
    """The reason why the server is not up."""
    backoff: Backoff = field(default_factory=lambda: Backoff(0.25, 30.0))
    """Pauses between checks of a failed server. They restart when the server answers a request, not when it is up
    again. So a server that accepts requests and then fails them pauses longer each time."""
    turn: int = 0
    """How often the server was taken out of use."""
    had_weights: bool = False
    """Whether it has sampled with published weights."""
    told: bool = False
    """Whether the failure was logged. It is not logged again until the server has answered a request."""
    tokens: int = 0
    """Outstanding tokens: prompt tokens and max_tokens of all requests in flight."""
    requests: int = 0
    evaluations: int = 0

    def has_room(self, cost: int, *, evaluation: bool) -> bool:
        """Whether the server may receive one more request. A request that samples nothing, of cost 0, always may."""
        free = self.requests < self.max_requests and not (evaluation and self.evaluations >= self.max_evaluations)
        return free or cost == 0

    @contextmanager
    def carrying(self, cost: int, *, evaluation: bool) -> Iterator[None]:
        """Counts a request of `cost` tokens while it is in flight."""
        self.tokens += cost
        self.requests += 1
        self.evaluations += evaluation
        try:
            yield
        finally:
            self.tokens -= cost
            self.requests -= 1
            self.evaluations -= evaluation


def choose(
    endpoints: Iterable[Endpoint], cost: int, *, evaluation: bool, earlier: str | None = None
) -> Endpoint | None:
    """Returns the server that would have the fewest outstanding tokens relative to its weight. Returns None if no
    server is up and has room.

    `earlier`: URL of the server whose prefix cache has the prompt's beginning. It is chosen while its load is at most
    `_WORTH_OF_A_PREFIX` times the least load. (SGLang's router uses the same factor.)
    """
    able = [
        endpoint
        for endpoint in endpoints
        if endpoint.state is EndpointState.UP and endpoint.has_room(cost, evaluation=evaluation)
    ]

    def load(endpoint: Endpoint) -> float:
        return (endpoint.tokens + cost) / endpoint.weight

    least = min(able, key=load, default=None)
    cached = next((endpoint for endpoint in able if endpoint.server.url == earlier), None)
    if least is not None and cached is not None and load(cached) <= _WORTH_OF_A_PREFIX * load(least):
        return cached
    return least


class UnpublishedError(Exception):
    """Raised by a check: the server answers, but with weights that no trainer published."""


class Failover:
    """Keeps the states of the servers, and checks servers that are not up until they can be used again."""

    def __init__(
        self, endpoints: list[Endpoint], check: Callable[[Endpoint], Awaitable[None]], patience: float
    ) -> None:
        """`endpoints`: the list may grow and shrink: `join` and `leave`.

        `check`: raises ServerTroubleError, UnpublishedError or InferenceError for a server that must not be used.

        `patience`: seconds for which all servers may fail.
        """
        self._endpoints = endpoints
        self._check = check
        self._patience = patience
        self._returning: dict[Endpoint, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._all_away_told = False
        self._answered_at = -math.inf
        """Time of the last answer of any server to a request. All times here are time.monotonic()."""

    async def free_endpoint(
        self, cost: int, *, evaluation: bool, failing_since: float | None, earlier: str | None = None
    ) -> Endpoint:
        """Returns the server that `choose` prefers. Waits without limit for a server that is up and has room.

        Raises InferenceError if all servers are away and no server has answered for `patience` seconds. The seconds
        count from `failing_since`, the time.monotonic() of the caller's first failure (None: from now).
        """
        since = failing_since
        while True:
            endpoint = choose(self._endpoints, cost, evaluation=evaluation, earlier=earlier)
            if endpoint is not None:
                return endpoint
            self._raise_broken()
            if any(endpoint.state is not EndpointState.AWAY for endpoint in self._endpoints):
                since = failing_since
                await self._changed.wait()
                continue
            since = time.monotonic() if since is None else since
            self._say_all_away()
            try:
                async with asyncio.timeout(self._patience - self._silent(since)):
                    await self._changed.wait()
            except TimeoutError as error:
                if (seconds := self._silent(since)) >= self._patience:
                    raise self.gave_up(seconds) from error

    def changed(self) -> None:
        """Wakes all waiting callers, because a server has more room or another state."""
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def up(self, endpoint: Endpoint) -> None:
        """Marks the server as up."""
        endpoint.state = EndpointState.UP
        self.changed()

    def answered(self, endpoint: Endpoint, turn: int) -> None:
        """Records that the server answered a request of its `turn`, and resets its earlier failures."""
        self._answered_at = time.monotonic()
        if endpoint.turn == turn:
            endpoint.backoff.reset()
            self._all_away_told = False
            if endpoint.told:
                logger.info(line("model server", state="up", url=endpoint.server.url))
            endpoint.told = False

    def trouble(self, endpoint: Endpoint, turn: int, error: ServerTroubleError) -> None:
        """Marks the server as away after a failed request of its `turn`. Further failures of that turn have no
        effect."""
        if endpoint.state is EndpointState.UP and endpoint.turn == turn:
            others = "the others take its requests" if len(self._endpoints) > 1 else self._trying_on()
            self._say_away(endpoint, error.problem, others)
            self._leave(endpoint, EndpointState.AWAY, error.told, error.wait)

    def give_up(self, failing_since: float) -> None:
        """Decides whether a request that has failed since `failing_since` may be tried again.

        Returns if the request may be tried again. After `patience` seconds, raises RequestTimeoutError if servers have
        answered other requests, and InferenceError if no server has answered and all servers are away.
        """
        seconds = time.monotonic() - failing_since
        if seconds < self._patience:
            return
        if self._answered_at >= failing_since:
            raise RequestTimeoutError(
                "request_failed",
                f"the request failed for {seconds:.0f} s while others were answered ({self._problems()})",
                seconds=seconds,
            )
        if all(endpoint.state is EndpointState.AWAY for endpoint in self._endpoints):
            raise self.gave_up(seconds)

    def late(self, endpoint: Endpoint, error: ServerTroubleError) -> None:
        """Marks the server as away, because it did not answer at the start."""
        self._say_away(endpoint, error.problem, "it joins when it answers")
        self._leave(endpoint, EndpointState.AWAY, error.told, error.wait)

    def join(self, endpoint: Endpoint) -> None:
        """Adds a server, which gets requests once a check succeeds."""
        logger.info(line("model server", state="joined", url=endpoint.server.url))
        self._endpoints.append(endpoint)
        self._leave(endpoint, EndpointState.AWAY, "it has just joined")

    async def leave(self, endpoint: Endpoint) -> None:
        """Removes a server that is away."""
        logger.info(line("model server", state="left", url=endpoint.server.url))
        self._endpoints.remove(endpoint)
        checks = self._returning.pop(endpoint)
        checks.cancel()
        await asyncio.gather(checks, return_exceptions=True)
        await endpoint.server.close()
        self.changed()

    def unpublished(self, endpoint: Endpoint, turn: int) -> None:
        """Marks the server as unpublished, because it sampled with weights that no trainer published."""
        if endpoint.state is EndpointState.UP and endpoint.turn == turn:
            self._say_unpublished(endpoint)
            self._leave(endpoint, EndpointState.UNPUBLISHED, _missing_weights(endpoint))

    def gave_up(self, seconds: float) -> InferenceError:
        """Returns the error for `seconds` without an answer from any server."""
        if len(self._endpoints) == 1:
            return gave_up_on(self._endpoints[0].server.url, self._endpoints[0].problem, seconds)
        return InferenceError(
            "model_server_unreachable",
            f"none of the {len(self._endpoints)} model servers answered for {seconds:.0f} s: {self._problems()}; are "
            "they running, and are these their addresses (server_configs)?",
            urls=[endpoint.server.url for endpoint in self._endpoints],
            problems=[endpoint.problem for endpoint in self._endpoints],
            seconds=seconds,
        )

    async def close(self) -> None:
        """Stops all checks of servers."""
        for task in self._returning.values():
            task.cancel()
        await asyncio.gather(*self._returning.values(), return_exceptions=True)

    def _silent(self, since: float) -> float:
        """Returns the seconds since the last answer, or since `since` if `since` is later."""
        return time.monotonic() - max(since, self._answered_at)

    def _problems(self) -> str:
        return ", ".join(f"{endpoint.server.url} ({endpoint.problem})" for endpoint in self._endpoints)

    def _leave(self, endpoint: Endpoint, state: EndpointState, problem: str, wait: float = 0.0) -> None:
        endpoint.state, endpoint.problem = state, problem
        endpoint.turn += 1
        self._returning[endpoint] = asyncio.create_task(self._bring_back(endpoint, wait))
        self.changed()

    async def _bring_back(self, endpoint: Endpoint, wait: float) -> None:
        asking_for_weights = Backoff(*_ASK_FOR_WEIGHTS)
        while True:
            backoff = asking_for_weights if endpoint.state is EndpointState.UNPUBLISHED else endpoint.backoff
            await asyncio.sleep(max(backoff.next(), wait))
            wait, before = 0.0, endpoint.state
            try:
                await self._check(endpoint)
            except ServerTroubleError as error:
                endpoint.state, endpoint.problem, wait = EndpointState.AWAY, error.told, error.wait
            except UnpublishedError:
                if before is not EndpointState.UNPUBLISHED:
                    self._say_unpublished(endpoint)
                endpoint.state, endpoint.problem = EndpointState.UNPUBLISHED, _missing_weights(endpoint)
            except InferenceError as error:
                if str(error) != endpoint.problem:
                    logger.error("%s", error.report())
                endpoint.state, endpoint.problem = EndpointState.AWAY, str(error)
            else:
                self.up(endpoint)
                return
            if endpoint.state is not before:
                self.changed()

    def _say_away(self, endpoint: Endpoint, problem: str, what_now: str) -> None:
        if not endpoint.told:
            logger.warning(
                line("model server", state="away", url=endpoint.server.url, problem=problem, remedy=what_now)
            )
        endpoint.told = True

    def _say_unpublished(self, endpoint: Endpoint) -> None:
        """Logs a warning if the server has lost weights. A server that the trainer has yet to reach is no trouble."""
        level = logging.WARNING if endpoint.had_weights else logging.INFO
        problem = _missing_weights(endpoint)
        logger.log(level, line("model server", state="unpublished", url=endpoint.server.url, problem=problem))
        endpoint.told = True

    def _say_all_away(self) -> None:
        if not self._all_away_told and len(self._endpoints) > 1:
            logger.warning(line("model servers", state="away", remedy=self._trying_on()))
        self._all_away_told = True

    def _trying_on(self) -> str:
        return f"trying on for up to {self._patience:.0f} s"

    def _raise_broken(self) -> None:
        for task in self._returning.values():
            if task.done():
                task.result()


def _missing_weights(endpoint: Endpoint) -> str:
    return _LOST_WEIGHTS if endpoint.had_weights else _NO_WEIGHTS_YET


def gave_up_on(url: str, problem: str, seconds: float) -> InferenceError:
    """Returns the error for `seconds` without an answer from the server at `url`."""
    return InferenceError(
        "model_server_unreachable",
        f"the model server at {url} did not answer for {seconds:.0f} s ({problem}); "
        "is this its address (base_url, GRISTMILL_MODEL_URL)? To start one: docker compose up -d model, or without "
        "Docker .venv-model/bin/python -m gristmill_model",
        urls=[url],
        problems=[problem],
        seconds=seconds,
    )


class RetryBudget:
    """A token bucket of retries, as in Finagle and gRPC.

    Each request adds 0.2 retries, each second adds 10. The bucket holds at most 100. If the bucket is empty, Finagle
    and gRPC fail the request. Here the request waits, because a rollout is worth more than the waiting time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns the time in seconds."""
        self._clock = clock
        self._saved = _RESERVE
        self._counted_at = clock()

    def request(self) -> None:
        """Counts a request that is sent for the first time."""
        self._saved = min(_RESERVE, self._saved + _SHARE)

    def retry(self) -> float:
        """Takes one retry from the bucket. Returns the seconds to wait before the retry; 0 if the bucket is not
        empty."""
        now = self._clock()
        self._saved = min(_RESERVE, self._saved + (now - self._counted_at) * _FLOOR)
        self._counted_at = now
        self._saved -= 1
        return max(0.0, -self._saved / _FLOOR)
