"""The sandbox that rewards and tools use: `run`, and the tool `python`.

GRISTMILL_SANDBOX_URL names the service. Without the variable, this process starts its own sandbox at the first
use. It ends with this process, however this process ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gristmill.internal.redaction import redact_text
from gristmill_env.errors import EnvError

URL: Final = "GRISTMILL_SANDBOX_URL"
_WAIT: Final = 600.0
"""Seconds that a request may wait in the sandbox for its turn."""
_OF_A_PROGRAM: Final = (413, 422)
"""HTTP status of a program that the sandbox does not take, as one that is too long."""


class SandboxError(EnvError):
    """The sandbox cannot be used, or refuses a program."""


class Report(msgspec.Struct, frozen=True):
    """How a program ended: services/sandbox, cell.Report."""

    status: str
    code: int | None
    stdout: str
    stderr: str

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself, with exit code 0."""
        return self.status == "exited" and self.code == 0


class Answer(msgspec.Struct, frozen=True):
    """The reports of a request."""

    runs: list[Report]
    tests: Report | None = None


async def run(
    program: str,
    stdin: Sequence[str] = (),
    *,
    tests: str | None = None,
    seconds: float = 5.0,
    memory_bytes: int = 512 * 2**20,
    output_bytes: int = 64 * 2**10,
) -> Answer:
    """Runs a Python program once for each text of `stdin`, and its tests if there are any.

    `seconds`, `memory_bytes`, `output_bytes`: of each process. Raises SandboxError, which may pass if the sandbox is
    away.
    """
    url = os.environ.get(URL, "") or await asyncio.to_thread(_own_sandbox)
    body: dict[str, Any] = {
        "program": program,
        "runs": [{"stdin": text} for text in stdin],
        "limits": {"seconds": seconds, "memory_bytes": memory_bytes, "output_bytes": output_bytes},
    }
    if tests is not None:
        body["tests"] = tests
    # A request may use all of its time, after it has waited for its turn.
    limit = _WAIT + seconds * (len(body["runs"]) + (tests is not None))
    answer = msgspec.json.decode(await _post(url, body, limit), type=Answer)
    for report in (*answer.runs, *filter(None, [answer.tests])):
        if report.status == "failed":
            raise SandboxError("sandbox_failed", f"the sandbox at {redact_text(url)}: {report.stderr}")
    return answer


async def python(code: str) -> str:
    """Runs a Python program and returns what it printed.

    Args:
        code: The program. It has Python's standard library, but no files, no network and no other processes.
    """
    try:
        [report] = (await run(code, [""])).runs
    except SandboxError as error:
        if error.code == "sandbox_refused" and error.values["status"] in _OF_A_PROGRAM:
            return f"Error: {error}"
        raise
    ends = {"exited": "", "signalled": f"Signal {report.code} ended the program."}
    end = ends.get(report.status, f"The program was ended: {report.status}.")
    return "".join([report.stdout, report.stderr, end]) or "(no output)"


async def _post(url: str, body: Mapping[str, Any], limit: float) -> bytes:
    """`limit`: seconds for the answer."""
    # Here, because every process with rewards imports this module, and few use it.
    import httpx

    from gristmill.internal import connections

    without_password = redact_text(url)
    try:
        async with connections.async_client(url, timeout=httpx.Timeout(limit, connect=10.0)) as http:
            # json escapes half characters, which a completion may have and UTF-8 has not.
            headers = {"Content-Type": "application/json"}
            answer = await http.post("/run", content=json.dumps(body), headers=headers)
    except httpx.ReadTimeout as error:
        raise _away(
            without_password, f"it has not finished within {limit:g} s; it may have too many programs"
        ) from error
    except httpx.TransportError as error:
        raise _away(without_password, str(error) or type(error).__name__) from error
    if answer.status_code >= 500:
        raise _away(without_password, f"HTTP {answer.status_code}")
    if not answer.is_success:
        raise SandboxError(
            "sandbox_refused",
            f"the sandbox at {without_password} refuses a program: HTTP {answer.status_code}: {answer.text[:300]}",
            url=without_password,
            status=answer.status_code,
        )
    return answer.content


def _away(url: str, why: str) -> SandboxError:
    return SandboxError(
        "sandbox_unreachable",
        f"the sandbox at {url} does not answer ({why}). With Compose, start it: docker compose --profile sandbox up. "
        f"Elsewhere {URL} is its address",
        url=url,
    ).passing()


_starting = threading.Lock()
_process: subprocess.Popen[str] | None = None
_address = ""


def _own_sandbox() -> str:
    """Returns the address of this process's own sandbox, which is started if it does not run."""
    global _process, _address
    with _starting:
        if _process is None or _process.poll() is not None:
            if importlib.util.find_spec("gristmill_sandbox") is None:
                raise SandboxError(
                    "sandbox_missing",
                    f"{URL} is not set, and the package gristmill-sandbox is not installed here; set the variable to "
                    "the address of a sandbox service (with Compose: docker compose --profile sandbox up)",
                )
            _process = subprocess.Popen(
                [sys.executable, "-m", "gristmill_sandbox", "--child"],
                stdin=subprocess.PIPE,  # Its end shows the sandbox that this process has ended.
                stdout=subprocess.PIPE,
                text=True,
            )
            assert _process.stdout is not None
            _address = _process.stdout.readline().strip()
        if not _address:
            code = _process.wait()
            raise SandboxError(
                "sandbox_not_started", f"the sandbox ended with exit code {code}; its message is in the log", code=code
            )
        return _address
