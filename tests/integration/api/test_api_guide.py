"""docs/api.md has a line for every call of /v1, and every line works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
from tests.support.api_server import ApiServer

GUIDE = Path(__file__).parents[3] / "docs" / "api.md"
SCRIPT = "".join(re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL))
CALL = re.compile(r"(?:json|curl)(?P<options>(?: [^$\n]*?)?) \"?(?P<url>\$(?:API|RUN)[^\s\"]*)(?P<rest>.*)")


def shown() -> set[tuple[str, str]]:
    """Returns the method and path of each call in the guide."""
    calls = set()
    for match in CALL.finditer(SCRIPT):
        method = re.search(r"-X (\w+)", match["options"] + match["rest"])
        path = match["url"].replace("$RUN", "/v1/runs/demo").replace("$API", "").partition("?")[0]
        calls.add((method[1] if method else "GET", path))
    return calls


async def test_api_guide_shows_every_v1_call(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    operations = {
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if path.startswith("/v1") or path in ("/healthz", "/readyz", "/metrics")
    }
    calls = shown()

    def fits(call: tuple[str, str], operation: tuple[str, str]) -> bool:
        pattern = re.sub(r"\\\{\w+\\\}", r"[^/]+", re.escape(operation[1]))
        return call[0] == operation[0] and re.fullmatch(pattern, call[1]) is not None

    assert [operation for operation in operations if not any(fits(call, operation) for call in calls)] == []
    assert [call for call in calls if not any(fits(call, operation) for operation in operations)] == []


def test_api_guide_commands_work_in_order(redis_url: str, shared_api: ApiServer, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "API": shared_api.url, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "read.group").read_bytes() == (tmp_path / "g00000000.group").read_bytes()
    assert (tmp_path / "batch").stat().st_size > 0
