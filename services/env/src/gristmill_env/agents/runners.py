"""Runs agents: a function in a child process, a command per rollout, or a program elsewhere that asks for tasks."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gristmill.internal.redaction import is_secret, redact_text, secrets_in_urls
from gristmill_env.agents import child as agent_child
from gristmill_env.agents.task import AgentTask, Endpoint
from gristmill_env.errors import EpisodeError
from gristmill_env.gateway import RequestError, Session, Sessions
from gristmill_env.gateway.server import bearer, read_body
from gristmill_env.gateway.sessions import End, digest
from gristmill_env.running.code_process import CodeError, CodeProcess, FirstErrors, LostProcessError
from gristmill_env.values import finite

logger = logging.getLogger(__name__)

TOKEN_FILE: Final = "GRISTMILL_AGENT_TOKEN_FILE"
"""The variable that names the file with the token for tasks."""
_QUIET = 60.0
"""Seconds without a program that asks for a task, after which a log line says so."""
_POLL = 20.0
"""Longest wait of a request for a task. The answer then has no task."""
_REPORTS = 4096
"""Results of ended rollouts that are kept for repeated reports."""

_LARGEST_LOG = 256 << 20
"""Bytes of the file with the output of commands. It is then emptied."""
_CHECK_LOG = 1.0
"""Seconds between two checks of its size."""
_LONGEST_REWARD = 1000
"""Characters of a reward file that are read."""


class AgentRunner:
    """Runs agents until the end of the context (`async with`)."""

    elsewhere = False
    """Whether the agents run elsewhere, so that their rollouts survive this process."""

    async def run(self, task: AgentTask, endpoint: Endpoint, session: Session, seconds: float) -> None:
        """Runs the agent of one rollout, and returns when its reward is recorded in the session.

        Raises EpisodeError, and TimeoutError after `seconds`.
        """
        async with asyncio.timeout(seconds):
            await session.end(*checked_result(await self.result(task, endpoint)))

    async def result(self, task: AgentTask, endpoint: Endpoint) -> Any:
        """Runs the agent of one rollout. Returns its result (`checked_result`). Raises EpisodeError."""
        raise NotImplementedError

    @property
    def routes(self) -> list[Route]:
        """The routes that agents need at the gateway, in addition to the model's routes."""
        return []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


class FunctionAgent(AgentRunner):
    """`my_agent.py:run` in a child process, which serves all rollouts."""

    def __init__(self, name: str, folder: Path | None, params: Mapping[str, Any] | None = None) -> None:
        """`folder`: the configuration's folder, in which a relative path is searched first. `params`: keyword-only
        arguments of the function."""
        self._name = name
        settings = pickle.dumps((name, str(folder or Path.cwd()), dict(params or {})))
        self._process = CodeProcess(f"{agent_child.__name__}:handler", settings, f"agent {name}")
        self._errors = FirstErrors(logger, "agent")

    async def result(self, task: AgentTask, endpoint: Endpoint) -> Any:
        try:
            sent = msgspec.Raw(task.encoded(msgspec.msgpack.encode))
            body = await self._process.call(msgspec.msgpack.encode((sent, endpoint)))
        except (CodeError, LostProcessError) as error:
            raise self._failure(error) from error
        return msgspec.msgpack.decode(body)

    async def __aenter__(self) -> Self:
        """Starts the process, so that an agent that cannot be loaded shows at once. Raises EpisodeError."""
        try:
            await self._process.start()
        except (CodeError, LostProcessError) as error:
            raise self._failure(error, "cannot be loaded: ") from error
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._process.close()

    def _failure(self, error: CodeError | LostProcessError, what: str = "") -> EpisodeError:
        kind = f"{error.kind}: " if isinstance(error, CodeError) else ""
        text = f"agent {self._name}: {what}{kind}{error}"
        if isinstance(error, CodeError) and error.raised:
            self._errors.log(self._name, text, error.trace)
            failure = EpisodeError("agent_raised", text, agent=self._name)
        elif error.code == "process_died":
            failure = EpisodeError("agent_process_died", text, agent=self._name)
        elif error.code == "process_not_started":
            failure = EpisodeError("agent_not_started", text, agent=self._name)
        else:
            failure = EpisodeError(error.code, text, agent=self._name)
        return failure.passing(error.may_pass)


class CommandAgent(AgentRunner):
    """A command per rollout, with its addresses in environment variables."""

    def __init__(
        self, command: list[str], folder: Path | None, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """`folder`: in which the command runs. `log`: the file that receives what the commands print. `env`: variables
        for the command, which may be secret."""
        self._command, self._folder, self._log, self._env = command, folder, log, dict(env or {})

    async def result(self, task: AgentTask, endpoint: Endpoint) -> Any:
        with contextlib.ExitStack() as opened:
            try:
                folder = tempfile.TemporaryDirectory(prefix="gristmill-agent-", ignore_cleanup_errors=True)
                place = Path(opened.enter_context(folder))
                told, reward = place / "task.json", place / "reward"
                told.write_bytes(task.encoded(msgspec.json.encode))
                self._log.parent.mkdir(parents=True, exist_ok=True)
                log = opened.enter_context(self._log.open("ab"))
                process = await asyncio.create_subprocess_exec(
                    *self._command, cwd=self._folder, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    env=self._environ(endpoint, told, reward), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise EpisodeError(
                    "agent_not_started", f"the agent's command {self._command[0]} cannot be started: {error}",
                    command=self._command[0],
                ) from error  # fmt: skip
            try:
                code = await _ended(process, log)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if code != 0:
                raise EpisodeError(
                    "agent_failed", f"the agent's command ended with exit code {code}; its output is in {self._log}",
                    exit_code=code, log=self._log,
                )  # fmt: skip
            return _written(reward)

    def _environ(self, endpoint: Endpoint, task: Path, reward: Path) -> Mapping[str, str]:
        """Returns the agent's variables: this process' own without secrets, the configured ones, and the endpoint."""
        own = {name: value for name, value in os.environ.items() if not _is_withheld(name, value)}
        return {
            **own,
            **self._env,
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.key,
            "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
            "ANTHROPIC_API_KEY": endpoint.key,
            "GRISTMILL_MODEL": endpoint.model,
            "GRISTMILL_TASK": str(task),
            "GRISTMILL_REWARD": str(reward),
        }


def _is_withheld(name: str, value: str) -> bool:
    """Returns whether an agent must not inherit a variable: those of Gristmill's services, and secrets."""
    return name.startswith(("GRISTMILL_", "API_")) or is_secret(name) or bool(secrets_in_urls(value))


def _written(path: Path) -> float | None:
    """Returns the number in the agent's reward file; None if the agent wrote none. Raises EpisodeError."""
    if not path.is_file():
        if not os.path.lexists(path):
            return None
        raise EpisodeError("agent_reward", "the agent's reward file is not a plain file; it must hold one number")
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_LONGEST_REWARD).strip()
    try:
        return float(text)
    except ValueError as error:
        raise EpisodeError(
            "agent_reward", f"the agent's reward file holds {text!r:.60}; it must hold one number", text=text[:60]
        ) from error


async def _ended(process: asyncio.subprocess.Process, log: IO[bytes]) -> int:
    """Returns the exit code of a command that appends its output to `log`, which is emptied when it is too large."""
    while True:
        if os.fstat(log.fileno()).st_size > _LARGEST_LOG:
            os.ftruncate(log.fileno(), 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_LOG):
                return await process.wait()


@dataclass(frozen=True)
class _Offer:
    """A task for the program that asks next."""

    task: msgspec.Raw
    """As JSON."""
    endpoint: Endpoint
    session: Session
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class ExternalAgent(AgentRunner):
    """Programs elsewhere that ask the gateway for a task, work, and report a reward."""

    elsewhere = True

    def __init__(self, sessions: Sessions, token: str | None = None) -> None:
        """`sessions`: of the gateway. `token`: programs need it for a task; None gives tasks to every program."""
        self._sessions = sessions
        self._token = token
        self._offered: asyncio.Queue[_Offer] = asyncio.Queue()
        self._working: dict[str, tuple[Session, asyncio.Future[None]]] = {}
        """The sessions that wait for a reward, by the digests of their keys."""
        self._ended: dict[str, End] = {}
        """The results of the newest rollouts: a program whose answer was lost reports its result again."""
        self._busy = 0
        """Tasks that programs have."""
        self._asked = time.monotonic()
        """When a program asked last, or when a log line said that none asks."""

    async def run(self, task: AgentTask, endpoint: Endpoint, session: Session, seconds: float) -> None:
        """Offers the task, unless a program has it already or has ended it.

        `seconds` begin when a program gets the task. A task waits for a program without a limit.
        """
        if session.resumed and session.ended is not None:
            self._remember(session)
            return
        sent = msgspec.Raw(task.encoded(msgspec.json.encode))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._working[session.digest] = session, future
        try:
            if not session.resumed:
                offer = _Offer(sent, endpoint, session)
                self._offered.put_nowait(offer)
                await self._until_taken(offer)
            self._busy += 1
            try:
                async with asyncio.timeout(seconds):
                    await future
            finally:
                self._busy -= 1
        finally:
            del self._working[session.digest]

    async def _until_taken(self, offer: _Offer) -> None:
        """Waits until a program has the task. Logs every minute that no program asks."""
        taken = asyncio.create_task(offer.taken.wait())
        try:
            while not (await asyncio.wait([taken], timeout=_QUIET))[0]:
                if not self._busy and time.monotonic() - self._asked >= _QUIET:
                    self._asked = time.monotonic()
                    text = "no program has asked the gateway for a task for %g s: start one (docs/environments.md)"
                    logger.warning(text, _QUIET)
        finally:
            taken.cancel()

    async def next_task(self, seconds: float) -> _Offer | None:
        """Returns a task that no program has; None if there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    offer = await self._offered.get()
                    if offer.session.digest in self._working:  # it may be cancelled
                        return offer
        except TimeoutError:
            return None

    def _remember(self, session: Session) -> None:
        """Keeps the result of an ended rollout, so that the repetition of its report is accepted."""
        if session.ended is not None:
            self._ended[session.digest] = session.ended
        while len(self._ended) > _REPORTS:
            del self._ended[next(iter(self._ended))]

    async def report(self, key: str, result: Mapping[str, Any], error: object = None) -> bool:
        """Ends the rollout of `key` with its result, which is then on disk, or with the program's error.

        Beside a `reward`, only `parts` count. Returns whether the rollout waits for a result, or has ended with this
        one. Raises EpisodeError for a wrong one (`checked_result`), and RequestError if the rollout is not resumed yet.
        """
        given = result if error is None else {}
        if "reward" in given:
            given = {name: given.get(name) for name in ("reward", "parts")}
        reward, parts = checked_result(given)
        name = digest(key)
        session, future = self._working.get(name, (None, None))
        if session is None or future is None or future.done():
            if name not in self._ended:
                self._sessions.refuse_unresumed(name)
            return error is None and self._ended.get(name) == End(reward, parts)
        if error is None:
            await session.end(reward, parts)
            self._remember(session)
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(EpisodeError("agent_failed", redact_text(f"the agent reports: {error}"[:1000])))
        return True

    @property
    def routes(self) -> list[Route]:
        """`POST /agent/task` and `POST /s/{key}/reward`."""
        return [
            Route("/agent/task", self._next, methods=["POST"]),
            Route("/s/{key}/reward", self._report, methods=["POST"]),
        ]

    async def _next(self, request: Request) -> Response:
        if self._token is not None and not hmac.compare_digest(bearer(request).encode(), self._token.encode()):
            error = {"code": "agent_token", "message": f"a task needs the token in the file that {TOKEN_FILE} names"}
            return JSONResponse({"error": error}, 401)
        offer = await self.next_task(_POLL)
        self._asked = time.monotonic()
        if offer is None:
            return Response(status_code=204)
        if await request.is_disconnected():  # the program has stopped waiting
            self._offered.put_nowait(offer)
            return Response(status_code=204)
        try:
            await offer.session.begin()
        except RequestError as refused:
            self._offered.put_nowait(offer)
            return _refusal(refused, refused.status)
        offer.taken.set()
        key = offer.endpoint.key
        here = f"{request.base_url}s/{key}"  # at the address that the program knows
        endpoint = Endpoint(f"{here}/v1", here, key, offer.endpoint.model)
        given = msgspec.json.encode({"task": offer.task, "endpoint": endpoint})
        return Response(given, media_type="application/json")

    async def _report(self, request: Request) -> Response:
        try:
            body = await read_body(request)
            error = body.pop("error", None)
            waited = await self.report(request.path_params["key"], body, error)
        except (RequestError, EpisodeError) as refused:
            status = refused.status if isinstance(refused, RequestError) else 400
            return _refusal(refused, status)
        if not waited:
            text = "no rollout of this key waits for a reward: it has ended, or its time is over"
            return JSONResponse({"error": {"code": "unknown_session", "message": text}}, 404)
        return JSONResponse({"status": "ok"})


def _refusal(error: RequestError | EpisodeError, status: int) -> Response:
    return JSONResponse({"error": {"code": error.code, "message": str(error)}}, status)


def checked_result(value: Any) -> tuple[float | None, dict[str, float]]:
    """Returns an agent's reward and its named parts: from a number, None, or {"reward": ..., "parts": {name: number}}.

    Raises EpisodeError for all else.
    """
    if not isinstance(value, dict):
        return checked_reward(value), {}
    parts = value.get("parts") or {}
    if set(value) - {"reward", "parts"} or not isinstance(parts, dict):
        raise EpisodeError(
            "agent_reward", f"the agent returned {value!r:.80}; it must return a number, None, or a reward with parts",
            found=str(value)[:60],
        )  # fmt: skip
    checked = {str(name): checked_reward(part) for name, part in parts.items()}
    return checked_reward(value.get("reward")), {name: part for name, part in checked.items() if part is not None}


def checked_reward(value: Any) -> float | None:
    """Returns an agent's reward. Raises EpisodeError for what is neither a finite number nor None."""
    if value is None:
        return None
    number = None if isinstance(value, bool) else finite(value)
    if number is None:
        described = f"{value!r:.60}"
        raise EpisodeError(
            "agent_reward", f"the agent returned {described}; it must return a finite number or None", found=described
        )
    return number
