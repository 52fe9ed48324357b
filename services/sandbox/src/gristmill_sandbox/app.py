"""The sandbox's HTTP interface.

    POST /run      {"program": ..., "runs": [{"stdin": ...}, ...], "tests": ..., "files": {...}, "limits": {...}}
                   200 {"runs": [report, ...], "tests": report or null}
    GET  /healthz  200

Each item of `runs` (one without stdin by default) is a separate process that runs `program`. With `tests` the
program runs once more, in a process whose functions the tests call (program.py). The tests hold if their report has
status "exited" and code 0. A report is `cell.Report`. The service keeps nothing of a request, and never
receives an expected output: the client compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gristmill_sandbox import confine
from gristmill_sandbox.cell import Feed, Job, Report, encode, fork_cell, start_stem
from gristmill_sandbox.confine import Limits

MAX_BODY_BYTES: Final = 8 * 2**20
MAX_RUNS: Final = 256
DEFAULT_LIMITS: Final = Limits(seconds=5.0, memory_bytes=512 * 2**20, output_bytes=64 * 2**10)
MAX_LIMITS: Final = Limits(seconds=60.0, memory_bytes=2 * 2**30, output_bytes=2**20)
_PAUSES: Final = (0.1, 0.3, 1.0, 3.0)
"""Seconds before a run is repeated whose keeper did not start."""
LEAST_MEMORY: Final = 64 * 2**20
_FILE: Final = re.compile(r"(?!\.{1,2}(/|$))[\w.-]{1,100}(/(?!\.{1,2}(/|$))[\w.-]{1,100}){0,4}")


class RefusedError(Exception):
    """A request that the sandbox does not run. The text names the field."""


@dataclass(frozen=True)
class Work:
    """A request."""

    program: str
    runs: list[str]
    """stdin of each."""
    tests: str | None
    files: dict[str, str]
    limits: Limits

    @staticmethod
    def read(body: bytes) -> Work:
        """Raises RefusedError."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the body is not JSON: {error}") from error
        if not isinstance(given, dict) or (unknown := set(given) - {"program", "runs", "tests", "files", "limits"}):
            raise RefusedError(
                f"unknown field: {', '.join(sorted(unknown))}" if isinstance(given, dict) else "not an object"
            )
        runs = given.get("runs", [{}] if given.get("tests") is None else [])
        if not isinstance(runs, list) or len(runs) > MAX_RUNS:
            raise RefusedError(f"runs: a list of at most {MAX_RUNS} is expected")
        for run in runs:
            if not isinstance(run, dict) or set(run) - {"stdin"}:
                raise RefusedError('runs: each is {"stdin": text} or {}')
        files = given.get("files", {})
        if not isinstance(files, dict) or not all(_FILE.fullmatch(name) for name in files):
            raise RefusedError("files: an object of text by relative path is expected")
        folders = {str(folder) for name in files for folder in PurePosixPath(name).parents}
        if folders & set(files) or any(len(part.encode()) > 255 for name in files for part in name.split("/")):
            raise RefusedError("files: a name is also that of a folder, or is longer than 255 bytes")
        return Work(
            program=_text("program", given.get("program")),
            runs=[_text("stdin", run.get("stdin", "")) for run in runs],
            tests=None if given.get("tests") is None else _text("tests", given["tests"]),
            files={name: _text(f"files.{name}", text) for name, text in files.items()},
            limits=_limits(given.get("limits", {})),
        )


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise RefusedError(f"{field}: text is expected")
    return value


def _limits(given: object) -> Limits:
    most, default = asdict(MAX_LIMITS), asdict(DEFAULT_LIMITS)
    if not isinstance(given, dict) or set(given) - set(most):
        raise RefusedError(f"limits: an object with {', '.join(most)} is expected")
    for name, value in given.items():
        least = LEAST_MEMORY if name == "memory_bytes" else 0
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= most[name]:
            raise RefusedError(f"limits.{name}: a number above {least} and at most {most[name]:g} is expected")
    merged: dict[str, Any] = default | {
        name: value if name == "seconds" else int(value) for name, value in given.items()
    }
    return Limits(**merged)


class Sandbox:
    """Runs programs, `at_once` at a time."""

    def __init__(self, at_once: int, *, landlock: bool = True) -> None:
        self._landlock = landlock
        self._free = asyncio.Semaphore(at_once)
        self._stem: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, work: Work) -> dict[str, Any]:
        """Returns the answer of POST /run."""
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(self._program(work, stdin)) for stdin in work.runs]
            tests = tasks.create_task(self._tests(work)) if work.tests is not None else None
        return {"runs": [asdict(run.result()) for run in runs], "tests": tests and asdict(tests.result())}

    def close(self) -> None:
        """Ends the stem process. Programs in work end with their connections."""
        if self._stem is not None:
            self._stem.close()
            self._stem = None
        if self._process is not None:
            self._process.wait()

    async def _program(self, work: Work, stdin: str) -> Report:
        async with self._free:
            job = Job("run", work.program, work.limits, work.files, self._landlock)
            return await self._repeated(lambda: _report(self._fork(), job, stdin))

    async def _tests(self, work: Work) -> Report:
        assert work.tests is not None
        program = Job("serve", work.program, work.limits, work.files, self._landlock)
        tests = Job("test", work.tests, work.limits, landlock=self._landlock)
        async with self._free:
            return await self._repeated(lambda: self._both(program, tests))

    async def _both(self, program: Job, tests: Job) -> Report:
        one, other = socket.socketpair()
        with one, other:
            of_program, of_tests = self._fork(one), self._fork(other)
        served, tested = await asyncio.gather(_report(of_program, program), _report(of_tests, tests))
        # A reader of a failed test needs the program's messages too.
        return replace(tested, stderr=tested.stderr + served.stderr)

    async def _repeated(self, run: Callable[[], Awaitable[Report]]) -> Report:
        """Repeats a run whose keeper did not come to be, because there were too many processes for a moment."""
        for pause in _PAUSES:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                return await run()
            await asyncio.sleep(pause)
        return await run()

    def _fork(self, peer: socket.socket | None = None) -> socket.socket:
        if self._stem is not None:
            with contextlib.suppress(ConnectionError):
                return fork_cell(self._stem, peer)
            self.close()
        self._process, self._stem = start_stem()
        return fork_cell(self._stem, peer)


async def _report(keeper: socket.socket, job: Job, stdin: str = "") -> Report:
    """Sends a job to its keeper and returns the keeper's report. If the caller is cancelled, the keeper ends the
    program."""
    reader, writer = await asyncio.open_connection(sock=keeper)
    try:
        writer.write(encode(Feed(stdin, job.limits.seconds, job.limits.output_bytes)) + encode(job))
        await writer.drain()
        length = int.from_bytes(await reader.readexactly(4), "big")
        return Report(**json.loads(await reader.readexactly(length)))
    finally:
        writer.close()


def create_app(environ: Mapping[str, str] = os.environ) -> Starlette:
    """Returns the application.

    SANDBOX_AT_ONCE: programs that run at the same time, by default one per processor. SANDBOX_RUNTIME: "runsc" for
    gVisor, whose kernel has no Landlock.

    Raises NotConfinedError if this kernel cannot confine a process, and ValueError for a wrong variable.
    """
    landlock = environ.get("SANDBOX_RUNTIME") != "runsc"
    confine.check(landlock=landlock)
    at_once = int(environ.get("SANDBOX_AT_ONCE") or os.cpu_count() or 1)
    if at_once < 1:
        raise ValueError(f"SANDBOX_AT_ONCE={at_once}: a number of at least 1 is expected")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.sandbox = Sandbox(at_once, landlock=landlock)
        yield
        app.state.sandbox.close()

    return Starlette(routes=[Route("/run", _run, methods=["POST"]), Route("/healthz", _healthz)], lifespan=lifespan)


async def _healthz(_: Request) -> Response:
    return Response()


async def _run(request: Request) -> Response:
    # A page in a browser can send this type only after a preflight, which is answered with 405.
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return _refusal(415, "bad_request", "the header Content-Type must be application/json")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _refusal(413, "too_large", f"the body is longer than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        return Response(status_code=499)
    try:
        work = Work.read(bytes(body))
    except RefusedError as error:
        return _refusal(422, "bad_request", str(error))
    running = asyncio.ensure_future(request.app.state.sandbox.run(work))
    disconnected = asyncio.ensure_future(request.receive())  # After the body: that the client has disconnected.
    await asyncio.wait([running, disconnected], return_when=asyncio.FIRST_COMPLETED)
    disconnected.cancel()
    if not running.done():
        running.cancel()
        await asyncio.wait([running])
        return Response(status_code=499)
    try:
        return JSONResponse(running.result())
    except (ExceptionGroup, ConnectionError, asyncio.IncompleteReadError):
        logging.getLogger(__name__).exception("a program could not be run")
        return _refusal(503, "sandbox_busy", "no process could be started; ask again later")


def _refusal(status: int, code: str, message: str) -> Response:
    message = message.encode("utf-8", "replace").decode()  # It may quote half a character.
    return JSONResponse({"error": {"code": code, "message": message}}, status)
