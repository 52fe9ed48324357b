"""Groups as zstd over HTTP: the same groups in half the bytes, and no frame does harm."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from tests.integration.api.store_harness import RUN
from tests.integration.api.test_http import AT, code, put, start
from tests.support.api_server import ApiServer
from tests.support.groups import make_group

from gristmill import Client, TrajectoryGroup, compression
from gristmill_api.store import keys

LENGTHS = [(3, 60), (3, 50)]


@pytest.fixture
async def zipping(redis_url: str, shared_api: ApiServer) -> AsyncIterator[Client]:
    async with Client(shared_api.url, patience=10, compress=True) as client:
        yield client


async def put_zstd(http: httpx.AsyncClient, group_id: str, body: bytes) -> httpx.Response:
    return await put(http, group_id, body, **{"Content-Encoding": "zstd"})


def unsized(content: bytes) -> bytes:
    """Compresses as a client that compresses while it sends: the frame does not contain its content size."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(content) + compressor.flush()


async def permits(client: Client, count: int) -> list[str]:
    return [permit.group_id for permit in (await client.permits(RUN, "env-1", count, wait=0)).permits]


async def payload(redis: Redis, group_id: str) -> bytes:
    found = await redis.get(keys.payload(RUN, group_id))
    assert isinstance(found, bytes)
    return found


async def test_queue_of_mixed_encodings_serves_trainers_with_and_without_zstd(
    client: Client, zipping: Client, http: httpx.AsyncClient, redis: Redis
) -> None:
    incarnation = await start(client)
    a, b, c, d = await permits(client, 4)
    groups = [make_group(name, RUN, lengths=LENGTHS, seed=seed) for seed, name in enumerate((a, b, c, d))]
    assert await client.submit(groups[0], "env-1")
    assert await zipping.submit(groups[1], "env-1")
    assert (await put_zstd(http, c, unsized(groups[2].encode()))).status_code == 201
    assert await zipping.submit(groups[3], "env-1")
    stored = [await payload(redis, name) for name in (a, b, c, d)]
    assert [compression.is_compressed(body) for body in stored] == [False, True, True, True]
    assert stored[2] == unsized(groups[2].encode()), "kept as it came"
    status = await client.status(RUN)
    assert status.bytes == sum(map(len, stored)) < sum(len(group.encode()) for group in groups)

    sent = [group.encode() for group in groups]
    ask = {"incarnation": incarnation, "batch_id": "b1", "groups": 4}
    for compressed, expected in ((False, sent), (True, stored)):
        answer = await http.post(f"{AT}/lease", json={**ask, "compressed": compressed})
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert msgspec.msgpack.decode(answer.content, type=list[bytes]) == expected
    assert msgspec.msgpack.decode((await http.post(f"{AT}/lease", json=ask)).content, type=list[bytes]) == sent
    for reader in (client, zipping):
        batch = await reader.lease(RUN, incarnation, "b1", 4, wait=0)
        assert batch is not None
        assert [group.encode() for group in batch] == sent


async def test_streamed_batch_announces_its_length(redis_url: str) -> None:
    """Larger than one read of the API, so that the frame announces its length before most of it is read."""
    with ApiServer(redis_url) as server:
        async with Client(server.url) as client, Client(server.url, compress=True) as zipping:
            incarnation = await start(client)
            names = await permits(client, 4)
            groups = [make_group(name, RUN, lengths=[(3, 90_000)] * 2, seed=seed) for seed, name in enumerate(names)]
            for group, sender in zip(groups, (client, zipping, zipping, client), strict=True):
                assert await sender.submit(group, "env-1")
            for reader in (client, zipping):
                batch = await reader.lease(RUN, incarnation, "b1", 4, wait=0)
                assert batch is not None
                assert [group.encode() for group in batch] == [group.encode() for group in groups]


async def test_same_group_in_another_encoding_is_a_repeated_submit(
    client: Client, zipping: Client, http: httpx.AsyncClient, redis: Redis
) -> None:
    incarnation = await start(client)
    a, b = await permits(client, 2)
    for name, first, then in ((a, client, zipping), (b, zipping, client)):
        group = make_group(name, RUN, lengths=LENGTHS)
        assert await first.submit(group, "env-1")
        assert not await then.submit(group, "env-1")
        assert (await put_zstd(http, name, unsized(group.encode()))).status_code == 200
        other = compression.deflate(make_group(name, RUN, lengths=LENGTHS, seed=9).encode())
        assert code(await put_zstd(http, name, other)) == (409, "conflict")
        assert await redis.hget(keys.group(RUN, name), "digest") == hashlib.sha256(group.encode()).digest()
    await client.lease(RUN, incarnation, "b1", 2, wait=0)
    await client.ack(RUN, incarnation, ["b1"])
    assert not await zipping.submit(make_group(a, RUN, lengths=LENGTHS), "env-1")


async def test_stored_zstd_group_is_sent_unchanged_if_the_client_accepts_zstd(
    client: Client, zipping: Client, http: httpx.AsyncClient
) -> None:
    await start(client)
    a, b = await permits(client, 2)
    groups = [make_group(name, RUN, lengths=LENGTHS) for name in (a, b)]
    await zipping.submit(groups[0], "env-1")
    await client.submit(groups[1], "env-1")
    for accepted, found in (("zstd", "zstd"), ("gzip, *", "zstd"), ("identity", None), ("zstd;q=0, *", None)):
        async with http.stream("GET", f"{AT}/groups/{a}", headers={"Accept-Encoding": accepted}) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])
        assert answer.headers.get("content-encoding") == found, accepted
        assert raw == (compression.deflate(groups[0].encode()) if found else groups[0].encode())
        plain = await http.get(f"{AT}/groups/{b}", headers={"Accept-Encoding": accepted})
        assert "content-encoding" not in plain.headers
        assert plain.content == groups[1].encode()
    examples = (await http.get(f"{AT}/examples", params={"limit": 2})).json()
    assert [example["group_id"] for example in examples] == [b, a]
    assert examples[0]["rewards"] == examples[1]["rewards"]


async def snapshot(redis: Redis) -> dict[bytes, bytes | None]:
    """Returns the contents of Redis, without the archiver's lock and Redis' clock."""
    return {name: await redis.dump(name) async for name in redis.scan_iter() if name != keys.ARCHIVER.encode()}


async def test_frames_that_are_refused_leave_the_store_as_it_was(
    client: Client, http: httpx.AsyncClient, redis: Redis
) -> None:
    await start(client)
    (name,) = await permits(client, 1)
    plain = make_group(name, RUN, lengths=LENGTHS).encode()
    frame = compression.deflate(plain)
    window = zstandard.ZstdCompressionParameters(window_log=26, write_content_size=False)
    wide = zstandard.ZstdCompressor(compression_params=window).compressobj()
    before = await snapshot(redis)
    for why, body, expected in (
        ("truncated", frame[:-3], (400, "bad_group")),
        ("truncated, unsized", unsized(plain)[:-3], (400, "bad_group")),
        ("trailing garbage", frame + b"\0", (400, "bad_group")),
        ("two frames", frame + frame, (400, "bad_group")),
        ("empty", b"", (400, "bad_group")),
        ("plain after all", plain, (400, "bad_group")),
        ("a frame of a frame", compression.deflate(frame), (400, "bad_group")),
        ("a frame of nothing", compression.deflate(b""), (400, "bad_group")),
        ("corrupt", frame[:60] + bytes([frame[60] ^ 255]) + frame[61:], (400, "bad_group")),
        ("a wide window", wide.compress(plain) + wide.flush(), (400, "bad_group")),
        ("not a group", compression.deflate(b"\x93\x01\x02\x03"), (400, "bad_group")),
        ("a bomb that says so", compression.deflate(bytes(256 << 20)), (413, "too_large")),
        ("a bomb that does not", unsized(bytes(256 << 20)), (413, "too_large")),
        ("one byte too many", compression.deflate(bytes(200_001)), (413, "too_large")),
    ):
        answer = await put_zstd(http, name, body)
        assert code(answer) == expected, why
        assert await snapshot(redis) == before, why
    silent = await put(http, name, frame)
    assert code(silent) == (400, "bad_group")
    assert "Content-Encoding: zstd" in silent.text
    for other in ("gzip", "br", "zstd, gzip", "zstd, zstd", "nonsense"):
        assert code(await put(http, name, plain, **{"Content-Encoding": other})) == (415, "content_encoding")
    assert await snapshot(redis) == before
    assert (await put(http, name, plain, **{"Content-Encoding": "identity"})).status_code == 201


async def test_zstd_bombs_do_not_increase_the_apis_memory(redis_url: str, client: Client) -> None:
    """32 frames at once, of 4 GiB each: the process's peak memory stays far below one of them."""
    await start(client)
    (name,) = await permits(client, 1)
    room_for_all = {"API_MAX_CONCURRENT_BODY_BYTES": str(1 << 30)}
    with ApiServer(redis_url, API_MAX_BODY_BYTES=str(8 << 20), **room_for_all) as server:
        said = zstandard.ZstdCompressor(level=1).compressobj(size=4 << 30)
        silent = zstandard.ZstdCompressor(level=1).compressobj()
        for compressor in (said, silent):
            bomb = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(256)) + compressor.flush()
            assert len(bomb) < 1 << 20
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                answers = await asyncio.gather(*(put_zstd(http, name, bomb) for _ in range(32)))
            assert [code(answer) for answer in answers] == [(413, "too_large")] * 32
        assert server.peak_memory < 250 << 20


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_mutated_frames_are_stored_whole_or_not_at_all(
    client: Client, http: httpx.AsyncClient, redis: Redis, data: st.DataObject
) -> None:
    await redis.flushall()
    await start(client)
    (name,) = await permits(client, 1)
    group = make_group(name, RUN, lengths=LENGTHS)
    frame = bytearray(data.draw(st.sampled_from([compression.deflate, unsized]))(group.encode()))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frame) - 1))
        if data.draw(st.booleans()):
            frame[at] = data.draw(st.integers(0, 255))
        else:
            frame[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    before = await snapshot(redis)
    answer = await put_zstd(http, name, bytes(frame))
    if answer.status_code == 201:
        stored = await payload(redis, name)
        assert TrajectoryGroup.decode(compression.inflate(stored, 1 << 20)).group_id == name
    else:
        assert code(answer) in ((400, "bad_group"), (413, "too_large"))
        assert await snapshot(redis) == before
