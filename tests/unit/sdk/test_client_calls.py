"""Both clients have a method for every call of /v1, with every field of the request."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill import ApiError, AtroposRegistration, Client, ErrorCode, PolicyVersion, RowResult, SyncClient
from gristmill_api import errors
from gristmill_api.routes import native

RUN, GROUP, ENV, SOURCE = "the-run", "g00000007", "the-env", "the-source"
IDS = {RUN: "{run_id}", GROUP: "{group_id}", ENV: "{env_id}", SOURCE: "{source}"}
RESULT = RowResult(row="3", reward=0.5, band=(0.1, 0.9), turns=[11])
REGISTRATION = AtroposRegistration(batch_size=8, max_token_len=64, num_steps=3, save_checkpoint_interval=1)
CALLS: dict[str, dict[str, Any]] = {
    "create_run": {"run_id": RUN, "env": {}, "group_size": 2},
    "list_runs": {},
    "get_run": {"run_id": RUN},
    "open_run": {"wait": 0},
    "status": {"run_id": RUN},
    "take": {"run_id": RUN, "trainer": {}, "covered": []},
    "record_version": {"run_id": RUN, "version": PolicyVersion(1, 0)},
    "finish": {"run_id": RUN, "incarnation": 1},
    "close_run": {"run_id": RUN},
    "delete_run": {"run_id": RUN},
    "permits": {"run_id": RUN, "holder": ENV, "count": 1, "wait": 0},
    "renew_permits": {"run_id": RUN, "holder": ENV, "group_ids": [GROUP]},
    "return_permit": {"run_id": RUN, "holder": ENV, "group_id": GROUP, "reason": "same_scores", "result": RESULT},
    "abandon_permits": {"run_id": RUN, "holder": ENV},
    "submit": {"group": make_group(GROUP, RUN), "holder": ENV, "result": RESULT},
    "read_group": {"run_id": RUN, "group_id": GROUP},
    "read_example": {"run_id": RUN, "group_id": GROUP},
    "audit": {"run_id": RUN},
    "lease": {"run_id": RUN, "incarnation": 1, "batch_id": "b1", "groups": 1, "wait": 0},
    "extend": {"run_id": RUN, "incarnation": 1, "batch_ids": ["b1"]},
    "ack": {"run_id": RUN, "incarnation": 1, "batch_ids": ["b1"]},
    "nack": {"run_id": RUN, "incarnation": 1, "batch_ids": ["b1"]},
    "register_env": {"run_id": RUN, "env_id": ENV, "heartbeat_s": 3},
    "environments": {"run_id": RUN},
    "heartbeat_env": {"run_id": RUN, "env_id": ENV},
    "leave_env": {"run_id": RUN, "env_id": ENV},
    "claim": {"run_id": RUN, "name": "evaluation", "holder": ENV, "ttl": 30},
    "dead_letters": {"run_id": RUN},
    "replay_dead_letters": {"run_id": RUN},
    "purge_dead_letters": {"run_id": RUN},
    "report_metrics": {"run_id": RUN, "source": SOURCE, "step": 1, "values": {}},
    "metric_sources": {"run_id": RUN},
    "metrics": {"run_id": RUN, "source": SOURCE},
    "events": {"run_id": RUN},
    "examples": {"run_id": RUN},
}
ELSEWHERE = {"close", "register_atropos", "runs", "progress"}
"""Methods without a call of /v1, or that combine calls."""


class Sent(Exception):
    """Carries the request of a client instead of sending it."""

    def __init__(self, request: httpx.Request) -> None:
        self.request = request


def _raise(request: httpx.Request) -> httpx.Response:
    raise Sent(request)


async def _async_requests() -> list[httpx.Request]:
    async with Client("http://api") as client:
        client._http = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(_raise))
        requests = []
        for name, arguments in CALLS.items():
            call = getattr(client, name)(**arguments)
            with pytest.raises(Sent) as sent:
                await (anext(call) if inspect.isasyncgen(call) else call)
            requests.append(sent.value.request)
        return requests


def _sync_requests() -> list[httpx.Request]:
    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(_raise))
        requests = []
        for name, arguments in CALLS.items():
            method = getattr(client, name)
            call = partial(method, **arguments)
            with pytest.raises(Sent) as sent:
                next(call()) if inspect.isgeneratorfunction(method) else call()
            requests.append(sent.value.request)
        return requests


def _operation(request: httpx.Request) -> tuple[str, str]:
    path = "/".join(IDS.get(part, part) for part in request.url.path.split("/"))
    return request.method, path


def _fields(request: httpx.Request) -> set[str]:
    """Returns the names in the query and in the JSON body."""
    is_json = request.headers.get("content-type") == "application/json"
    return {*request.url.params, *(json.loads(request.content) if is_json else ())}


@pytest.fixture(scope="module")
def operations() -> dict[tuple[str, str], set[str]]:
    """The operations of /v1 in the API's OpenAPI document: the names in the query and in the JSON body."""
    app = FastAPI()
    app.include_router(native)
    document = app.openapi()
    schemas = document["components"]["schemas"]
    found = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if not path.startswith("/v1/"):
                continue
            fields = {field["name"] for field in operation.get("parameters", ()) if field["in"] == "query"}
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                fields |= {*schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]["properties"]}
            found[method.upper(), path] = fields
    assert len(found) > 30
    return found


def _public(kind: type) -> dict[str, Callable[..., Any]]:
    return {name: method for name, method in vars(kind).items() if not name.startswith("_")}


def test_table_of_calls_names_every_method() -> None:
    assert {*_public(Client)} == {*CALLS, *ELSEWHERE}


def test_async_and_blocking_client_have_the_same_methods_parameters_and_docstrings() -> None:
    both = {name: (method, _public(SyncClient)[name]) for name, method in _public(Client).items()}
    assert {*both} == {*_public(SyncClient)}
    for method, blocking in both.values():
        assert str(inspect.signature(method)).replace(
            "AsyncGenerator[RunEvent, None]", "Generator[RunEvent, None, None]"
        ) == str(inspect.signature(blocking))
        assert method.__doc__ == blocking.__doc__
        assert method.__doc__, method


@pytest.mark.slow
async def test_clients_have_a_method_for_every_call_of_the_api_with_every_field(
    operations: dict[tuple[str, str], set[str]],
) -> None:
    for requests in (await _async_requests(), _sync_requests()):
        sent: dict[tuple[str, str], set[str]] = {}
        for request in requests:
            sent.setdefault(_operation(request), set()).update(_fields(request))
        assert sent == operations


@pytest.mark.parametrize("wrong", ["", ".", "..", "other/envs"])
def test_name_that_would_change_the_path_of_a_call_is_refused(wrong: str) -> None:
    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(_raise))
        with raises(ApiError, "bad_request"):
            client.delete_run(wrong)
        with raises(ApiError, "bad_request"):
            client.leave_env(RUN, wrong)


def test_name_in_a_path_is_quoted() -> None:
    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(_raise))
        with pytest.raises(Sent) as sent:
            client.delete_run("other#old?a=1%2f")
    assert sent.value.request.url.raw_path == b"/v1/runs/other%23old%3Fa%3D1%252f"


def _record(run_id: str, created_at: float, **changes: Any) -> dict[str, Any]:
    return {
        "run_id": run_id, "state": "open", "digest": "", "group_size": 2, "env": {}, "created_at": created_at, **changes
    }  # fmt: skip


def test_runs_reads_every_page_and_returns_the_newest_run_first() -> None:
    records = [_record(f"run-{number}", created_at=float(number)) for number in range(1003)]

    def pages(request: httpx.Request) -> httpx.Response:
        offset, limit = int(request.url.params["offset"]), int(request.url.params["limit"])
        return httpx.Response(200, json=records[offset : offset + limit])

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(pages))
        assert [record.run_id for record in client.runs()] == [f"run-{number}" for number in reversed(range(1003))]


@pytest.mark.parametrize(
    ("changes", "step", "left"),
    [
        ({"version": "1.3", "training_steps": 10}, 3, 14.0),
        ({"version": "1.2", "training_steps": 10}, 3, 14.0),  # the row of a step comes before its publication
        ({"version": "2.1", "training_steps": 10}, 2, 16.0),  # resumed: the row of step 3 is of an earlier trainer
        ({"version": "1.3", "training_steps": None}, 3, None),
        ({"version": "1.3", "training_steps": 3, "state": "finished"}, 3, 0.0),
        ({}, 1, None),
    ],
)
def test_progress_is_computed_from_the_record_and_the_newest_metrics(
    changes: dict[str, Any], step: int, left: float | None
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/metrics/trainer"):
            return httpx.Response(200, json=_record(RUN, 1.0, **changes))
        asked.append(request.url.params["after_step"])
        return httpx.Response(200, json=[
            {"source": "trainer", "step": number, "values": {
                "reward_mean": number / 4, "reward_parts": {"format": 1.0}, "tokens": 100,
                "seconds": {"wait": 1.5, "train": 0.5},
            }}
            for number in (1, 2, 3)
        ])  # fmt: skip

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(answer))
        progress = client.progress(RUN)
    assert (progress.step, progress.reward, progress.seconds_left) == (step, step / 4, left)
    assert (progress.tokens_per_second, progress.reward_parts) == (50.0, {"format": 1.0})
    assert asked == ["-1"]


def _event(number: int) -> bytes:
    return b'id: %d-0\nevent: take\ndata: {"id": "%d-0", "kind": "take", "fields": {}}\n\n' % (number, number)


def test_events_continue_after_the_last_received_event_when_the_connection_is_lost() -> None:
    asked: list[str | None] = []

    def stream(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))

        def lines() -> Iterator[bytes]:
            yield b": ping\n\n" + _event(len(asked))
            raise httpx.ReadError("reset by peer", request=request)

        return httpx.Response(200, content=lines())

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(stream))
        events = client.events(RUN, after="0-0")
        assert [next(events).id for _ in range(3)] == ["1-0", "2-0", "3-0"]
        events.close()
    assert asked == ["0-0", "1-0", "2-0"]


def test_events_continue_after_the_begin_of_the_stream_when_the_connection_is_lost_before_the_first_event() -> None:
    asked: list[str | None] = []

    def stream(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))

        def lines() -> Iterator[bytes]:
            yield b"id: 7-0\n\n" + (_event(8) if asked[1:] else b"")
            raise httpx.ReadError("reset by peer", request=request)

        return httpx.Response(200, content=lines())

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(stream))
        events = client.events(RUN)
        assert next(events).id == "8-0"
        events.close()
    assert asked == [None, "7-0"]


def test_events_may_have_characters_that_end_a_line_elsewhere() -> None:
    name = "a\u2028b\u2029c\x85d"
    fields = json.dumps({"id": "1-0", "kind": "env", "fields": {"name": name}}, ensure_ascii=False)
    sent = f"id: 1-0\r\ndata: {fields}\r\n\r\n".encode()

    def stream(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=iter([sent[at : at + 7] for at in range(0, len(sent), 7)]))

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(stream))
        events = client.events(RUN, after="0-0")
        assert next(events).fields == {"name": name}
        events.close()


def test_events_of_a_missing_run_raise_the_error_of_the_api() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"error": {"code": "run_missing", "message": "no run", "remedy": ""}})

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(refuse))
        events = client.events(RUN)
        with raises(ApiError, "run_missing"):
            next(events)


def test_error_of_a_route_at_the_root_has_its_code() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409, json=errors.not_atropos(RUN).detail())

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(refuse))
        with raises(ApiError, ErrorCode.NOT_ATROPOS) as refused:
            client.register_atropos(REGISTRATION)
    assert RUN in refused.value.message


def test_page_of_a_proxy_is_unexpected() -> None:
    def login(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, html="<html>log in</html>")

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(login))
        for ask in (lambda: client.get_run(RUN), lambda: next(client.events(RUN))):
            with raises(ApiError, ErrorCode.UNEXPECTED):
                ask()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"detail": "no"}', b'{"error": {"code": "run_missing"}}'])
def test_answer_without_a_code_is_unexpected(body: bytes) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, content=body)

    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(refuse))
        with raises(ApiError, ErrorCode.UNEXPECTED) as refused:
            client.get_run(RUN)
    assert refused.value.status == 400
