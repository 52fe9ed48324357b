"""The gate: generation and reading are open, and everything else requires the trainer's token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill_model.gate import DeveloperGate


class Answer:
    """A client's view: a status, a body, and whether the application was reached."""

    def __init__(self) -> None:
        self.reached = False
        self.status = 0
        self.body = b""
        self.kinds: list[str] = []

    def ask(
        self,
        token_file: Path,
        method: str,
        path: str,
        token: bytes | None = None,
        kind: str = "http",
        host: bytes = b"127.0.0.1:9001",
        gate: DeveloperGate | None = None,
    ) -> Answer:
        """`gate`: a gate from an earlier request, in place of a new one."""
        headers = [(b"host", host), *([] if token is None else [(b"authorization", token)])]
        scope: dict[str, Any] = {"type": kind, "method": method, "path": path, "headers": headers}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.reached = True

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            self.kinds.append(message["type"])
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")

        asyncio.run((gate or DeveloperGate(app, token_file))(scope, receive, send))
        return self


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("abc123\n")
    return path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/inference/v1/generate"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions/derender"),
        ("POST", "/v1/chat/completions/derender"),
        ("GET", "/v1/models"),
        ("GET", "/weight_info"),
        ("GET", "/is_paused"),
        ("GET", "/health"),
        ("GET", "/metrics"),
    ],
)
def test_gate_allows_generation_and_reading_without_a_token(token_file: Path, method: str, path: str) -> None:
    assert Answer().ask(token_file, method, path).reached


CLOSED = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/collective_rpc"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/update_weight_version"),
    ("POST", "/sleep"),
    ("POST", "/abort_requests"),
    ("POST", "/weight_info"),
    ("GET", "/docs"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/derender"),
    ("POST", "/an/endpoint/of/the/next/vllm"),
    ("POST", "/health/../pause"),
    ("POST", "//v1/completions"),
]


@pytest.mark.parametrize(("method", "path"), CLOSED)
@pytest.mark.parametrize("token", [None, b"", b"Bearer ", b"Bearer wrong", b"abc123", b"Basic abc123"])
def test_gate_refuses_every_other_request_without_the_token(
    token_file: Path, method: str, path: str, token: bytes | None
) -> None:
    answer = Answer().ask(token_file, method, path, token)
    assert not answer.reached
    assert answer.status == 401
    assert str(token_file) in json.loads(answer.body)["error"]["message"]
    assert b"abc123" not in answer.body


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_gate_allows_every_request_with_the_token(token_file: Path, method: str, path: str) -> None:
    assert Answer().ask(token_file, method, path, b"Bearer abc123").reached


def test_gate_reads_a_token_file_that_appears_or_changes_later(tmp_path: Path) -> None:
    path = tmp_path / "token"
    missing = Answer().ask(path, "POST", "/pause", b"Bearer abc")
    assert (missing.status, json.loads(missing.body)["error"]["code"]) == (401, "unauthorized")
    assert all(word in json.loads(missing.body)["error"]["message"] for word in (str(path), "FileNotFoundError"))
    path.write_text("abc")
    assert Answer().ask(path, "POST", "/pause", b"Bearer abc").reached
    path.write_text("def")
    assert not Answer().ask(path, "POST", "/pause", b"Bearer abc").reached


def test_gate_answers_fenced_to_a_replaced_token(token_file: Path) -> None:
    async def reached(scope: Any, receive: Any, send: Any) -> None:
        """The application."""

    gate = DeveloperGate(reached, token_file)
    assert Answer().ask(token_file, "POST", "/pause", b"Bearer abc123", gate=gate).status == 0
    token_file.write_text("def456")
    replaced = Answer().ask(token_file, "POST", "/pause", b"Bearer abc123", gate=gate)
    assert (replaced.status, json.loads(replaced.body)["error"]["code"]) == (409, "fenced")
    stranger = Answer().ask(token_file, "POST", "/pause", b"Bearer ghi789", gate=gate)
    assert (stranger.status, json.loads(stranger.body)["error"]["code"]) == (401, "unauthorized")
    token_file.write_text("abc123")
    assert Answer().ask(token_file, "POST", "/pause", b"Bearer abc123", gate=gate).status == 0
    replaced = Answer().ask(token_file, "POST", "/pause", b"Bearer def456", gate=gate)
    assert replaced.status == 409


def test_gate_refuses_every_token_if_the_token_file_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n")
    assert Answer().ask(path, "POST", "/pause", b"Bearer ").status == 401


def test_websockets_are_refused_and_lifespan_passes(token_file: Path) -> None:
    refused = Answer().ask(token_file, "GET", "/v1/realtime", kind="websocket")
    assert refused.kinds == ["websocket.close"]
    assert not refused.reached
    assert Answer().ask(token_file, "", "", kind="lifespan").reached


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/health"), *CLOSED])
@pytest.mark.parametrize("token", [None, b"Bearer abc123"])
def test_request_for_an_unknown_host_is_refused(token_file: Path, method: str, path: str, token: bytes | None) -> None:
    """Against DNS rebinding. A token does not help: a browser may have sent it."""
    answer = Answer().ask(token_file, method, path, token, host=b"rebind.evil.example:9001")
    assert not answer.reached
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (421, "host_not_allowed")


def test_named_hosts_are_allowed(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Answer().ask(token_file, "GET", "/health", host=b"model:9001").reached
    assert not Answer().ask(token_file, "GET", "/health", host=b"gpu-box.lan:9001").reached
    monkeypatch.setenv("API_ALLOWED_HOSTS", "gpu-box.lan")
    assert Answer().ask(token_file, "GET", "/health", host=b"gpu-box.lan:9001").reached
    monkeypatch.setenv("API_ALLOWED_HOSTS", "*")
    assert Answer().ask(token_file, "GET", "/health", host=b"evil.example").reached
