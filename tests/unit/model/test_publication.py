"""Publications into a vLLM with two workers, whose memory sleeps and whose calls fail: no real one fails on request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill_model.asgi import Receive, Scope, Send, read_body, send_json
from gristmill_model.gate import DeveloperGate

REFUSAL = [422, "device_memory_unusable", "no"]
FAILURE = [500, "publish_failed", "no memory"]


class Vllm:
    """vLLM's endpoints that a publication calls. Answers and states are as in vLLM 0.32."""

    def __init__(self) -> None:
        self.label, self.paused = "default", False
        self.weights: list[str | None] = ["default", "default"]
        """Of each worker. None: dropped, or partly loaded."""
        self.mapped = [{"weights", "kv_cache"}, {"weights", "kv_cache"}]
        """Memory of each worker that does not sleep."""
        self.answers: dict[str, list[list[Any]]] = {}
        """Answers of the workers to the next call of a method, other than success."""

    @property
    def serves(self) -> str | None:
        """The weights by which tokens are sampled under their label. None: no token is sampled."""
        if self.paused:
            return None
        assert all(mapped == {"weights", "kv_cache"} for mapped in self.mapped), "the engine computes without memory"
        assert self.weights == [self.label, self.label]
        return self.label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = json.loads(await read_body(receive) or b"{}")
        answer: dict[str, Any] = {"success": True, "weight_version": self.label}
        match scope["path"]:
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
                assert self.serves
            case "/update_weight_version":
                self.label = asked["new_version"]
            case "/collective_rpc":
                answer = {"results": self._on_workers(asked["method"], asked["kwargs"])}
        await send_json(send, 200, answer)

    def _on_workers(self, method: str, arguments: dict[str, Any]) -> list[list[Any]]:
        assert self.paused
        answers = self.answers.pop(method, [[], []])
        for number, answer in enumerate(answers):
            if method == "wake":
                self.mapped[number] |= set() if answer else set(arguments.get("tags") or ("weights", "kv_cache"))
            elif method == "fall_asleep":
                self.mapped[number] -= {"kv_cache"} if answer else {"weights", "kv_cache"}
                self.weights[number] = None if arguments["level"] == 2 else self.weights[number]
            else:
                assert "weights" in self.mapped[number]
                if answer != REFUSAL:
                    self.weights[number] = None if answer else Path(arguments["path"]).name
        return answers


class Server:
    """The gate in front of a `Vllm`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "default").mkdir()
        for version in ("1.1", "1.2", "memory"):
            (folder / version).mkdir()
        (folder / "memory" / "device_memory.json").touch()
        (folder / "token").write_text("token")
        monkeypatch.setenv("GRISTMILL_FIRST_WEIGHTS", str(folder / "default"))
        self.vllm, self._folder = Vllm(), folder
        self._gate = DeveloperGate(self.vllm, folder / "token")

    def publish(self, version: str) -> tuple[int, str]:
        return self.post("publish", {"path": str(self._folder / version), "version": version})

    def sleep(self, level: int) -> tuple[int, str]:
        return self.post("sleep", {"level": level})

    def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
        """Returns status and code, or status and version."""

        content = body if isinstance(body, bytes) else json.dumps(body)

        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(self._gate)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as client:
                headers = {"Authorization": "Bearer token"}
                return await client.post(f"/gristmill/{path}", content=content, headers=headers)

        answer = asyncio.run(post())
        return answer.status_code, answer.json().get("weight_version") or answer.json()["error"]["code"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path, monkeypatch)


@pytest.mark.parametrize("path", ["publish", "sleep"])
@pytest.mark.parametrize("body", [b"no JSON", b"{}", b"[" * 100_000])
def test_unreadable_body_is_refused(server: Server, path: str, body: bytes) -> None:
    assert server.post(path, body) == (422, "bad_request")
    assert server.vllm.serves == "default"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_publication_wakes_all_memory_before_a_token_is_sampled(server: Server, level: int, fails: bool) -> None:
    """`fails`: only a part of the memory sleeps."""
    assert server.publish("1.1") == (200, "1.1")
    server.vllm.answers = {"fall_asleep": [[], FAILURE]} if fails else {}
    assert server.sleep(level) == ((500, "publish_failed") if fails else (200, "1.1"))
    assert server.vllm.serves is None
    assert server.publish("1.2") == (200, "1.2")
    assert server.vllm.serves == "1.2"


def test_log_has_the_seconds_of_each_part_of_a_publication(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server.publish("1.1")
    server.publish("1.2")
    parts = ["/pause", "/weight_info", "/update_weight_version", "load_files", "/reset_prefix_cache"]
    parts += ["/update_weight_version", "/resume"]
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.gristmill_model.publication"]
    assert [re.findall(r"(\S+) \d+\.\d{3} s", line) for line in lines] == [parts] * 2


@pytest.mark.parametrize("awake", [[FAILURE, FAILURE], [[], FAILURE]])
def test_server_without_memory_to_wake_stays_paused_until_the_next_publication(
    server: Server, awake: list[list[Any]]
) -> None:
    assert server.publish("1.1") == (200, "1.1")
    assert server.sleep(2) == (200, "1.1")
    server.vllm.answers["wake"] = awake
    assert server.publish("1.2") == (500, "publish_failed")
    assert server.vllm.serves is None
    assert server.publish("1.2") == (200, "1.2")
    assert server.vllm.serves == "1.2"


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize(
    ("version", "method", "answers", "answered"),
    [
        ("1.2", "load_files", [FAILURE, FAILURE], (500, "publish_failed")),
        ("1.2", "load_files", [[], FAILURE], (500, "publish_failed")),
        ("memory", "load_device_memory", [REFUSAL, FAILURE], (500, "publish_failed")),
        ("memory", "load_device_memory", [REFUSAL, []], (500, "publish_failed")),
        ("memory", "load_device_memory", [REFUSAL, REFUSAL], (422, "device_memory_unusable")),
    ],
)
def test_load_that_a_worker_does_not_do_brings_back_the_weights_before(
    server: Server, version: str, method: str, answers: list[list[Any]], answered: tuple[int, str], sleeps: bool
) -> None:
    assert server.publish("1.1") == (200, "1.1")
    if sleeps:
        server.sleep(2)
    server.vllm.answers[method] = answers
    assert server.publish(version) == answered
    assert server.vllm.serves == "1.1"
