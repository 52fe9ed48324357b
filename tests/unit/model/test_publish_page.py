"""The program of docs/servers.md, against the server's gate. A stand-in for vLLM is behind the gate."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from safetensors import safe_open
from tests.support.ports import free_port
from tests.unit.model.models import save_random

from gristmill_model.asgi import Receive, Scope, Send, read_body, send_json
from gristmill_model.gate import DeveloperGate
from gristmill_model.resolve import untied

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "servers.md"


class Server:
    """vLLM's endpoints that a publication calls, behind the gate, on a real port."""

    def __init__(self, weights_dir: Path) -> None:
        self.weights_dir = weights_dir
        self.label = "default"
        self.loaded: list[Path] = []
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        gate = DeveloperGate(self._vllm, weights_dir / "token")
        self._uvicorn = uvicorn.Server(uvicorn.Config(gate, port=port, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()

    async def _vllm(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = json.loads(await read_body(receive) or b"{}")
        if scope["path"] == "/update_weight_version":
            self.label = asked["new_version"]
        elif scope["path"] == "/collective_rpc":
            self.loaded.append(Path(asked["kwargs"]["path"]))
        broken = scope["path"] == "/collective_rpc" and self.loaded[-1].name == "broken"
        results = [[500, "publish_failed", "broken"] if broken else []]
        await send_json(send, 200, {"success": True, "weight_version": self.label, "results": results})

    def run(self, *arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
        environ = {"GRISTMILL_WEIGHTS_DIR": str(self.weights_dir), "GRISTMILL_MODEL_URL": self.url}
        command = [sys.executable, "-c", program or the_program(), *arguments]
        return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=300)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "weights").mkdir()
    server = Server(tmp_path / "weights")
    yield server
    server.close()


def the_program() -> str:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(program)


def shapes(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            names: Any = file.keys()
            found |= {name: file.get_slice(name).get_shape() for name in names}
    return found


@pytest.mark.long
def test_program_publishes_all_tensors_of_the_served_copy(server: Server, tmp_path: Path) -> None:
    model = save_random(tmp_path / "model", tied=True)
    done = server.run(str(model), "letters", "1.0")
    assert done.returncode == 0, done.stderr
    folder = server.weights_dir / "letters" / "1.0"
    assert (server.loaded, server.label) == ([folder], "1.0")
    assert shapes(folder) == shapes(untied(model, tmp_path))


@pytest.mark.long
def test_program_reports_a_trainer_that_was_replaced(server: Server) -> None:
    functions = the_program().partition("if __name__")[0]
    (server.weights_dir / "1.1").mkdir()
    call = 'folder = WEIGHTS / "1.1"\nfirst = claim()\npublish(first, folder, "1.1")\nsecond = claim()\n'
    replaced = server.run(program=f'{functions}{call}publish(second, folder, "2.1")\npublish(first, folder, "1.2")\n')
    assert (replaced.returncode, server.label) == (1, "2.1")
    assert re.match(r"409 .*'fenced'", replaced.stderr)


def test_reset_loads_the_first_weights_again_under_their_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_FIRST_WEIGHTS", str(tmp_path / "first"))
    (tmp_path / "weights" / "1.7").mkdir(parents=True)
    (tmp_path / "weights" / "token").write_text("token")
    server = Server(tmp_path / "weights")
    try:
        trainer = {"Authorization": "Bearer token"}
        body = {"path": str(server.weights_dir / "1.7"), "version": "1.7"}
        assert httpx.post(f"{server.url}/gristmill/publish", json=body, headers=trainer).is_success
        assert httpx.post(f"{server.url}/gristmill/reset").status_code == 401
        assert server.label == "1.7"
        answer = httpx.post(f"{server.url}/gristmill/reset", headers=trainer)
        assert answer.json() == {"weight_version": "default"}
        assert (server.loaded[-1], server.label) == (tmp_path / "first", "default")
    finally:
        server.close()


def test_table_of_answers_has_the_codes_of_the_server(server: Server) -> None:
    answers = PAGE.read_text().partition("\n### Answers\n")[2]
    listed = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", answers, re.MULTILINE))
    (server.weights_dir / "token").write_text("token")
    (server.weights_dir / "broken").mkdir()
    gone, broken = ({"path": str(server.weights_dir / name), "version": "1.0"} for name in ("gone", "broken"))
    cases: list[tuple[str, dict[str, str], int]] = [("other", gone, 401), ("token", {}, 422), ("token", broken, 500)]
    for token, content, status in [*cases, ("token", gone, 503)]:
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.post(f"{server.url}/gristmill/publish", json=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, listed[str(status)])
    assert {*listed} == {"401", "409", "422", "500", "503"}
