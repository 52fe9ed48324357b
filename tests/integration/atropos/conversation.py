"""Reads conversation.yaml and runs one of its conversations with a server."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

FOLDER = Path(__file__).parent
KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    "distill_logprobs",
)


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    encoded: str
    """Content-Encoding."""
    value: Any
    """JSON, or text."""

    def shown(self) -> str:
        """Returns equal strings for equal answers. 1 and 1.0 differ, because a client in Python reads them as two
        types."""
        return json.dumps([self.status, self.content_type, self.encoded, self.value], sort_keys=True)


def conversations() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((FOLDER / "conversation.yaml").read_text())
    return found


def fixes() -> dict[str, dict[str, str]]:
    """fixes.yaml by id."""
    return {fix["id"]: fix for fix in yaml.safe_load((FOLDER / "fixes.yaml").read_text())}


def expand(value: Any) -> Any:
    """Replaces every {group: n, is: k, env: e} by that group."""
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "group" not in value:
        return {key: expand(item) for key, item in value.items()}
    tokens = [[value["is"]] * value.get("long", 1) + [index] for index in range(value["group"])]
    return {
        **dict.fromkeys(KEYS),
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [float(index) for index in range(value["group"])],
        "inference_logprobs": [[1.0, *(-0.5 for _ in row[1:])] for row in tokens],
        "env_id": value.get("env"),
    }


def say(http: httpx.Client, step: dict[str, Any]) -> list[Answer]:
    """Runs one step on a separate connection, because the reference breaks the connection with every 500."""
    method, path = step["say"].split()
    headers = {"Accept-Encoding": step.get("accept", "identity"), "Connection": "close"}
    body = b""
    if "json" in step or "text" in step:
        body = step["text"].encode() if "text" in step else json.dumps(expand(step["json"])).encode()
        headers["Content-Type"] = step.get("type", "application/json")
    how = step.get("gzip")
    if how:
        headers["Content-Encoding"] = "gzip"
        if how == "bomb":
            headers["Content-Type"] = "application/json"
            body = json.dumps(expand({"group": 1, "is": 1})).encode() + b" " * 1_000_000
        body = body if how == "not" else gzip.compress(body)
        body = body[:-20] if how == "cut" else body
    return [_answer(http.request(method, path, content=body, headers=headers))
            for _ in range(step.get("times", 1))]  # fmt: skip


def _answer(response: httpx.Response) -> Answer:
    is_json = response.headers.get("content-type", "").startswith("application/json")
    value = response.json() if is_json else response.text
    if isinstance(value, dict) and "uuid" in value:
        assert isinstance(value["uuid"], int)
        value = {**value, "uuid": "an int of 128 bits"}
    if isinstance(value, dict) and value.get("status") == "failure":
        assert isinstance(value["error"], str)
        value = {**value, "error": "a reason"}
    return Answer(
        response.status_code,
        response.headers.get("content-type", ""),
        response.headers.get("content-encoding", ""),
        value,
    )
