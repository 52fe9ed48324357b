"""Delivery over HTTP: batches that are sent, and batches that are not; a full, unreachable or killed store. Nothing is
lost."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.integration.atropos.stock_trainer import StockTrainer
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer


def group(number: int, size: int, length: int = 4, env: int | None = None) -> dict[str, Any]:
    rows = [[number, *range(1, length)] for _ in range(size)]
    return {"tokens": rows, "masks": rows, "scores": [1.0] * size, "env_id": env}


def numbers(batch: list[dict[str, Any]] | None) -> list[int] | None:
    return None if batch is None else [each["tokens"][0][0] for each in batch]


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/scored_data", json=body, timeout=60)


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that a test may kill."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def running(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url) as server:
        yield server


@pytest.fixture
def api(redis_url: str, running: ApiServer) -> ApiServer:
    """An API over an empty Redis."""
    return running


def seen(url: str) -> list[Any]:
    """The requests that clients may send."""
    own = httpx.request("GET", f"{url}/status-env", json={"env_id": 0})
    paths = ("/status", "/info", "/wandb_info", "/latest_example")
    return [own.json(), *(httpx.get(url + path).json() for path in paths)]


def trainer(url: str, batch_size: int) -> StockTrainer:
    found = StockTrainer(url, batch_size, 100)
    found.register()
    assert found.ask() is None
    return found


def hang_up_in_the_middle(port: int) -> None:
    """Asks for a batch, reads a little of it and breaks the connection."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /batch HTTP/1.1\r\nHost: api\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_batch_of_a_disconnected_client_is_delivered_again_and_counts_once(api: ApiServer) -> None:
    draws = trainer(api.url, 8)
    for number in range(8):  # 3 MB each: more than the sockets' buffers hold
        post(api.url, group(number, 2, length=300_000)).raise_for_status()
    for _ in range(2):
        hang_up_in_the_middle(api.port)
        deadline = time.monotonic() + 20
        while draws.status() != {"current_step": 0, "queue_size": 8}:
            assert time.monotonic() < deadline, draws.status()
            time.sleep(0.02)
    assert numbers(draws.draw()) == [0, 1, 2, 3]
    assert numbers(draws.draw()) == [4, 5, 6, 7]
    assert draws.status() == {"current_step": 2, "queue_size": 0}


def test_status_has_the_new_step_as_soon_as_a_batch_is_delivered(api: ApiServer) -> None:
    draws = trainer(api.url, 1)
    httpx.post(f"{api.url}/scored_data_list", json=[group(number, 1) for number in range(100)]).raise_for_status()
    for step in range(100):
        assert numbers(draws.ask()) == [step]
        assert draws.status()["current_step"] == step + 1


def test_submit_to_a_full_store_waits_and_then_gets_503(redis_url: str) -> None:
    with ApiServer(redis_url, API_MAX_RUN_GROUPS="2", API_MAX_WAIT_S="5") as api:
        draws = trainer(api.url, 2)
        for number in range(2):
            post(api.url, group(number, 2)).raise_for_status()
        started = time.monotonic()
        refused = post(api.url, group(2, 2))
        assert time.monotonic() - started > 4.9
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["code"] == "store_full"
        assert all(value in refused.json()["detail"] for value in ("'default'", " 2 ", "API_MAX_RUN_GROUPS"))
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(post(api.url, group(3, 2))))
        waiting.start()
        assert numbers(draws.draw()) == [0]
        waiting.join()
        assert [answer.status_code for answer in answers] == [200]
        assert [numbers(draws.draw()), numbers(draws.draw()), draws.ask()] == [[1], [3], None]


@pytest.mark.long
def test_redis_at_its_maxmemory_can_be_drained_and_filled_again() -> None:
    with (
        RedisServer("--maxmemory", "16mb", "--maxmemory-policy", "noeviction") as redis,
        ApiServer(redis.url, API_MAX_WAIT_S="0.5") as api,
    ):
        draws = trainer(api.url, 1)
        stored = 0
        while (answer := post(api.url, group(stored, 1, length=100_000))).status_code == 200:
            stored += 1
        assert answer.status_code == 503
        assert answer.json()["code"] == "store_full"
        assert "maxmemory" in answer.json()["detail"]
        assert stored > 3
        assert [numbers(draws.draw()) for _ in range(stored)] == [[number] for number in range(stored)]
        assert post(api.url, group(stored, 1)).status_code == 200


def test_short_redis_outage_is_invisible_to_atropos_clients(own_redis: RedisServer) -> None:
    with ApiServer(own_redis.url) as api:
        draws = trainer(api.url, 2)
        post(api.url, group(0, 2)).raise_for_status()
        own_redis.kill()
        answers: dict[str, Any] = {}

        def ask(name: str, call: Any) -> threading.Thread:
            thread = threading.Thread(target=lambda: answers.update({name: call()}))
            thread.start()
            return thread

        threads = [
            ask("post", lambda: post(api.url, group(1, 2)).json()),
            ask("status", lambda: httpx.get(f"{api.url}/status", timeout=60).json()),
            ask("info", lambda: httpx.get(f"{api.url}/info", timeout=60).json()),
        ]
        time.sleep(1)
        own_redis.start()
        for thread in threads:
            thread.join()
        assert answers["post"] == {"status": "received"}
        assert answers["info"] == {"batch_size": 2, "max_token_len": 4096}
        assert answers["status"]["current_step"] == 0
        assert [numbers(draws.draw()), numbers(draws.draw()), draws.ask()] == [[0], [1], None]


def test_long_redis_outage_gives_503(own_redis: RedisServer) -> None:
    with ApiServer(own_redis.url, API_MAX_WAIT_S="0.5") as api:
        own_redis.kill()
        for answer in (post(api.url, group(0, 1)), httpx.get(f"{api.url}/batch"), httpx.get(f"{api.url}/status")):
            assert answer.status_code == 503
            assert set(answer.json()) == {"detail", "code"}
            assert answer.json()["code"] == "store_unavailable"


def test_kills_of_redis_and_the_api_lose_and_repeat_no_group(own_redis: RedisServer) -> None:
    """Every group that the API acknowledged is delivered exactly once; numbers, steps and buffers continue."""
    with ApiServer(own_redis.url) as api:
        trainer(api.url, 8)
        env = {"max_token_length": 512, "desired_name": "e", "weight": 1.0, "group_size": 4}
        assert httpx.post(f"{api.url}/register-env", json=env).json()["env_id"] == 0
        delivered: list[int] = []
        for turn, victims in enumerate(((api,), (own_redis, api), (own_redis,))):
            first = turn * 3
            assert post(api.url, group(first, 4, env=0)).json() == {"status": "received"}
            assert post(api.url, group(first + 1, 3, env=0)).json()["status"] == "buffered"
            before = seen(api.url)
            for victim in victims:
                victim.kill()
                victim.start()
            assert seen(api.url) == before
            assert post(api.url, group(first + 2, 1, env=0)).json() == {"status": "buffered", "buffer_size": 0}
            draws = StockTrainer(api.url, 8, 100)
            delivered += numbers(draws.draw()) or []
            assert draws.status() == {"current_step": turn + 1, "queue_size": 0}
        assert delivered == list(range(9))


def test_atropos_run_is_visible_under_v1(api: ApiServer) -> None:
    trainer(api.url, 2)
    post(api.url, group(5, 2)).raise_for_status()
    run = httpx.get(f"{api.url}/v1/runs/default").json()
    assert (run["protocol"], run["stack"], run["state"]) == ("atropos", None, "open")
    assert httpx.get(f"{api.url}/v1/runs/default/status").json()["sequences"]["ready"] == 2


def test_atropos_run_variable_names_the_run(redis_url: str) -> None:
    with ApiServer(redis_url, ATROPOS_RUN="mine") as api:
        trainer(api.url, 2)
        assert [run["run_id"] for run in httpx.get(f"{api.url}/v1/runs").json()] == ["mine"]


def test_closed_run_refuses_submits_and_registrations(api: ApiServer) -> None:
    draws = trainer(api.url, 2)
    httpx.post(f"{api.url}/v1/runs/default/close").raise_for_status()
    answer = post(api.url, group(0, 2))
    assert answer.status_code == 409
    assert answer.json()["code"] == "finished"
    with pytest.raises(httpx.HTTPStatusError):
        draws.register()


def test_run_of_v1_refuses_submits_at_the_root(api: ApiServer) -> None:
    body = {"run_id": "default", "env": {}, "group_size": 2}
    httpx.post(f"{api.url}/v1/runs", json=body).raise_for_status()
    answer = post(api.url, group(0, 2))
    assert answer.status_code == 409
    assert answer.json()["code"] == "not_atropos"
    assert "ATROPOS_RUN" in answer.json()["detail"]


def test_body_above_the_limit_gets_413(redis_url: str) -> None:
    with ApiServer(redis_url, API_MAX_BODY_BYTES="1000") as api:
        answer = post(api.url, group(0, 1, length=5000))
        assert answer.status_code == 413
        assert answer.json()["code"] == "too_large"
        assert all(value in answer.json()["detail"] for value in (" 1000 ", "API_MAX_BODY_BYTES"))
