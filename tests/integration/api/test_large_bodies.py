"""Large bodies: work on them leaves the event loop, and their memory is bounded over all requests."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from tests.integration.api.store_harness import RUN
from tests.integration.api.test_archive import until
from tests.integration.api.test_http import AT, put
from tests.support.api_server import ApiServer
from tests.support.groups import make_group

from gristmill import GROUP_MEDIA_TYPE, TrajectoryGroup
from gristmill_api.app import create_app
from gristmill_api.atropos import parse
from gristmill_api.http import content_coding
from gristmill_api.http.body_limit import UNCOUNTED
from gristmill_api.routes import groups, journal
from gristmill_api.settings import Settings
from gristmill_api.store import runs

SMALL, LARGE = [(3, 40)] * 2, [(3, 60_000)] * 2


@pytest.fixture
async def http(redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The application on this test's own event loop."""
    app = create_app(Settings.read({"REDIS_URL": redis_url}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30) as http:
        yield http


class Threads:
    """Records on which threads functions run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._here = threading.get_ident()
        self.off_loop: dict[str, set[bool]] = {}

    def watch(self, owner: Any, name: str) -> None:
        found: Callable[..., Any] = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.off_loop.setdefault(name, set()).add(threading.get_ident() != self._here)
            return found(*args, **kwargs)

        self._patch.setattr(owner, name, recorded)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


async def open_run(http: httpx.AsyncClient) -> int:
    """Returns the trainer's incarnation."""
    settings = {"batch_size": 16, "gradient_accumulation_steps": 1, "training_steps": 9, "max_staleness": 1}
    (await http.post("/v1/runs", json={"run_id": RUN, "env": {}, "group_size": 2})).raise_for_status()
    taken = await http.post(f"{AT}/take", json={"trainer": settings, "covered": []})
    incarnation = int(taken.json()["incarnation"])
    (await http.post(f"{AT}/version", json={"incarnation": incarnation, "step": 0})).raise_for_status()
    return incarnation


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_native_groups_of_more_than_512_kib_leave_the_event_loop(
    http: httpx.AsyncClient, threads: Threads, large: bool
) -> None:
    incarnation = await open_run(http)
    threads.watch(hashlib, "sha256")
    threads.watch(groups, "example")
    threads.watch(journal, "example")
    threads.watch(TrajectoryGroup, "decode")
    (permit,) = (await http.post(f"{AT}/permits", json={"holder": "env-1", "count": 1})).json()["permits"]
    group = make_group(permit["group_id"], RUN, lengths=LARGE if large else SMALL)
    answer = await put(http, group.group_id, group.encode())
    assert answer.status_code == 201, answer.text
    assert threads.off_loop.pop("sha256") == threads.off_loop.pop("decode") == {large}

    lease = {"incarnation": incarnation, "batch_id": "b1", "groups": 1}
    (await http.post(f"{AT}/lease", json=lease)).raise_for_status()
    (await http.get(f"{AT}/examples")).raise_for_status()
    (await http.get(f"{AT}/groups/{group.group_id}", headers={"Accept": "application/json"})).raise_for_status()
    assert threads.off_loop["example"] == threads.off_loop["decode"] == {large}


@pytest.mark.parametrize(
    ("tokens", "large", "slow"), [(40, False, False), (20_000, False, True), (100_000, True, True)]
)
async def test_groups_of_atropos_of_more_than_512_kib_leave_the_event_loop(
    http: httpx.AsyncClient, threads: Threads, tokens: int, large: bool, slow: bool
) -> None:
    """`slow`: a group of more than 64 KiB that only the slow path can read leaves the event loop too."""
    threads.watch(parse, "_read")
    threads.watch(parse, "from_message")
    threads.watch(content_coding, "_gunzip")
    row = list(range(tokens))
    group = {"tokens": [row], "masks": [row], "scores": [1.0]}
    irregular = json.dumps({**group, "images": float("nan")}).encode()  # for the slow path
    for body in (json.dumps(group).encode(), irregular):
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = await http.post("/scored_data", content=gzip.compress(body), headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"status": "received"})
    assert threads.off_loop == {"_read": {large}, "from_message": {slow}, "_gunzip": {large}}


RIGHT: dict[str, Any] = {"tokens": [[1, 2], [3]], "masks": [[1, 2], [3]], "scores": [1.0, 0.0]}
WRONG: dict[str, tuple[str, str]] = {
    "one value": ("", json.dumps({**RIGHT, "scores": [1.0, "x"]})),
    "several fields": ("", json.dumps({**RIGHT, "tokens": [[1, 2], "x"], "masks": 1, "env_id": 0.5})),
    "missing fields": ("", json.dumps({"tokens": [[1]]})),
    "masks that do not fit": ("", json.dumps({**RIGHT, "masks": [[1, 2], []], "images": float("nan")})),
    "score that is not a number": ("", json.dumps({**RIGHT, "scores": [1.0, float("inf")]})),
    "message without a role": ("", json.dumps({**RIGHT, "messages": [[{"content": "a"}]]})),
    "no object": ("", "[1]"),
    "no JSON": ("", '{"tokens": [1 2]}'),
    "number of many digits": ("", '{"tokens": ' + "1" * 5000 + "}"),
    "no list": ("_list", json.dumps(RIGHT)),
    "group of a list": ("_list", json.dumps([RIGHT, {**RIGHT, "masks": [[1], [3]]}])),
    "entry of a list": ("_list", json.dumps([RIGHT, 5])),
}


@pytest.mark.parametrize(("path", "text"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("media_type", ["application/json", "Application/Vnd.x+JSON; charset=utf-8"])
async def test_large_wrong_bodies_of_atropos_are_refused_off_the_event_loop(
    http: httpx.AsyncClient, threads: Threads, path: str, text: str, media_type: str
) -> None:
    """The answer is FastAPI's own, as for a small body."""
    headers = {"Content-Type": media_type}
    small = await http.post(f"/scored_data{path}", content=text.encode(), headers=headers)
    assert small.status_code in (400, 422)
    threads.watch(json, "loads")
    large = await http.post(f"/scored_data{path}", content=text.encode() + b" " * UNCOUNTED, headers=headers)
    assert threads.off_loop in ({}, {"loads": {True}})
    assert (large.status_code, large.text) == (small.status_code, small.text)


async def test_large_body_of_atropos_is_refused_for_the_first_wrong_entry_of_each_list(http: httpx.AsyncClient) -> None:
    """To describe a million wrong entries takes ten times as long as to read them."""
    many = ["x"] * 100_000
    wrong = {**RIGHT, "tokens": [[1, 2], many, many], "masks": many, "overrides": many, "messages": [many]}
    places: list[list[str | int]] = [["tokens", 1, 0], ["masks", 0], ["messages"], ["overrides", 0]]
    requests: list[tuple[str, Any, list[str | int]]] = [
        ("", wrong, ["body"]),
        ("_list", [RIGHT, wrong, wrong], ["body", 1]),
    ]
    for path, body, at in requests:
        answer = await http.post(f"/scored_data{path}", json=body)
        assert answer.status_code == 422
        assert [problem["loc"] for problem in answer.json()["detail"]] == [at + place for place in places]


async def test_audit_of_many_groups_leaves_the_event_loop(
    http: httpx.AsyncClient, redis_url: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_run(http)
    threads.watch(runs, "_audit")
    audit = await http.get(f"{AT}/groups")
    assert threads.off_loop == {"_audit": {False}}
    monkeypatch.setattr(runs, "SHORT_AUDIT", 0)
    (await http.post(f"{AT}/permits", json={"holder": "env-1", "count": 1})).raise_for_status()
    audit = await http.get(f"{AT}/groups")
    assert threads.off_loop == {"_audit": {False, True}}
    assert audit.json()["outstanding"] == ["g00000000"]
    assert set(audit.json()) == {"trained", "ready", "leased", "dead", "dropped", "outstanding"}


async def test_bodies_of_all_requests_are_bounded(redis_url: str) -> None:
    """A request that sends most of a large body makes later requests wait. The waiting requests then get a 503."""
    with ApiServer(redis_url, API_MAX_CONCURRENT_BODY_BYTES=str(1 << 20)) as api:
        head = "PUT {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {}\r\nContent-Length: 700000\r\n\r\n"
        _, stalled = await asyncio.open_connection("127.0.0.1", api.port)
        stalled.write(head.format(f"{AT}/groups/g00000000?holder=h", GROUP_MEDIA_TYPE).encode())
        stalled.write(bytes(699_999))
        await stalled.drain()
        async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:

            async def native() -> httpx.Response:
                return await put(http, "g00000000", bytes(700_000))

            async def atropos() -> httpx.Response:
                return await http.post(
                    "/scored_data", content=bytes(700_000), headers={"Content-Type": "application/json"}
                )

            async def held() -> bool:
                return "gristmill_api_body_bytes 699999.0" in (await http.get("/metrics")).text

            await until(held)
            refused, at_root = await asyncio.gather(native(), atropos())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bodies")
            assert (at_root.status_code, at_root.json()["code"]) == (503, "too_many_bodies")
            assert refused.headers["retry-after"] == at_root.headers["retry-after"] == "1"
            assert (await put(http, "g00000000", bytes(60_000))).status_code == 400, "small bodies pass"
            waiting = asyncio.create_task(native())
            await asyncio.sleep(0.2)
            stalled.close()
            assert (await waiting).status_code == 400, "it came through, and is not a group"


async def test_slow_bodies_take_no_room_and_are_refused(redis_url: str) -> None:
    """64 requests announce the whole room each, and send one byte."""
    environ = {"API_MAX_CONCURRENT_BODY_BYTES": str(1 << 20), "API_REQUEST_TIMEOUT_S": "3"}
    with ApiServer(redis_url, **environ) as api:
        head = f"PUT {AT}/groups/g00000000?holder=h HTTP/1.1\r\nHost: localhost\r\nContent-Type: {GROUP_MEDIA_TYPE}\r\n"
        slow = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(64)]
        for _, writer in slow:
            writer.write(f"{head}Content-Length: 1048576\r\n\r\nx".encode())
        async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:
            assert (await put(http, "g00000000", bytes(700_000))).status_code == 400, "it arrived, and is not a group"
        for reader, writer in slow:
            answer = await reader.readuntil(b"}}")
            assert (answer[:12], b"body_stalled" in answer) == (b"HTTP/1.1 503", True)
            writer.close()
