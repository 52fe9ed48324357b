"""Long polls wake at a notification, end in time, and make no attempt for a client that left."""

from __future__ import annotations

import asyncio

import pytest

from gristmill_api import notifications as module
from gristmill_api.notifications import Notifications
from gristmill_api.store import keys


@pytest.fixture
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that misses a notification then waits for longer than a test may take."""
    monkeypatch.setattr(module, "RECHECK_S", 10_000.0)


async def here() -> bool:
    return False


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("no_recheck")
async def test_publish_wakes_only_its_topic() -> None:
    notifications, box, attempts = Notifications(), dict[str, int](), dict[str, int]()
    both = asyncio.Event()

    async def attempt(topic: str) -> int | None:
        attempts[topic] = attempts.get(topic, 0) + 1
        if len(attempts) == 2:
            both.set()
        return box.get(topic)

    a = asyncio.create_task(notifications.poll("a", lambda: attempt("a"), 10_000, here))
    b = asyncio.create_task(notifications.poll("b", lambda: attempt("b"), 10_000, here))
    await both.wait()
    box.update(a=1, b=2)
    notifications.publish("a")
    assert await a == 1
    assert attempts == {"a": 2, "b": 1}
    notifications.publish("b")
    assert await b == 2


async def test_poll_ends_with_its_wait() -> None:
    async def attempt() -> str | None:
        return None

    assert await Notifications().poll("a", attempt, 0.05, here) is None


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


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("no_recheck")
async def test_poll_does_not_miss_a_topic_during_an_attempt() -> None:
    notifications, box = Notifications(), dict[str, int]()

    async def attempt() -> int | None:
        found = box.get("x")
        if found is None:
            box["x"] = 7
            notifications.publish("a")  # after this attempt looked, before it waits
        return found

    assert await notifications.poll("a", attempt, 10_000, here) == 7


@pytest.mark.timeout(60)
async def test_poll_finds_unpublished_changes_by_its_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECHECK_S", 0.01)
    attempts: list[int] = []

    async def attempt() -> bool | None:
        attempts.append(1)
        return True if len(attempts) == 3 else None

    assert await Notifications().poll("a", attempt, 10_000, here) is True


async def test_poll_makes_no_attempt_for_a_client_that_left() -> None:
    notifications, attempts, began = Notifications(), list[int](), asyncio.Event()

    async def attempt() -> None:
        attempts.append(1)
        began.set()

    async def gone() -> bool:
        return True

    waiting = asyncio.create_task(notifications.poll("a", attempt, 30, gone))
    await began.wait()
    notifications.publish("a")
    await waiting
    assert attempts == [1], "an attempt after the client left would lease groups to no trainer"


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("no_recheck")
async def test_close_ends_every_wait() -> None:
    notifications, began = Notifications(), asyncio.Event()

    async def attempt() -> None:
        began.set()

    waiting = asyncio.create_task(notifications.poll("a", attempt, 10_000, here))
    await began.wait()
    notifications.close()
    await waiting
    await notifications.poll("b", attempt, 10_000, here)
