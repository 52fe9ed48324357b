"""The network fails between client and API and between API and Redis. The run continues without help. Nothing is lost,
stored twice or trained twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from tests.support.api_server import ApiServer
from tests.support.fault_proxy import Direction, Fault, FaultProxy, Way
from tests.support.grids import part_of_grid
from tests.support.ledger import Ledger
from tests.support.redis_server import RedisServer, admin_url
from tests.support.scripted_env import serve
from tests.support.scripted_run import ENV, GROUP_SIZE, expected_group, plan
from tests.support.scripted_trainer import Checkpoint, train

from gristmill import Client, PolicyVersion

RUN = "run-1"
STEPS, GROUPS = 12, 48


@dataclass
class Chain:
    """client -> `before_api` -> API -> `before_redis` -> Redis."""

    before_api: FaultProxy
    before_redis: FaultProxy
    api: ApiServer
    seen: list[int] = field(default_factory=list)
    """Status of every answer that a client got."""

    def link(self, name: str) -> FaultProxy:
        return self.before_api if name == "client-api" else self.before_redis

    def client(self) -> Client:
        """The SDK's client through the proxy, with short timeouts."""
        client = Client(f"http://127.0.0.1:{self.before_api.port}", patience=30, timeout=1)

        async def keep(answer: httpx.Response) -> None:
            self.seen.append(answer.status_code)
            answer.headers.pop("Retry-After", None)

        client._http.event_hooks["response"].append(keep)
        return client

    def defects(self) -> int:
        """Returns the number of 500 responses of the API, including those that no client received."""
        lines = httpx.get(f"{self.api.url}/metrics").raise_for_status().text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if 'status="500"' in line and "_total" in line)


@pytest.fixture(scope="module")
def one_chain() -> Iterator[tuple[RedisServer, Chain]]:
    with RedisServer() as server, FaultProxy(server.port) as before_redis:
        # The API abandons a silent Redis after 0.5 s here, and after 5 s by default.
        url = f"{admin_url(before_redis.port)}?socket_timeout=0.5"
        with ApiServer(url, API_PERMIT_TTL_S="6") as api, FaultProxy(api.port) as before_api:
            yield server, Chain(before_api, before_redis, api)


@pytest.fixture
def chain(one_chain: tuple[RedisServer, Chain]) -> Iterator[Chain]:
    """A working chain before an empty Redis. No part of it is restarted after a fault."""
    server, chain = one_chain
    with redis.Redis.from_url(server.url) as admin:
        admin.flushall()
    chain.seen.clear()
    yield chain
    chain.before_api.heal()
    chain.before_redis.heal()
    print(chain.api.log()[-8000:])  # noqa: T201  pytest shows it where a test fails


LASTING = {
    "latency": Fault(request=Way(delay_s=0.02), answer=Way(delay_s=0.02)),
    "slicing": Fault(request=Way(slice=7), answer=Way(slice=7)),
    "resets now and then": Fault(answer=Way(reset_after=20_000)),
}
"""Faults that slow the work down without stopping it. They last for the whole run."""

PASSING = {
    "requests reset": Fault(request=Way(reset_after=150), times=6),
    "answers lost": Fault(answer=Way(reset_after=0), times=6),
    "requests swallowed": Fault(request=Way(swallow=True)),
    "answers swallowed": Fault(answer=Way(swallow=True)),
    "requests come late": Fault(request=Way(hold=True)),
    "answers come late": Fault(answer=Way(hold=True)),
    "refused": Fault(refuse=True),
}
"""Faults that let nothing through. Each begins in the middle of the run, and ends after a reset or after STRIKE_S."""
STRIKE_S = 1.4


@pytest.mark.parametrize(("link", "fault"), part_of_grid(["client-api", "api-redis"], [*LASTING, *PASSING], every=4))
async def test_run_finishes_under_every_network_fault(chain: Chain, tmp_path: Path, link: str, fault: str) -> None:
    proxy = chain.link(link)
    before = chain.defects()
    acknowledged: list[str] = []

    def acknowledge(group_id: str) -> None:
        acknowledged.append(group_id)
        if fault in PASSING and len(acknowledged) == 20:  # while groups are in all states
            proxy.set(PASSING[fault])
            asyncio.get_running_loop().call_later(STRIKE_S, proxy.heal)

    async with chain.client() as env, chain.client() as trainer:
        await env.create_run(RUN, ENV, GROUP_SIZE)
        if fault in LASTING:
            proxy.set(LASTING[fault])
        async with asyncio.TaskGroup() as work:
            for holder in ("env-1", "env-2"):
                work.create_task(serve(env, RUN, holder, acknowledge))
            work.create_task(train(trainer, RUN, tmp_path / "checkpoint", STEPS))
        proxy.heal()
        audit = await env.audit(RUN)

    ledger = Ledger.of(acknowledged, Checkpoint.load(tmp_path / "checkpoint").trained, audit)
    assert ledger.problems() == {}
    assert len(ledger.lineage) == GROUPS
    assert sorted(ledger.lineage) == audit.trained
    assert [audit.ready, audit.leased, audit.outstanding] == [[], [], []]
    # 410: a permit expired before its submit arrived, and the row was issued again.
    assert set(chain.seen) <= {200, 201, 204, 410, 503}
    assert chain.defects() == before, chain.api.log()[-4000:]


OFFSETS: list[Callable[[int], int]] = [
    lambda _: 0,
    lambda _: 1,
    lambda _: 9,
    lambda size: size // 3,
    lambda size: 2 * size // 3,
    lambda size: size - 1,
    lambda size: size,
]
"""Byte offsets at which to cut a message of this size: before its first byte, in its head, in its body, before its last
byte, and after it."""


def cut(direction: Direction, after: int) -> Fault:
    way = Way(reset_after=after)
    return Fault(request=way, times=1) if direction == "request" else Fault(answer=way, times=1)


@pytest.mark.parametrize(
    ("link", "direction"), part_of_grid(["client-api", "api-redis"], ["request", "answer"], every=2)
)
async def test_run_continues_after_a_connection_reset_at_any_byte(
    chain: Chain, link: str, direction: Direction
) -> None:
    """Cuts every verb of a run at each offset. A client never takes a lease that was cut short for a short batch."""
    proxy = chain.link(link)
    before = chain.defects()
    ids: list[str] = []
    step = 0
    hits: list[int] = []

    async with chain.client() as client:
        await client.create_run(RUN, ENV, GROUP_SIZE)
        incarnation, _ = await client.take(RUN, plan(1000, groups_per_step=3, staleness=100), [])
        await client.record_version(RUN, PolicyVersion(incarnation, 0))

        async def cycle(cuts: dict[str, Fault]) -> dict[str, int]:
            """Sends three groups through the store, with faults by verb. Returns the verbs' bytes."""
            nonlocal step
            step += 1
            sizes: dict[str, int] = {}

            async def verb(name: str, call: Coroutine[Any, Any, Any]) -> Any:
                fault = cuts.get(name)
                proxy.set(fault or Fault())
                answer = await call
                hits.append(proxy.resets)
                sizes[name] = proxy.passed(direction)
                return answer

            grant = await verb("permits", client.permits(RUN, "env-1", 3, wait=0))
            mine = [permit.group_id for permit in grant.permits]
            assert len(mine) == 3
            await verb("renew", client.renew_permits(RUN, "env-1", mine))
            for group_id in mine:
                await verb("submit", client.submit(expected_group(RUN, group_id), "env-1"))
            batch_id = f"b{step}"
            batch = await verb("lease", client.lease(RUN, incarnation, batch_id, 3, wait=1))
            assert [group.encode() for group in batch] == [expected_group(RUN, group_id).encode() for group_id in mine]
            assert await verb("extend", client.extend(RUN, incarnation, [batch_id])) == []
            await verb("ack", client.ack(RUN, incarnation, [batch_id]))
            await verb("version", client.record_version(RUN, PolicyVersion(incarnation, step)))
            ids.extend(mine)
            return sizes

        sizes = await cycle({})
        for offset in OFFSETS:
            await cycle({name: cut(direction, offset(size)) for name, size in sizes.items()})
        proxy.heal()
        await client.abandon_permits(RUN, "env-1")  # permits whose grant was lost
        audit = await client.audit(RUN)

    assert audit.trained == sorted(ids)
    assert [audit.ready, audit.leased, audit.dead, audit.dropped, audit.outstanding] == [[], [], [], {}, []]
    assert len(set(ids)) == len(ids) == 3 * step
    # Behind the API, the listening connection receives the bytes at some offsets; a verb may end before them.
    assert sum(hits) > 0.7 * (len(hits) - len(sizes) - 2), hits
    assert set(chain.seen) <= {200, 201, 204, 503}
    assert chain.defects() == before, chain.api.log()[-4000:]


@pytest.mark.parametrize("link", ["client-api", "api-redis"])
async def test_silent_network_gives_503_or_a_timeout_and_recovers_at_once(chain: Chain, link: str) -> None:
    # If the API itself waits in vain, it answers after some time.
    patience = 1 if link == "client-api" else 10
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{chain.before_api.port}", timeout=patience) as http:
        assert (await http.get("/readyz", timeout=30)).status_code == 200
        with chain.link(link).under(Fault(answer=Way(swallow=True))):
            for path in ("/readyz", "/v1/runs"):
                if link == "api-redis":
                    assert (await http.get(path)).status_code == 503
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        await http.get(path)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{chain.before_api.port}", timeout=30) as http:
            for path in ("/readyz", "/v1/runs"):
                assert (await http.get(path)).status_code == 200
