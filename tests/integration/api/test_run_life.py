"""The life of a run apart from its training: replaced, suspended, resumed, extended, deleted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import pytest
from tests.integration.api.event_listener import EventListener
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, submission, trainer
from tests.support.redis_contents import key_names

from gristmill import MetricsRow, Protocol, RunRecord, RunState
from gristmill_api.errors import ApiProblem
from gristmill_api.store import LeaseSize, keys, runs
from gristmill_api.store.runs import FENCE_S

OTHER = "other"


async def refusal(call: Awaitable[Any]) -> ApiProblem:
    with pytest.raises(ApiProblem) as refused:
        await call
    return refused.value


async def create(harness: StoreHarness, run_id: str = RUN, dataset: str = "d", steps: int | None = None) -> RunRecord:
    """RUN with the dataset "d" and no steps is the run that the harness opened."""
    env: dict[str, Any] = {"dataset": dataset}
    if steps is not None:
        env["trainer"] = {"training_steps": steps}
    return (await harness.store.runs.create(run_id, env, 2))[0]


async def fall_silent(harness: StoreHarness, env_id: str, run_id: str = RUN) -> None:
    """Expires the environment's registration, as if its process had been killed."""
    assert await harness.redis.zadd(keys.prefix(run_id) + "envs", {env_id: 1}, xx=True, ch=True)


def trainer_calls(harness: StoreHarness, incarnation: int) -> list[Awaitable[Any]]:
    store = harness.store
    return [
        harness.lease(incarnation, "b9", 1),
        store.queue.extend(RUN, incarnation, ["b1"]),
        store.queue.ack(RUN, incarnation, ["b1"]),
        store.queue.nack(RUN, incarnation, ["b1"]),
        store.runs.record_version(RUN, incarnation, 5),
        store.runs.finish(RUN, incarnation),
    ]


async def test_a_run_without_a_finished_step_is_replaced(harness: StoreHarness) -> None:
    old = await harness.start()
    before = await harness.store.runs.record(RUN)
    await harness.fill(3)
    await harness.lease(old, "b1", 1)
    after = await create(harness, dataset="e")
    assert (after.state, after.env, after.trainer, after.version) == ("open", {"dataset": "e"}, None, None)
    assert after.creation != before.creation
    assert (await harness.store.runs.open_run()).creation == after.creation  # type: ignore[union-attr]
    assert await harness.whereabouts() == {}
    assert int(await harness.redis.get(keys.BYTES) or 0) == 0
    for call in trainer_calls(harness, old):
        assert (await refusal(call)).code == "fenced", "before a new trainer comes"
    new = await harness.start()
    for call in trainer_calls(harness, old):
        assert (await refusal(call)).code == "fenced", "and after"
    assert await harness.fill(1) == ["g00000000"]
    assert await harness.lease(new, "b1", 1) == ["g00000000"]


@pytest.mark.parametrize("state", [RunState.SUSPENDED, RunState.FINISHED])
async def test_a_run_without_a_finished_step_is_replaced_in_any_state(harness: StoreHarness, state: RunState) -> None:
    if state is RunState.SUSPENDED:
        await create(harness, OTHER)
    else:
        await harness.store.runs.close(RUN)
    assert (await harness.store.runs.record(RUN)).state is state
    assert (await create(harness, dataset="e")).state is RunState.OPEN
    assert (await harness.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]


async def test_a_living_environment_keeps_its_run_from_being_replaced(harness: StoreHarness) -> None:
    await harness.store.envs.register(RUN, "env-1", None)
    refused = await refusal(create(harness, dataset="e"))
    assert (refused.status, refused.code) == (409, "config_differs")
    assert "'env-1'" in refused.message
    assert 1 <= (refused.retry_after or 0) <= 60
    assert (await harness.store.runs.record(RUN)).env == {"dataset": "d"}
    await harness.store.envs.unregister(RUN, "env-1")
    assert (await create(harness, dataset="e")).env == {"dataset": "e"}, "one that ends by itself gives the run up"
    await harness.store.envs.register(RUN, "env-1", None)
    await fall_silent(harness, "env-1")
    assert (await create(harness, dataset="f")).env == {"dataset": "f"}


@pytest.mark.parametrize("how", ["version", "ack"])
async def test_a_run_with_a_finished_step_is_not_replaced(harness: StoreHarness, how: str) -> None:
    incarnation = await harness.start()
    if how == "version":
        await harness.store.runs.record_version(RUN, incarnation, 1)
    else:
        await harness.fill(1)
        await harness.lease(incarnation, "b1", 1)
        await harness.store.queue.ack(RUN, incarnation, ["b1"])
    refused = await refusal(create(harness, dataset="e"))
    assert (refused.code, refused.retry_after) == ("config_differs", None)
    assert "dataset: 'd' -> 'e'" in refused.message


async def test_the_trainers_settings_may_change_until_a_step_is_finished(harness: StoreHarness) -> None:
    await harness.store.runs.take(RUN, trainer(learning_rate=1e-3), [])
    record = await harness.store.runs.take(RUN, trainer(learning_rate=1e-2, groups=2), [])
    assert (record.incarnation, record.groups_per_step) == (2, 2)
    await harness.store.runs.record_version(RUN, 2, 1)
    refused = await refusal(harness.store.runs.take(RUN, trainer(learning_rate=1e-3, groups=2), []))
    assert refused.code == "config_differs"


async def test_a_run_of_atropos_is_not_replaced(harness: StoreHarness) -> None:
    """The run's environments are not registered here, and its trainer need not report its steps."""
    await harness.store.runs.create("default", {}, 1, stack=None, protocol=Protocol.ATROPOS)
    refused = await refusal(harness.store.runs.create("default", {"dataset": "d"}, 2))
    assert refused.code == "config_differs"
    await harness.store.runs.create("native", {}, 1)
    refused = await refusal(harness.store.runs.create("native", {}, 1, stack=None, protocol=Protocol.ATROPOS))
    assert refused.code == "config_differs"


async def test_concurrent_replacements_create_one_run(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DELETED_AT_ONCE", 1)
    await harness.start()
    await harness.fill(4)
    records = await asyncio.gather(*[create(harness, dataset="e") for _ in range(5)])
    assert len({record.creation for record in records}) == 1
    assert await harness.whereabouts() == {}


async def test_create_script_rechecks_the_settings_that_the_api_compared(harness: StoreHarness) -> None:
    """Between the two calls, an environment registered, a step finished, or another call changed the settings."""
    digest = (await harness.store.runs.record(RUN)).digest

    async def change(how: str, compared: str) -> bytes:
        arguments = (RUN, '{"dataset":"e"}', "0" * 64, 2, "default", "gristmill", "00", how, compared)
        reply: Any = await harness.store.scripts.run("create", PREFIX, *arguments)
        return bytes(reply[0])

    for how in ("replace", "extend"):
        assert await change(how, "1" * 64) == b"DIFFERS"
    await harness.store.envs.register(RUN, "env-1", None)
    assert await change("replace", digest) == b"DIFFERS"
    await harness.store.envs.unregister(RUN, "env-1")
    incarnation = await harness.start()
    await harness.store.runs.record_version(RUN, incarnation, 1)
    assert await change("replace", digest) == b"DIFFERS"
    assert (await harness.store.runs.record(RUN)).digest == digest
    assert await change("extend", digest) == b"JOINED"


async def test_an_interrupted_run_is_suspended_by_another_and_loses_nothing(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ready = await harness.fill(2)
    await harness.lease(incarnation, "b1", 1)
    held, given_back = await harness.ask("env-1", 2)
    await harness.store.permits.return_permit(RUN, "env-1", given_back, "abandoned")
    await create(harness, OTHER)
    assert (await harness.store.runs.open_run()).run_id == OTHER  # type: ignore[union-attr]
    assert (await harness.store.runs.record(RUN)).state is RunState.SUSPENDED
    for call in (
        *trainer_calls(harness, incarnation),
        harness.store.runs.take(RUN, trainer(), []),
        harness.store.permits.grant(RUN, "env-1", 1),
        harness.store.permits.renew(RUN, "env-1", [held]),
        harness.submit("env-1", held),
        harness.store.envs.register(RUN, "env-1", None),
        harness.store.envs.heartbeat(RUN, "env-1"),
    ):
        refused = await refusal(call)
        assert (refused.status, refused.code) == (409, "suspended")
    assert not await harness.submit("env-1", ready[0]), "a retry of a stored group gets the first answer"
    assert await harness.whereabouts() == {"leased": ready[:1], "ready": ready[1:]}

    resumed = await create(harness)
    assert (resumed.state, resumed.version) == ("open", f"{incarnation}.0")
    assert (await harness.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]
    assert (await harness.store.runs.record(OTHER)).state is RunState.SUSPENDED
    for call in trainer_calls(harness, incarnation):
        assert (await refusal(call)).code == "fenced", "it does not know what the model server serves now"
    incarnation = (await harness.store.runs.take(RUN, trainer(), [])).incarnation
    assert await harness.lease(incarnation, "b1", 2) == ready
    assert await harness.ask("env-2", 9) == [held, given_back], "their rows are not lost"


async def test_live_environment_keeps_its_run_from_being_suspended(harness: StoreHarness) -> None:
    await harness.store.envs.register(RUN, "env-1", None)
    await harness.store.envs.register(RUN, "env-2", None)
    await fall_silent(harness, "env-2")
    refused = await refusal(create(harness, OTHER))
    assert (refused.status, refused.code) == (409, "run_open")
    assert "'env-1'" in refused.message
    assert "'env-2'" not in refused.message
    assert 1 <= (refused.retry_after or 0) <= 60
    assert (await harness.store.runs.record(RUN)).state is RunState.OPEN
    await harness.store.runs.create("elsewhere", {}, 2, stack="second")
    await harness.store.runs.create("nowhere", {}, 2, stack=None)
    await fall_silent(harness, "env-1")
    assert (await create(harness, OTHER)).state is RunState.OPEN
    await harness.store.envs.register(OTHER, "env-3", None)
    assert (await refusal(create(harness))).code == "run_open", "resuming takes the stack, too"
    assert (await harness.store.runs.record(RUN)).state is RunState.SUSPENDED
    await harness.store.envs.unregister(OTHER, "env-3")
    assert (await create(harness)).state is RunState.OPEN


async def test_an_environment_unregisters_from_a_suspended_run(harness: StoreHarness) -> None:
    await harness.store.envs.register(RUN, "env-1", None)
    await fall_silent(harness, "env-1")
    await create(harness, OTHER)
    assert (await harness.store.runs.record(RUN)).state is RunState.SUSPENDED
    assert await harness.store.envs.unregister(RUN, "env-1")
    assert await harness.store.envs.all(RUN) == []


async def test_closing_a_suspended_run_leaves_the_stack_unchanged(harness: StoreHarness) -> None:
    await create(harness, OTHER)
    refused = await refusal(harness.store.runs.delete(RUN))
    assert refused.code == "run_open"
    assert "open" not in refused.message, "it is suspended"
    assert (await harness.store.runs.close(RUN)).state is RunState.FINISHED
    assert (await harness.store.runs.open_run()).run_id == OTHER  # type: ignore[union-attr]
    await harness.store.runs.delete(RUN)
    assert (await harness.store.runs.open_run()).run_id == OTHER  # type: ignore[union-attr]


@pytest.mark.parametrize("state", RunState)
async def test_more_training_steps_extend_a_run(harness: StoreHarness, state: RunState) -> None:
    await create(harness, steps=1)  # replaces the trainer of the harness
    old = await harness.start(steps=1)
    trained = await harness.fill(4)
    await harness.lease(old, "b1", 4)
    await harness.store.queue.ack(RUN, old, ["b1"])
    await harness.store.runs.record_version(RUN, old, 1)
    creation = (await harness.store.runs.record(RUN)).creation
    if state is RunState.FINISHED:
        await harness.store.runs.finish(RUN, old)
    if state is not RunState.OPEN:
        await create(harness, OTHER)
    extended = await create(harness, steps=3)
    assert (extended.state, extended.creation) == ("open", creation)
    assert extended.env["trainer"] == {"training_steps": 3}
    assert (await harness.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]
    assert (await create(harness, steps=3)).incarnation == extended.incarnation, "a retry"
    assert (await refusal(harness.store.runs.finish(RUN, old))).code == "fenced", "it would end the run after one step"
    for steps in (1, 2, None):
        assert (await refusal(create(harness, steps=steps))).code == "config_differs"
    assert (await refusal(create(harness, dataset="e", steps=4))).code == "config_differs"
    for wrong in (trainer(steps=3, learning_rate=1.0), trainer(steps=3, groups=2)):
        assert (await refusal(harness.store.runs.take(RUN, wrong, [], 1))).code == "config_differs"
    record = await harness.store.runs.take(RUN, trainer(steps=3), [], 1)
    assert record.training_steps == 3
    assert (await refusal(harness.store.runs.take(RUN, trainer(steps=2), [], 1))).code == "config_differs"
    await harness.store.runs.record_version(RUN, record.incarnation, 1)
    assert await harness.whereabouts() == {"trained": trained}
    assert len(await harness.ask("env-1", 99)) == 4
    await harness.store.runs.record_version(RUN, record.incarnation, 2)
    assert len(await harness.ask("env-1", 99)) == 4


async def test_rows_of_permits_that_were_out_at_the_end_come_first_in_the_extended_run(harness: StoreHarness) -> None:
    incarnation = await harness.start(staleness=0, groups=4, steps=1)
    stored, held, given_back, dropped = await harness.ask("env-1", 4)
    assert await harness.submit("env-1", stored)
    await harness.store.permits.return_permit(RUN, "env-1", given_back, "abandoned")
    await harness.store.runs.record_version(RUN, incarnation, 1)
    await harness.store.runs.finish(RUN, incarnation)
    assert (await harness.store.permits.renew(RUN, "env-1", [held])).lost == [held]
    assert (await refusal(harness.store.permits.return_permit(RUN, "env-1", dropped, "timeout"))).code == "permit_lost"
    await harness.store.runs.take(RUN, trainer(staleness=0, groups=4, steps=3), [], 1)
    await harness.store.runs.record_version(RUN, incarnation + 1, 1)
    assert (await harness.ask("env-2", 3)) == [held, given_back, dropped]


async def test_run_is_extended_if_an_environment_names_more_steps_than_its_trainer(
    harness: StoreHarness,
) -> None:
    incarnation = await harness.start(steps=4)
    await harness.store.runs.record_version(RUN, incarnation, 1)
    assert (await refusal(create(harness, steps=4))).code == "config_differs"
    assert (await create(harness, steps=5)).env["trainer"] == {"training_steps": 5}


@pytest.mark.parametrize("wrong", [True, 3.5, "9", None])
async def test_invalid_training_steps_do_not_extend_a_run(harness: StoreHarness, wrong: Any) -> None:
    incarnation = await harness.start(steps=2)
    await harness.store.runs.record_version(RUN, incarnation, 1)
    for block in ({"training_steps": wrong}, [wrong]):
        refused = await refusal(harness.store.runs.create(RUN, {"dataset": "d", "trainer": block}, 2))
        assert refused.code == "config_differs"


@pytest.mark.parametrize("state", RunState)
async def test_a_trainer_with_more_training_steps_extends_a_run(harness: StoreHarness, state: RunState) -> None:
    incarnation = await harness.start(steps=1)
    await harness.store.runs.record_version(RUN, incarnation, 1)
    if state is RunState.FINISHED:
        await harness.store.runs.finish(RUN, incarnation)
    if state is not RunState.OPEN:
        await create(harness, OTHER)
        refused = await refusal(harness.store.runs.take(RUN, trainer(steps=1), [], 1))
        assert refused.code == state.value
        # The take would open a run, which needs the stack to itself, and no environment has asked for that run.
        refused = await refusal(harness.store.runs.take(RUN, trainer(steps=2), [], 1))
        assert (refused.code, refused.retry_after) == ("run_open", None)
        assert "'default'" in refused.message
        await harness.store.envs.register(OTHER, "env-1", None)
        refused = await refusal(harness.store.runs.take(RUN, trainer(steps=2), [], 1))
        assert (refused.code, refused.retry_after) == ("run_open", None), "its environments make no difference"
        assert f"/v1/runs/{OTHER}/close" in refused.remedy
        assert "GRISTMILL_STACK" not in refused.remedy, "the run keeps its stack"
        await harness.store.runs.close(OTHER)
    assert (await refusal(harness.store.runs.take(RUN, trainer(steps=2, groups=2), [], 1))).code == "config_differs"
    record = await harness.store.runs.take(RUN, trainer(steps=2), [], 1)
    assert (record.state, record.training_steps, record.incarnation) == ("open", 2, incarnation + 1)
    assert (await harness.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]


async def test_trainer_cannot_extend_a_run_closed_before_its_first_step(harness: StoreHarness) -> None:
    await harness.start(steps=1)
    await harness.store.runs.close(RUN)
    for steps in (1, 2):
        assert (await refusal(harness.store.runs.take(RUN, trainer(steps=steps), []))).code == "finished"


async def fill_with_everything(harness: StoreHarness) -> int:
    """Fills a run with groups in every state, batches, environments, metrics and examples. Returns the bytes of
    the other run."""
    incarnation = await harness.start(groups=8)
    for env_id in ("env-1", "env-2", "env-3"):
        await harness.store.envs.register(RUN, env_id, None)
        await harness.store.journal.record_metrics(RUN, MetricsRow(source=env_id, step=1, values={"loss": 1.0}))
    await harness.fill(8)
    await harness.give_up(incarnation, groups=2)
    for batch_id in ("b1", "b2", "b3", "b4", "b5"):
        await harness.lease(incarnation, batch_id, 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    for batch_id in ("b4", "b5"):
        await harness.expire_lease(batch_id)
    await harness.lease(incarnation, "b6", 9)
    await harness.ask("env-1", 1)
    await harness.store.envs.claim(RUN, "evaluation-1", "env-1", 60_000)
    await harness.store.runs.create(OTHER, {}, 2, stack=None)
    other = await harness.store.runs.take(OTHER, trainer(), [])
    await harness.store.runs.record_version(OTHER, other.incarnation, 0)
    (permit,) = (await harness.store.permits.grant(OTHER, "env-1", 1)).permits
    await harness.store.queue.submit(OTHER, "env-1", submission(permit.group_id))
    return 100


@pytest.mark.parametrize("at_once", [1, 2, 3, 512])
async def test_a_run_is_deleted_in_parts_and_leaves_its_fence(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(runs, "DELETED_AT_ONCE", at_once)
    beside = await fill_with_everything(harness)
    await harness.store.runs.close(RUN)
    await harness.store.runs.delete(RUN)
    assert {name for name in await key_names(harness.redis) if name.startswith(PREFIX)} == {PREFIX + "fence"}
    assert 0 < await harness.redis.pttl(PREFIX + "fence") <= FENCE_S * 1000
    assert int(await harness.redis.get(keys.BYTES) or 0) == beside
    assert int(await harness.redis.get(keys.JOURNAL) or 0) == 0
    assert await harness.redis.exists(keys.DELETING, keys.JOURNALS) == 0
    assert (await refusal(harness.store.runs.delete(RUN))).code == "run_missing"
    incarnation = (await harness.store.runs.record(OTHER)).incarnation
    assert len((await harness.store.queue.lease(OTHER, incarnation, "b1", LeaseSize("groups", 1))).groups) == 1


@pytest.mark.parametrize("at_once", range(1, 40, 3))
async def test_a_deletion_that_was_interrupted_is_continued(harness: StoreHarness, at_once: int) -> None:
    """The next call that deletes or creates the run deletes the rest. Until then the run does not exist for clients,
    and its bytes count as long as they are stored."""
    beside = await fill_with_everything(harness)
    incarnation = (await harness.store.runs.record(RUN)).incarnation
    await harness.store.runs.close(RUN)
    held = (await harness.store.runs.status(RUN)).bytes
    for _ in range(2):
        reply = await harness.store.scripts.run("delete", PREFIX, at_once, 1000, "begin")
        groups = len(await harness.redis.keys(PREFIX + "payload:*"))
        if reply == [b"OK"]:
            break
        assert reply == [b"MORE"]
        assert int(await harness.redis.get(keys.BYTES) or 0) == beside + 100 * groups
        assert groups < held / 100
        assert await harness.redis.smembers(keys.DELETING) == {RUN.encode()}
        assert (await refusal(harness.store.runs.record(RUN))).code == "run_missing"
        assert (await refusal(harness.store.runs.audit(RUN))).code == "run_missing"
        assert [record.run_id for record in await harness.store.runs.all()] == [OTHER]
    if at_once % 2:
        with contextlib.suppress(ApiProblem):  # done already
            await harness.store.runs.delete(RUN)
        assert {name for name in await key_names(harness.redis) if name.startswith(PREFIX)} == {PREFIX + "fence"}
    record = await create(harness)
    assert record.incarnation == incarnation + 1
    assert await harness.whereabouts() == {}
    assert await harness.store.journal.sources(RUN) == []
    assert await harness.store.envs.all(RUN) == []
    assert int(await harness.redis.get(keys.BYTES) or 0) == beside
    for call in trainer_calls(harness, incarnation):
        assert (await refusal(call)).code == "fenced", "a trainer that outlived its run"


async def test_run_changes_wake_waiters_and_write_events(harness: StoreHarness) -> None:
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    await harness.start()
    await harness.ask("env-1", 1)
    await listener.recorded()
    woken = {f"ready {PREFIX}", f"permits {PREFIX}"}
    topics, events = await listener.recorded(create(harness, OTHER))
    assert (topics - {"open", f"events {keys.prefix(OTHER)}"}, events) == (woken, [{"kind": "suspend"}])
    topics, events = await listener.recorded(create(harness))
    others = {f"ready {keys.prefix(OTHER)}", f"permits {keys.prefix(OTHER)}"}
    assert (topics, events) == (woken | others | {"open"}, [{"kind": "resume"}])
    await harness.store.runs.record_version(RUN, (await harness.store.runs.take(RUN, trainer(), [])).incarnation, 1)
    await listener.recorded()
    assert await listener.recorded(create(harness, steps=11)) == (woken | {"open"}, [{"kind": "extend"}])
    await listener.close()
