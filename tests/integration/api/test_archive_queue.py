"""Groups that wait for the archiver."""

from __future__ import annotations

import pytest
from tests.integration.api.bench import PREFIX, RUN, Bench, trainer

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys


async def test_archived_groups_leave_and_only_they(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(), archive=True)
    incarnation = await bench.start()
    a, b, c, d = await bench.fill(4)
    await bench.lease(incarnation, "b1", 3)
    await bench.store.queue.ack(RUN, incarnation, ["b1"])
    assert await bench.store.archive.head(RUN, 9) == [a, b, c]
    assert await bench.store.queue.payload(RUN, b) is not None
    await bench.store.archive.archived(RUN, [a, d, "g00000099"])
    assert await bench.store.archive.head(RUN, 9) == [b, c]
    await bench.store.archive.archived(RUN, [a])
    status = await bench.store.runs.status(RUN)
    assert (status.archiving, status.trained, status.ready, status.bytes) == (2, 3, 1, 300)
    assert [await bench.store.queue.payload(RUN, name) is None for name in (a, b, c, d)] == [True, False, False, False]
    assert await bench.store.scripts.run("archived", PREFIX, "1", b, a, d) == [b"OK", 1]
    assert (await bench.store.runs.status(RUN)).archive_lost == 1
    await bench.store.archive.archived(RUN, [a], lost=True)
    assert (await bench.store.runs.status(RUN)).archive_lost == 1, "it was archived before, so it is not lost"
    with pytest.raises(ApiProblem):
        await bench.store.archive.archived("nowhere", [a])
    await bench.store.runs.close(RUN)
    with pytest.raises(ApiProblem) as refused:
        await bench.store.runs.delete(RUN)
    assert refused.value.status == 409
    assert "1 " in refused.value.message
    await bench.store.archive.archived(RUN, [c])
    await bench.store.runs.delete(RUN)
    assert int(await bench.redis.get(keys.BYTES) or 0) == 0
    assert await bench.redis.keys(PREFIX + "*") == [f"{PREFIX}fence".encode()]


async def test_a_resumed_trainers_groups_are_archived_too(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(), archive=True)
    incarnation = await bench.start()
    a, b, _, _ = await bench.fill(4)
    await bench.lease(incarnation, "b1", 1)
    await bench.store.runs.take(RUN, trainer(), [a, b])
    assert await bench.store.archive.head(RUN, 9) == [a, b]
