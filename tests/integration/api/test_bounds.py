"""Each verb that can make Redis hold more has a bound, because Redis at its maxmemory must not refuse all of them."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer
from tests.integration.atropos_queue.store_harness import StoreHarness as AtroposHarness
from tests.integration.atropos_queue.store_harness import scored
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer

from gristmill import GROUP_MEDIA_TYPE, MetricsRow
from gristmill_api.access.permissions import rules
from gristmill_api.errors import ApiProblem
from gristmill_api.http.body_limit import MOST_LISTS
from gristmill_api.store import envs, journal, keys, permits, runs
from gristmill_api.store.records import MOST_SETTINGS_BYTES

AT = f"/v1/runs/{RUN}"
LONG = "a" * (MOST_SETTINGS_BYTES + 1)


async def refusal(call: Any) -> tuple[str, int]:
    with pytest.raises(ApiProblem) as refused:
        await call
    return refused.value.code, refused.value.status


def row(step: int, length: int = 0, source: str = "env-1") -> MetricsRow:
    return MetricsRow(source=source, step=step, values={"word": "a" * length})


async def steps(harness: StoreHarness, source: str, run_id: str = RUN) -> list[int]:
    return [json.loads(row)["step"] for row in await harness.store.journal.rows(run_id, source, -1, 10_000)]


async def test_settings_have_a_bound(harness: StoreHarness) -> None:
    assert await refusal(harness.store.runs.create("other", {"a": LONG}, 2)) == ("too_large", 413)
    assert await refusal(harness.store.runs.take(RUN, trainer(a=LONG), [])) == ("too_large", 413)
    await harness.store.runs.create("other", {"a": LONG[:-100]}, 2)


async def test_runs_have_a_bound(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_RUNS", 2)
    await harness.store.runs.create("second", {}, 2, stack=None)
    assert await refusal(harness.store.runs.create("third", {}, 2)) == ("too_many_runs", 409)
    assert (await harness.store.runs.record(RUN)).state == "open", "a run that cannot open suspends no other"
    _, new = await harness.store.runs.create("second", {}, 2, stack=None)
    assert not new
    await harness.store.runs.close("second")
    await harness.store.runs.delete("second")
    await harness.store.runs.create("third", {}, 2, stack=None)


async def test_runs_that_no_trainer_took_make_room_for_new_ones(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_UNTAKEN_RUNS", 3)
    await harness.start()  # a taken run does not count
    store = harness.store.runs

    async def ids() -> list[str]:
        return [record.run_id for record in await store.all()]

    for run_id in ("a", "b", "c"):
        await store.create(run_id, {}, 2, stack=None)
    await harness.store.envs.register("a", "env-1", None)
    await store.close("b")
    await store.create("d", {}, 2, stack=None)
    assert await ids() == [RUN, "a", "c", "d"], "the oldest without a living environment is gone"
    _, new = await store.create("a", {}, 2, stack=None)
    assert not new, "joining a run needs no room"
    await store.create("e", {}, 2, stack=None)
    assert await ids() == [RUN, "a", "d", "e"]
    monkeypatch.setattr(runs, "MOST_UNTAKEN_RUNS", 2)
    await store.create("f", {}, 2, stack=None)
    assert await ids() == [RUN, "a", "f"], "a store with too many of an older version, too"
    await harness.store.envs.register("f", "env-1", None)
    await store.close(RUN)
    await store.delete(RUN)
    assert await refusal(store.create("g", {}, 2, stack=None)) == ("too_many_runs", 409), "the oldest run counts too"
    assert await ids() == ["a", "f"]


async def test_sources_of_metrics_have_a_bound(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_SOURCES", 2)
    for source in ("a", "b", "a"):
        await harness.store.journal.record_metrics(RUN, row(1, source=source))
    assert await refusal(harness.store.journal.record_metrics(RUN, row(1, source="c"))) == ("too_many_sources", 409)
    assert await harness.store.journal.sources(RUN) == ["a", "b"]


async def test_a_row_of_metrics_has_a_bound_and_its_event_a_smaller_one(harness: StoreHarness) -> None:
    await harness.store.journal.record_metrics(RUN, row(1, journal.MOST_ROW_BYTES - 100))
    assert await refusal(harness.store.journal.record_metrics(RUN, row(2, journal.MOST_ROW_BYTES))) == (
        "too_large",
        413,
    )
    await harness.store.journal.record_metrics(RUN, row(3, journal.MOST_EVENT_BYTES - 100))
    events = [event for event in await harness.store.journal.events(RUN, "0-0", 9) if event.kind == "metrics"]
    assert [(event.fields["step"], "values" in event.fields) for event in events] == [("1", False), ("3", True)]
    assert await steps(harness, "env-1") == [1, 3]


async def kept(harness: StoreHarness) -> int:
    """Returns the bytes of all rows as Redis stores them. They must equal the bytes that Redis counts."""
    found = 0
    for name in await harness.redis.keys("gm:*:metrics:*"):
        rows: Any = await harness.redis.zrange(name, 0, -1)
        size = sum(len(text) + 100 for text in rows)
        assert int(await harness.redis.zscore(keys.JOURNALS, name) or 0) == size
        found += size
    assert int(await harness.redis.get(keys.JOURNAL) or 0) == found
    return found


async def test_the_rows_of_all_runs_have_a_bound(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT_BYTES", 10_000)
    measure = harness.store.journal.record_metrics
    await harness.store.runs.create("other", {}, 2, stack=None)
    for step in range(5):
        await measure("other", row(step, 100))
        await measure(RUN, row(step, 100, "trainer"))
        await kept(harness)
    for step in range(100):
        await measure(RUN, row(step, 1000))
        assert await kept(harness) <= 10_000
    assert await steps(harness, "env-1", "other") == await steps(harness, "trainer") == [0, 1, 2, 3, 4], "it has few"
    left = await steps(harness, "env-1")
    assert left == list(range(100 - len(left), 100)), "the oldest rows of the source with the most bytes go"
    assert len(left) >= 5
    await measure(RUN, row(99, 500))
    assert await steps(harness, "env-1") == left
    assert await kept(harness) == await kept(harness)
    monkeypatch.setattr(journal, "KEPT_ROWS", 3)
    await measure(RUN, row(100))
    assert await steps(harness, "env-1") == [98, 99, 100]
    await kept(harness)
    for run_id in (RUN, "other"):
        await harness.store.runs.close(run_id)
        await harness.store.runs.delete(run_id)
    assert await kept(harness) == 0
    assert await harness.redis.exists(keys.JOURNALS) == 0


async def test_the_examples_of_all_runs_have_a_bound(harness: StoreHarness) -> None:
    others = {f"gm:{{other}}:example:g{number}": number for number in range(256)}
    await harness.redis.mset(dict.fromkeys(others, "bytes"))
    await harness.redis.zadd("gm:examples", others)
    incarnation = await harness.start()
    ids = await harness.fill(2)
    await harness.lease(incarnation, "b1", 2)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await harness.redis.zrange("gm:examples", 0, -1) == [
        *(name.encode() for name in list(others)[2:]), *(f"{PREFIX}example:{group_id}".encode() for group_id in ids)
    ]  # fmt: skip
    assert await harness.redis.exists(*others) == 254
    await harness.store.runs.close(RUN)
    await harness.store.runs.delete(RUN)
    assert await harness.redis.zcard("gm:examples") == 254


async def test_environments_have_a_bound_and_dead_ones_make_room(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "MOST_ENVS", 2)
    register = harness.store.envs.register
    for name in ("a", "b", "a"):
        await register(RUN, name, 1.0, None)
    assert await refusal(register(RUN, "c", None, None)) == ("too_many_envs", 409)
    await harness.redis.zadd(PREFIX + "envs", {"b": 1})
    await register(RUN, "c", None, None)
    assert sorted(env.env_id for env in await harness.store.envs.all(RUN)) == ["a", "c"]
    assert await harness.redis.exists(f"{PREFIX}env:b") == 0


async def test_drop_reasons_have_a_bound(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "MOST_REASONS", 2)
    await harness.start(groups=8)
    ids = await harness.ask("env-1", 6)
    for group_id, reason in zip(ids, ["a", "b", "c", "a", "d", "b"], strict=True):
        assert await harness.store.permits.return_permit(RUN, "env-1", group_id, reason)
    assert (await harness.store.runs.status(RUN)).dropped == {"a": 2, "b": 2, "other": 2}
    assert not await harness.store.permits.return_permit(RUN, "env-1", ids[2], "c"), "repeated"


async def test_outstanding_permits_have_a_bound(harness: StoreHarness) -> None:
    incarnation = (await harness.store.runs.take(RUN, trainer(staleness=2**40, steps=2**41), [])).incarnation
    await harness.store.runs.record_version(RUN, incarnation, 0)
    given = sum([len(await harness.ask("env-1", 8192)) for _ in range(9)])
    assert given == 65_536


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url, API_MAX_WAIT_S="0.5") as server:
        yield server


@pytest.fixture
async def plain(redis_url: str, api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{AT}/permits/renew", {"holder": "env-1", "group_ids": ["g"] * 65_537}),
        (f"{AT}/take", {"trainer": trainer(), "covered": ["g"] * (2**17 + 1)}),
        *((f"{AT}/{verb}", {"incarnation": 1, "batch_ids": ["b"] * 65_537}) for verb in ("extend", "ack", "nack")),
        ("/scored_data_list", [{"tokens": [[1]], "masks": [[1]], "scores": [1.0]}] * 16_385),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_lists_in_bodies_have_a_bound(plain: httpx.AsyncClient, path: str, body: Any) -> None:
    assert (await plain.post(path, json=body)).status_code == 422
    shorter = body[:2] if isinstance(body, list) else {
        name: value[:-1] if isinstance(value, list) else value for name, value in body.items()
    }  # fmt: skip
    assert (await plain.post(path, json=shorter)).status_code == (200 if isinstance(body, list) else 404)


NESTED = b'{"x": [%b]}' % b",".join([b"[]"] * MOST_LISTS)


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/v1/runs", {}, NESTED, 413),
        ("POST", f"{AT}/permits", {}, NESTED, 413),
        ("POST", "/scored_data", {}, NESTED, 413),
        ("POST", "/scored_data", {"Content-Encoding": "gzip"}, gzip.compress(NESTED), 413),
        ("PUT", f"{AT}/groups/g1?holder=env-1", {"Content-Type": GROUP_MEDIA_TYPE}, NESTED, 400),
        ("POST", "/v1/runs", {}, NESTED[: MOST_LISTS // 2] + b"]}", 422),
    ],
    ids=["in FastAPI", "fast route", "atropos", "gzip", "group", "fewer"],
)
async def test_lists_of_a_json_body_have_a_bound(
    plain: httpx.AsyncClient, method: str, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    headers = {"Content-Type": "application/json", **headers}
    assert (await plain.request(method, path, content=body, headers=headers)).status_code == status


WORDS = {f"m{number}": "a" * 256 for number in range(256)}
GROWING: dict[str, Any] = {
    "POST /v1/runs": {"run_id": "run-{n}", "env": {"a": LONG * 8}, "group_size": 2, "stack": None},
    "POST /v1/runs/{}/take": {"trainer": trainer(a=LONG * 8)},
    "POST /v1/runs/{}/version": {"incarnation": 1, "step": "{n}"},
    "POST /v1/runs/{}/permits": {"holder": "env-{n}", "count": 1024},
    "POST /v1/runs/{}/permits/renew": {"holder": "env-1", "group_ids": ["g{n}"] * 1000},
    "POST /v1/runs/{}/permits/return": {"holder": "env-1", "group_id": "g{n}", "reason": "reason_{n}"},
    "POST /v1/runs/{}/permits/abandon": {"holder": "env-{n}"},
    "POST /v1/runs/{}/envs": {"env_id": "env-{n}"},
    "POST /v1/runs/{}/envs/{}/heartbeat": {},
    "POST /v1/runs/{}/claims": {"name": "work-{n}", "holder": "env-{n}", "ttl": 60},
    "POST /v1/runs/{}/metrics": {"source": "env-{n}", "step": "{n}", "values": WORDS},
    "POST /v1/runs/{}/lease": {"incarnation": 1, "batch_id": "b{n}", "groups": 1},
    "POST /v1/runs/{}/extend": {"incarnation": 1, "batch_ids": ["b{n}"] * 1000},
    "POST /v1/runs/{}/ack": {"incarnation": 1, "batch_ids": ["b{n}"] * 1000},
    "POST /v1/runs/{}/nack": {"incarnation": 1, "batch_ids": ["b{n}"] * 1000},
    "POST /v1/runs/{}/finish": {"incarnation": 1},
    "POST /v1/runs/{}/dead/replay": {"group_ids": ["g{n}"] * 1000},
    "POST /v1/runs/{}/dead/purge": {"group_ids": ["g{n}"] * 1000},
    "POST /v1/runs/{}/close": {},
    "POST /register": {
        "wandb_group": LONG * 8, "wandb_project": "p", "batch_size": 2, "max_token_len": 9, "checkpoint_dir": "",
        "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 9,
    },
    "POST /register-env": {"max_token_length": 9, "desired_name": LONG * 8, "weight": 1.0, "group_size": 2},
    "POST /disconnect-env": {"env_id": "{n}"},
    "POST /scored_data": {"tokens": [[1] * 300_000], "masks": [[1] * 300_000], "scores": [1.0], "env_id": None},
    "POST /scored_data_list": [{"tokens": [[1] * 300_000], "masks": [[1] * 300_000], "scores": [1.0]}],
}  # fmt: skip
"""By rule of the access table: the largest request that a client may send. {n} is another number in each call."""


def filled(value: Any, number: int) -> Any:
    """Returns the body with its {n} replaced. A text that is only {n} becomes a number."""
    return json.loads(json.dumps(value).replace('"{n}"', str(number)).replace("{n}", str(number)))


async def test_no_verb_makes_redis_grow_beyond_its_maxmemory(
    redis: Redis, api: ApiServer, plain: httpx.AsyncClient
) -> None:
    written = {f"{method} {path}" for method, path, _ in rules() if method in ("POST", "PUT")}
    assert written == {*GROWING, "PUT /v1/runs/{}/groups/{}"}
    opened = {"run_id": RUN, "env": {}, "group_size": 2}
    assert (await plain.post("/v1/runs", json=opened)).is_success
    assert (await plain.post(f"{AT}/take", json={"trainer": trainer(groups=64, staleness=9)})).is_success
    assert (await plain.post(f"{AT}/version", json={"incarnation": 1, "step": 0})).is_success
    group = make_group("g00000000", RUN, lengths=((3, 60_000),) * 2).encode()
    before = (await redis.info("memory"))["used_memory"]
    await redis.config_set("maxmemory", before - 100_000)
    statuses: dict[str, set[int]] = {}
    try:
        async with asyncio.timeout(300):
            for number in range(12):
                for rule, body in GROWING.items():
                    path = rule.partition(" ")[2].replace("{}", RUN, 1).replace("{}", "env-1")
                    if path.endswith(("/close", "/finish")) and number < 11:
                        continue
                    if path in ("/scored_data", "/scored_data_list") and number > 0:
                        continue  # The requests wait until there is room.
                    answer = await plain.post(path, json=filled(body, number))
                    statuses.setdefault(rule, set()).add(answer.status_code)
                path = f"{AT}/groups/g00000000?holder=env-1"
                answer = await plain.put(path, content=group, headers={"Content-Type": GROUP_MEDIA_TYPE})
                statuses.setdefault("PUT", set()).add(answer.status_code)
        after = (await redis.info("memory"))["used_memory"]
    finally:
        await redis.config_set("maxmemory", 0)
    assert all(status < 500 or status == 503 for found in statuses.values() for status in found), statuses
    assert after - before < 1_000_000, statuses


async def test_redis_busy_with_a_script_gives_503(redis: Redis, plain: httpx.AsyncClient) -> None:
    threshold = (await redis.config_get("busy-reply-threshold"))["busy-reply-threshold"]
    await redis.config_set("busy-reply-threshold", 1)
    spinning = asyncio.ensure_future(redis.eval("while true do end", 0))
    try:
        async with asyncio.timeout(30):
            while (answer := await plain.get(AT)).status_code == 404:  # noqa: ASYNC110  until the script runs
                await asyncio.sleep(0.01)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(answer.headers["Retry-After"]) >= 1
    finally:
        await redis.script_kill()
        with pytest.raises(RedisError):
            await spinning
        await redis.config_set("busy-reply-threshold", threshold or 5000)


async def test_only_trainer_and_admin_may_write_metrics_of_source_trainer(
    redis_url: str, shared_redis: RedisServer, tmp_path: Path
) -> None:
    for role in ("env", "trainer", "admin"):
        (tmp_path / role).write_text(role * 20)
        (tmp_path / role).chmod(0o600)
    with ApiServer(shared_redis.api_url, API_AUTH="token", API_TOKENS_DIR=str(tmp_path)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:

            async def post(role: str, path: str, body: dict[str, Any]) -> int:
                headers = {"Authorization": f"Bearer {role * 20}"}
                return (await client.post(path, json=body, headers=headers)).status_code

            assert await post("env", "/v1/runs", {"run_id": RUN, "env": {}, "group_size": 2}) == 201
            measured = {"source": "trainer", "step": 1, "values": {"loss": 1.0}}
            statuses = {role: await post(role, f"{AT}/metrics", measured) for role in ("env", "trainer", "admin")}
            assert statuses == {"env": 403, "trainer": 204, "admin": 204}
            assert await post("env", f"{AT}/metrics", {**measured, "source": "env-1"}) == 204


WHOLE = {"wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 64, "checkpoint_dir": "d",
         "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10}  # fmt: skip
ENV = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 4}
TOO_LARGE = (2**16 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30)


@pytest.mark.parametrize(
    ("path", "body", "name", "values"),
    [
        ("/register", WHOLE, "batch_size", TOO_LARGE),
        *(("/register", WHOLE, name, TOO_LARGE[1:]) for name in WHOLE if isinstance(WHOLE[name], int)),
        ("/register-env", ENV, "group_size", (-1, 0, *TOO_LARGE)),
        ("/register-env", ENV, "max_token_length", TOO_LARGE[1:]),
        *(("/register-env", ENV, name, (1.7e308, -1e7)) for name in ("weight", "min_batch_allocation")),
        ("/disconnect-env", {"env_id": 0}, "env_id", TOO_LARGE[1:]),
        *((f"{AT}/take", {"trainer": trainer()}, name, TOO_LARGE[1:]) for name in trainer()),
        (f"{AT}/take", {"trainer": trainer()}, "batch_size", (2 * 2**16 + 2,)),
    ],
)
async def test_numbers_that_scripts_count_with_are_refused_at_the_edge(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], name: str, values: tuple[float, ...]
) -> None:
    await http.post("/v1/runs", json={"run_id": RUN, "env": {}, "group_size": 2})
    for value in values:
        changed = {"trainer": {**body["trainer"], name: value}} if "trainer" in body else {**body, name: value}
        assert (await http.post(path, json=changed)).status_code == 422, value
    assert (await http.post(path, json=body)).status_code == 200


async def test_the_costliest_sums_leave_redis_free_for_other_calls(redis: Redis) -> None:
    """While one script takes more than five seconds, Redis refuses all other calls as BUSY."""

    async def others() -> None:
        while True:
            await redis.ping()
            await asyncio.sleep(0.05)

    harness = AtroposHarness(redis)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(others())
        await harness.start(batch_size=65_521)
        large = await harness.env(group_size=65_536)
        # One piece more never makes a sum: more and more sums would be tried, for each of the pieces.
        held = await harness.submit(*(scored(1000, large, b"x") for _ in range(65)))
        assert held[:3] == [1000, 2000, 3000]
        assert max(size or 0 for size in held) <= 4000, "the oldest piece leaves a buffer with too many sums"
        # No size divides the largest, so no pack is complete: only a search among all sums finds the batch.
        await harness.submit(*(scored(size, None, b"x") for size in range(1003, 3003, 2)), scored(4099, None, b"x"))
        await harness.lend("b1")
        watch.cancel()
