"""Long polls wake at a notification, end in time, and make no attempt for a client that left."""

from __future__ import annotations

import asyncio
import time

from gristmill_api.notifications import Notifications
from gristmill_api.store import keys


async def here() -> bool:
    return False


async def test_publish_wakes_only_its_topic() -> None:
    notifications, box, attempts = Notifications(), dict[str, int](), dict[str, int]()

    async def attempt(topic: str) -> int | None:
        attempts[topic] = attempts.get(topic, 0) + 1
        return box.get(topic)

    a = asyncio.create_task(notifications.poll("a", lambda: attempt("a"), 30, here))
    b = asyncio.create_task(notifications.poll("b", lambda: attempt("b"), 0.3, here))
    await asyncio.sleep(0.05)
    box["a"] = 1
    started = time.monotonic()
    notifications.publish("a")
    assert await a == 1
    assert time.monotonic() - started < 0.2, "woken, not found at the next re-check"
    assert await b is None
    assert attempts == {"a": 2, "b": 2}, "one at the start, one at the wake-up or the end"


async def test_any_topic_of_a_run_wakes_readers_of_its_events() -> None:
    notifications = Notifications()
    with (
        notifications.listening(keys.events_topic("a")) as of_a,
        notifications.listening(keys.events_topic("b")) as of_b,
    ):
        for topic in (keys.ready_topic("a"), keys.permits_topic("a"), keys.events_topic("a")):
            of_a.clear()
            notifications.publish(topic)
            assert of_a.is_set(), topic
        notifications.publish(keys.OPEN_TOPIC)
        assert not of_b.is_set()


async def test_poll_does_not_miss_a_topic_during_an_attempt() -> None:
    notifications, box = Notifications(), dict[str, int]()

    async def attempt() -> int | None:
        found = box.get("x")
        if found is None:
            box["x"] = 7
            notifications.publish("a")  # after this attempt looked, before it waits
        return found

    started = time.monotonic()
    assert await notifications.poll("a", attempt, 30, here) == 7
    assert time.monotonic() - started < 0.2


async def test_poll_finds_unpublished_changes_by_its_recheck() -> None:
    notifications, started = Notifications(), time.monotonic()

    async def attempt() -> bool | None:
        return True if time.monotonic() - started > 0.5 else None

    assert await notifications.poll("a", attempt, 30, here) is True
    assert time.monotonic() - started < 2.5


async def test_poll_makes_no_attempt_for_a_client_that_left() -> None:
    notifications, attempts = Notifications(), list[int]()

    async def attempt() -> None:
        attempts.append(1)

    async def gone() -> bool:
        return True

    waiting = asyncio.create_task(notifications.poll("a", attempt, 30, gone))
    await asyncio.sleep(0.05)
    notifications.publish("a")
    await waiting
    assert attempts == [1], "an attempt after the client left would lease groups to no trainer"


async def test_close_ends_every_wait() -> None:
    notifications = Notifications()

    async def attempt() -> None:
        return None

    waiting = asyncio.create_task(notifications.poll("a", attempt, 30, here))
    await asyncio.sleep(0.05)
    notifications.close()
    await asyncio.wait_for(waiting, 0.5)
    await asyncio.wait_for(notifications.poll("b", attempt, 30, here), 0.5)
