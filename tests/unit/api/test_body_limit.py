"""Request bodies in memory: counted together, admitted in order, and released when their requests end."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.types import Message, Receive, Scope, Send

from gristmill_api.errors import ApiProblem
from gristmill_api.http import body_limit
from gristmill_api.http.body_limit import (
    IN_LOOP,
    UNCOUNTED,
    Bodies,
    BodyLimit,
    Reservation,
    offload,
    reserve_inflated,
)

MIB = 1 << 20


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def holding(bodies: Bodies, size: int) -> Reservation:
    reservation = Reservation(bodies)
    await reservation.admit(size)
    return reservation


async def test_bodies_wait_for_room_and_older_ones_are_admitted_first() -> None:
    bodies = Bodies(10)
    oldest = await holding(bodies, 6)
    second = await holding(bodies, 1)
    order: list[str] = []

    async def admit(name: str, reservation: Reservation, size: int) -> None:
        await reservation.admit(size)
        order.append(name)

    new = Reservation(bodies)
    waiting = [asyncio.create_task(admit("new", new, 5)), asyncio.create_task(admit("second", second, 5))]
    await turns()
    assert order == []
    await oldest.admit(60)
    assert bodies.held == 61, "the oldest body always finds room"
    oldest.release()
    await asyncio.gather(*waiting)
    assert order == ["second", "new"]
    assert bodies.held == 10


async def test_body_that_finds_no_room_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "_WAIT_S", 0.01)
    bodies = Bodies(10)
    await holding(bodies, 6)
    with pytest.raises(ApiProblem) as refused:
        await holding(bodies, 5)
    assert (refused.value.code, refused.value.status, refused.value.retry_after) == ("too_many_bodies", 503, 1)
    await holding(bodies, 4)
    assert bodies.held == 10


@pytest.mark.parametrize("late", [False, True], ids=["while it waits", "in the moment of its turn"])
async def test_waiting_request_that_is_cancelled_leaves_nothing(late: bool) -> None:
    bodies = Bodies(10)
    oldest = await holding(bodies, 6)
    reservations = [Reservation(bodies), Reservation(bodies)]
    first, second = (asyncio.create_task(one.admit(size)) for one, size in zip(reservations, (9, 3), strict=True))
    await turns()
    if late:
        oldest.release()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    reservations[0].release()
    await asyncio.wait_for(second, 5)
    assert bodies.held == (3 if late else 9)


def serve(bodies: Bodies, limit: int = MIB, timeout: float = 30.0) -> BodyLimit:
    """An application that reads its body, counts the inflated bytes, and fails if the body says so."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        reserve_inflated(scope, 4 * int(scope["path"]))
        reserve_inflated(scope, int(scope["path"]))
        scope["held"] = bodies.held
        if body.startswith(b"fail"):
            raise ZeroDivisionError

    return BodyLimit(app, limit, bodies, timeout)


async def request(
    app: BodyLimit, *parts: bytes | None, announced: bool = True, inflated_to: int = 0, pause: float = 0.0
) -> int:
    """Returns the bytes held when the application had read the whole body. A part that is None never arrives."""
    length = sum(1 if part is None else len(part) for part in parts)
    headers = [(b"content-length", str(length).encode())] if announced else []
    scope: Scope = {"type": "http", "headers": headers, "path": str(inflated_to)}
    left = list(parts)

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(0.05)
            return {"type": "http.disconnect"}
        part = left.pop(0)
        await asyncio.sleep(pause)
        if part is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    await app(scope, receive, send)
    return int(scope["held"])


LARGE = b"x" * (2 * UNCOUNTED)


async def test_two_requests_whose_waits_end_in_the_same_moment_leave_nothing() -> None:
    bodies = Bodies(10)
    oldest = await holding(bodies, 6)
    second, third = await holding(bodies, 3), Reservation(bodies)
    waits = [asyncio.create_task(second.admit(8)), asyncio.create_task(third.admit(4))]
    await turns()
    for wait in waits:
        wait.cancel()
    second.release()  # Before the loop turns: there is room for the third, which waits no longer.
    await asyncio.gather(*waits, return_exceptions=True)
    assert [wait.cancelled() for wait in waits] == [True, True]
    third.release()
    oldest.release()
    assert bodies.held == 0


async def test_request_holds_its_body_and_its_inflated_copy_until_its_end() -> None:
    bodies = Bodies(MIB)
    app = serve(bodies)
    assert await request(app, LARGE) == len(LARGE)
    assert await request(app, b"", LARGE, b"x") == len(LARGE) + 1
    assert await request(app, LARGE, LARGE, announced=False) == 2 * len(LARGE)
    assert await request(app, LARGE, inflated_to=200_000) == len(LARGE) + 200_000
    assert await request(app, b"small") == 0, "small bodies are not counted"
    with pytest.raises(ZeroDivisionError):
        await request(app, b"fail" + LARGE)
    assert bodies.held == 0


async def test_copy_without_room_is_refused_at_once() -> None:
    """A waiting request would keep the room of its body, for which other requests may wait."""
    bodies = Bodies(MIB)
    await holding(bodies, MIB // 2)
    with pytest.raises(ApiProblem) as refused:
        await request(serve(bodies), LARGE, inflated_to=MIB // 8)
    assert refused.value.code == "too_many_bodies"
    assert bodies.held == MIB // 2


async def test_copy_is_counted_with_its_real_size_once_it_is_known() -> None:
    bodies = Bodies(MIB)
    reservation = await holding(bodies, 100_000)
    for size in (400_000, 900_000, 300_000):
        reservation.set_copy(size)
        assert bodies.held == 100_000 + size
    waiting = asyncio.create_task(holding(bodies, MIB - 200_000))
    await turns()
    assert not waiting.done()
    reservation.set_copy(0)
    await waiting
    reservation.release()
    assert bodies.held == MIB - 200_000


@pytest.mark.parametrize("parts", [[LARGE, None], [b"x", None], [None], [b"x"] * 1000])
@pytest.mark.parametrize("announced", [True, False])
async def test_request_whose_body_arrives_too_slowly_gives_its_room_back(
    parts: list[bytes | None], announced: bool
) -> None:
    bodies = Bodies(MIB)
    with pytest.raises(ApiProblem) as refused:
        await request(serve(bodies, timeout=0.05), *parts, announced=announced, pause=0.001)
    assert (refused.value.code, refused.value.status, refused.value.retry_after) == ("body_stalled", 503, 1)
    assert bodies.held == 0


async def test_fast_part_of_a_body_earns_no_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []
    timeout = asyncio.timeout

    def recorded(delay: float) -> asyncio.Timeout:
        allowed.append(delay)
        return timeout(delay)

    monkeypatch.setattr(asyncio, "timeout", recorded)
    await request(serve(Bodies(MIB), limit=16 * MIB), *[LARGE] * 32, *[b"x"] * 8, pause=0.001)
    assert max(allowed) == allowed[32] == 30.0
    assert allowed[32:] == sorted(set(allowed[32:]), reverse=True), "each small part after a pause leaves less"


async def test_body_that_announces_much_and_sends_little_takes_no_room() -> None:
    bodies = Bodies(MIB)
    stalled = asyncio.create_task(request(serve(bodies), b"x", None, *[LARGE] * 4))
    await turns()
    assert bodies.held == 0
    assert await request(serve(bodies), *[LARGE] * 8) == MIB
    stalled.cancel()


async def test_complete_body_may_be_worked_on_for_longer_than_a_pause() -> None:
    """An application may wait in `receive` for the client to hang up."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert not (await receive())["more_body"]
        assert (await receive())["type"] == "http.disconnect"
        scope["held"] = bodies.held

    bodies = Bodies(MIB)
    assert await request(BodyLimit(app, MIB, bodies, 0.01), LARGE) == len(LARGE)


async def test_body_over_its_own_limit_is_not_counted() -> None:
    bodies = Bodies(MIB)
    with pytest.raises(ApiProblem) as refused:
        await request(serve(bodies, limit=len(LARGE) - 1), LARGE)
    assert refused.value.status == 413
    assert bodies.held == 0


async def test_offload_uses_another_thread_only_for_large_work() -> None:
    here = threading.get_ident()
    assert await offload(IN_LOOP, threading.get_ident) == here
    assert await offload(IN_LOOP + 1, threading.get_ident) != here
