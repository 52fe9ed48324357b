"""The life of a run apart from its training: replaced, suspended, resumed, extended, deleted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import pytest
from tests.integration.api.bench import PREFIX, RUN, Bench, submission, trainer
from tests.integration.api.ear import Ear
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


async def create(bench: Bench, run_id: str = RUN, dataset: str = "d", steps: int | None = None) -> RunRecord:
    """RUN with the dataset "d" and no steps is the run that the harness opened."""
    env: dict[str, Any] = {"dataset": dataset}
    if steps is not None:
        env["trainer"] = {"training_steps": steps}
    return (await bench.store.runs.create(run_id, env, 2))[0]


async def fall_silent(bench: Bench, env_id: str, run_id: str = RUN) -> None:
    """Expires the environment's registration, as if its process had been killed."""
    assert await bench.redis.zadd(keys.prefix(run_id) + "envs", {env_id: 1}, xx=True, ch=True)


def trainer_calls(bench: Bench, incarnation: int) -> list[Awaitable[Any]]:
    store = bench.store
    return [
        bench.lease(incarnation, "b9", 1),
        store.queue.extend(RUN, incarnation, ["b1"]),
        store.queue.ack(RUN, incarnation, ["b1"]),
        store.queue.nack(RUN, incarnation, ["b1"]),
        store.runs.record_version(RUN, incarnation, 5),
        store.runs.finish(RUN, incarnation),
    ]


async def test_a_run_without_a_finished_step_is_replaced(bench: Bench) -> None:
    old = await bench.start()
    before = await bench.store.runs.record(RUN)
    await bench.fill(3)
    await bench.lease(old, "b1", 1)
    after = await create(bench, dataset="e")
    assert (after.state, after.env, after.trainer, after.version) == ("open", {"dataset": "e"}, None, None)
    assert after.creation != before.creation
    assert (await bench.store.runs.open_run()).creation == after.creation  # type: ignore[union-attr]
    assert await bench.whereabouts() == {}
    assert int(await bench.redis.get(keys.BYTES) or 0) == 0
    for call in trainer_calls(bench, old):
        assert (await refusal(call)).code == "fenced", "before a new trainer comes"
    new = await bench.start()
    for call in trainer_calls(bench, old):
        assert (await refusal(call)).code == "fenced", "and after"
    assert await bench.fill(1) == ["g00000000"]
    assert await bench.lease(new, "b1", 1) == ["g00000000"]


@pytest.mark.parametrize("state", [RunState.SUSPENDED, RunState.FINISHED])
async def test_a_run_without_a_finished_step_is_replaced_in_any_state(bench: Bench, state: RunState) -> None:
    if state is RunState.SUSPENDED:
        await create(bench, OTHER)
    else:
        await bench.store.runs.close(RUN)
    assert (await bench.store.runs.record(RUN)).state is state
    assert (await create(bench, dataset="e")).state is RunState.OPEN
    assert (await bench.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]


async def test_a_living_environment_keeps_its_run_from_being_replaced(bench: Bench) -> None:
    await bench.store.envs.register(RUN, "env-1", None, None)
    refused = await refusal(create(bench, dataset="e"))
    assert (refused.status, refused.code) == (409, "config_differs")
    assert "'env-1'" in refused.message
    assert 1 <= (refused.retry_after or 0) <= 60
    assert (await bench.store.runs.record(RUN)).env == {"dataset": "d"}
    await bench.store.envs.unregister(RUN, "env-1")
    assert (await create(bench, dataset="e")).env == {"dataset": "e"}, "one that ends by itself gives the run up"
    await bench.store.envs.register(RUN, "env-1", None, None)
    await fall_silent(bench, "env-1")
    assert (await create(bench, dataset="f")).env == {"dataset": "f"}


@pytest.mark.parametrize("how", ["version", "ack"])
async def test_a_run_with_a_finished_step_is_not_replaced(bench: Bench, how: str) -> None:
    incarnation = await bench.start()
    if how == "version":
        await bench.store.runs.record_version(RUN, incarnation, 1)
    else:
        await bench.fill(1)
        await bench.lease(incarnation, "b1", 1)
        await bench.store.queue.ack(RUN, incarnation, ["b1"])
    refused = await refusal(create(bench, dataset="e"))
    assert (refused.code, refused.retry_after) == ("config_differs", None)
    assert "dataset: 'd' -> 'e'" in refused.message


async def test_the_trainers_settings_may_change_until_a_step_is_finished(bench: Bench) -> None:
    await bench.store.runs.take(RUN, trainer(learning_rate=1e-3), [])
    record = await bench.store.runs.take(RUN, trainer(learning_rate=1e-2, groups=2), [])
    assert (record.incarnation, record.groups_per_step) == (2, 2)
    await bench.store.runs.record_version(RUN, 2, 1)
    refused = await refusal(bench.store.runs.take(RUN, trainer(learning_rate=1e-3, groups=2), []))
    assert refused.code == "config_differs"


async def test_a_run_of_atropos_is_not_replaced(bench: Bench) -> None:
    """The run's environments are not registered here, and its trainer need not report its steps."""
    await bench.store.runs.create("default", {}, 1, stack=None, protocol=Protocol.ATROPOS)
    refused = await refusal(bench.store.runs.create("default", {"dataset": "d"}, 2))
    assert refused.code == "config_differs"
    await bench.store.runs.create("native", {}, 1)
    refused = await refusal(bench.store.runs.create("native", {}, 1, stack=None, protocol=Protocol.ATROPOS))
    assert refused.code == "config_differs"


async def test_replacing_at_once_makes_one_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DELETED_AT_ONCE", 1)
    await bench.start()
    await bench.fill(4)
    records = await asyncio.gather(*[create(bench, dataset="e") for _ in range(5)])
    assert len({record.creation for record in records}) == 1
    assert await bench.whereabouts() == {}


async def test_the_script_checks_again_what_the_api_compared(bench: Bench) -> None:
    """Between the two calls, an environment registered, a step finished, or another call changed the settings."""
    digest = (await bench.store.runs.record(RUN)).digest

    async def change(how: str, compared: str) -> bytes:
        arguments = (RUN, '{"dataset":"e"}', "0" * 64, 2, "default", "gristmill", "00", how, compared)
        reply: Any = await bench.store.scripts.run("create", PREFIX, *arguments)
        return bytes(reply[0])

    for how in ("replace", "extend"):
        assert await change(how, "1" * 64) == b"DIFFERS"
    await bench.store.envs.register(RUN, "env-1", None, None)
    assert await change("replace", digest) == b"DIFFERS"
    await bench.store.envs.unregister(RUN, "env-1")
    incarnation = await bench.start()
    await bench.store.runs.record_version(RUN, incarnation, 1)
    assert await change("replace", digest) == b"DIFFERS"
    assert (await bench.store.runs.record(RUN)).digest == digest
    assert await change("extend", digest) == b"EXTENDED"


async def test_an_interrupted_run_is_suspended_by_another_and_loses_nothing(bench: Bench) -> None:
    incarnation = await bench.start()
    ready = await bench.fill(2)
    await bench.lease(incarnation, "b1", 1)
    held, given_back = await bench.ask("env-1", 2)
    await bench.store.permits.return_permit(RUN, "env-1", given_back, "abandoned")
    await create(bench, OTHER)
    assert (await bench.store.runs.open_run()).run_id == OTHER  # type: ignore[union-attr]
    assert (await bench.store.runs.record(RUN)).state is RunState.SUSPENDED
    for call in (
        *trainer_calls(bench, incarnation),
        bench.store.runs.take(RUN, trainer(), []),
        bench.store.permits.grant(RUN, "env-1", 1),
        bench.store.permits.renew(RUN, "env-1", [held]),
        bench.submit("env-1", held),
        bench.store.envs.register(RUN, "env-1", None, None),
        bench.store.envs.heartbeat(RUN, "env-1"),
    ):
        refused = await refusal(call)
        assert (refused.status, refused.code) == (409, "suspended")
    assert not await bench.submit("env-1", ready[0]), "a retry of a stored group gets the first answer"
    assert await bench.whereabouts() == {"leased": ready[:1], "ready": ready[1:]}

    resumed = await create(bench)
    assert (resumed.state, resumed.version) == ("open", f"{incarnation}.0")
    assert (await bench.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]
    assert (await bench.store.runs.record(OTHER)).state is RunState.SUSPENDED
    for call in trainer_calls(bench, incarnation):
        assert (await refusal(call)).code == "fenced", "it does not know what the model server serves now"
    incarnation = (await bench.store.runs.take(RUN, trainer(), [])).incarnation
    assert await bench.lease(incarnation, "b1", 2) == ready
    assert await bench.ask("env-2", 9) == [held, given_back], "their rows are not lost"


async def test_a_living_environment_keeps_its_stack(bench: Bench) -> None:
    await bench.store.envs.register(RUN, "env-1", None, None)
    await bench.store.envs.register(RUN, "env-2", None, None)
    await fall_silent(bench, "env-2")
    refused = await refusal(create(bench, OTHER))
    assert (refused.status, refused.code) == (409, "run_open")
    assert "'env-1'" in refused.message
    assert "'env-2'" not in refused.message
    assert 1 <= (refused.retry_after or 0) <= 60
    assert (await bench.store.runs.record(RUN)).state is RunState.OPEN
    await bench.store.runs.create("elsewhere", {}, 2, stack="second")
    await bench.store.runs.create("nowhere", {}, 2, stack=None)
    await fall_silent(bench, "env-1")
    assert (await create(bench, OTHER)).state is RunState.OPEN
    await bench.store.envs.register(OTHER, "env-3", None, None)
    assert (await refusal(create(bench))).code == "run_open", "resuming takes the stack, too"
    assert (await bench.store.runs.record(RUN)).state is RunState.SUSPENDED
    await bench.store.envs.unregister(OTHER, "env-3")
    assert (await create(bench)).state is RunState.OPEN


async def test_a_suspended_run_may_be_closed_and_leaves_the_stack_alone(bench: Bench) -> None:
    await create(bench, OTHER)
    assert (await refusal(bench.store.runs.delete(RUN))).code == "run_open"
    assert (await bench.store.runs.close(RUN)).state is RunState.FINISHED
    assert (await bench.store.runs.open_run()).run_id == OTHER  # type: ignore[union-attr]
    await bench.store.runs.delete(RUN)
    assert (await bench.store.runs.open_run()).run_id == OTHER  # type: ignore[union-attr]


@pytest.mark.parametrize("state", RunState)
async def test_more_training_steps_extend_a_run(bench: Bench, state: RunState) -> None:
    await create(bench, steps=1)  # replaces the trainer of the harness
    old = await bench.start(steps=1)
    trained = await bench.fill(4)
    await bench.lease(old, "b1", 4)
    await bench.store.queue.ack(RUN, old, ["b1"])
    await bench.store.runs.record_version(RUN, old, 1)
    creation = (await bench.store.runs.record(RUN)).creation
    if state is RunState.FINISHED:
        await bench.store.runs.finish(RUN, old)
    if state is not RunState.OPEN:
        await create(bench, OTHER)
    extended = await create(bench, steps=3)
    assert (extended.state, extended.creation) == ("open", creation)
    assert extended.env["trainer"] == {"training_steps": 3}
    assert (await bench.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]
    assert (await create(bench, steps=3)).incarnation == extended.incarnation, "a retry"
    assert (await refusal(bench.store.runs.finish(RUN, old))).code == "fenced", "it would end the run after one step"
    for steps in (1, 2, None):
        assert (await refusal(create(bench, steps=steps))).code == "config_differs"
    assert (await refusal(create(bench, dataset="e", steps=4))).code == "config_differs"
    for wrong in (trainer(steps=3, learning_rate=1.0), trainer(steps=3, groups=2)):
        assert (await refusal(bench.store.runs.take(RUN, wrong, [], 1))).code == "config_differs"
    record = await bench.store.runs.take(RUN, trainer(steps=3), [], 1)
    assert record.training_steps == 3
    assert (await refusal(bench.store.runs.take(RUN, trainer(steps=2), [], 1))).code == "config_differs"
    await bench.store.runs.record_version(RUN, record.incarnation, 1)
    assert await bench.whereabouts() == {"trained": trained}
    assert len(await bench.ask("env-1", 99)) == 4
    await bench.store.runs.record_version(RUN, record.incarnation, 2)
    assert len(await bench.ask("env-1", 99)) == 4


async def test_steps_that_only_the_trainer_told_are_extended_by_an_environment_that_names_more(bench: Bench) -> None:
    incarnation = await bench.start(steps=4)
    await bench.store.runs.record_version(RUN, incarnation, 1)
    assert (await refusal(create(bench, steps=4))).code == "config_differs"
    assert (await create(bench, steps=5)).env["trainer"] == {"training_steps": 5}


@pytest.mark.parametrize("wrong", [True, 3.5, "9", None])
async def test_what_is_not_a_number_of_steps_extends_nothing(bench: Bench, wrong: Any) -> None:
    incarnation = await bench.start(steps=2)
    await bench.store.runs.record_version(RUN, incarnation, 1)
    for block in ({"training_steps": wrong}, [wrong]):
        refused = await refusal(bench.store.runs.create(RUN, {"dataset": "d", "trainer": block}, 2))
        assert refused.code == "config_differs"


@pytest.mark.parametrize("state", RunState)
async def test_a_trainer_with_more_training_steps_extends_a_run(bench: Bench, state: RunState) -> None:
    incarnation = await bench.start(steps=1)
    await bench.store.runs.record_version(RUN, incarnation, 1)
    if state is RunState.FINISHED:
        await bench.store.runs.finish(RUN, incarnation)
    if state is not RunState.OPEN:
        await create(bench, OTHER)
        refused = await refusal(bench.store.runs.take(RUN, trainer(steps=1), [], 1))
        assert refused.code == state.value
        # The take would open a run, which needs the stack to itself, and no environment has asked for that run.
        refused = await refusal(bench.store.runs.take(RUN, trainer(steps=2), [], 1))
        assert (refused.code, refused.retry_after) == ("run_open", None)
        assert "'default'" in refused.message
        await bench.store.runs.close(OTHER)
    assert (await refusal(bench.store.runs.take(RUN, trainer(steps=2, groups=2), [], 1))).code == "config_differs"
    record = await bench.store.runs.take(RUN, trainer(steps=2), [], 1)
    assert (record.state, record.training_steps, record.incarnation) == ("open", 2, incarnation + 1)
    assert (await bench.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]


async def test_a_run_closed_before_its_first_step_stays_finished_to_its_trainer(bench: Bench) -> None:
    await bench.start(steps=1)
    await bench.store.runs.close(RUN)
    for steps in (1, 2):
        assert (await refusal(bench.store.runs.take(RUN, trainer(steps=steps), []))).code == "finished"


async def fill_with_everything(bench: Bench) -> int:
    """Fills a run with groups in every state, batches, environments, metrics and examples. Returns the bytes of
    the other run."""
    incarnation = await bench.start(groups=8)
    for env_id in ("env-1", "env-2", "env-3"):
        await bench.store.envs.register(RUN, env_id, None, None)
        await bench.store.journal.record_metrics(RUN, MetricsRow(source=env_id, step=1, values={"loss": 1.0}))
    await bench.fill(8)
    await bench.give_up(incarnation, groups=2)
    for batch_id in ("b1", "b2", "b3", "b4", "b5"):
        await bench.lease(incarnation, batch_id, 1)
    await bench.store.queue.ack(RUN, incarnation, ["b1"])
    for batch_id in ("b4", "b5"):
        await bench.expire_lease(batch_id)
    await bench.lease(incarnation, "b6", 9)
    await bench.ask("env-1", 1)
    await bench.store.envs.claim(RUN, "evaluation-1", "env-1", 60_000)
    await bench.store.runs.create(OTHER, {}, 2, stack=None)
    other = await bench.store.runs.take(OTHER, trainer(), [])
    await bench.store.runs.record_version(OTHER, other.incarnation, 0)
    (permit,) = (await bench.store.permits.grant(OTHER, "env-1", 1)).permits
    await bench.store.queue.submit(OTHER, "env-1", submission(permit.group_id))
    return 100


@pytest.mark.parametrize("at_once", [1, 2, 3, 512])
async def test_a_run_is_deleted_in_parts_and_leaves_its_fence(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(runs, "DELETED_AT_ONCE", at_once)
    beside = await fill_with_everything(bench)
    await bench.store.runs.close(RUN)
    await bench.store.runs.delete(RUN)
    assert {name for name in await key_names(bench.redis) if name.startswith(PREFIX)} == {PREFIX + "fence"}
    assert 0 < await bench.redis.pttl(PREFIX + "fence") <= FENCE_S * 1000
    assert int(await bench.redis.get(keys.BYTES) or 0) == beside
    assert await bench.redis.exists(keys.DELETING) == 0
    assert (await refusal(bench.store.runs.delete(RUN))).code == "run_missing"
    incarnation = (await bench.store.runs.record(OTHER)).incarnation
    assert len((await bench.store.queue.lease(OTHER, incarnation, "b1", LeaseSize("groups", 1))).groups) == 1


@pytest.mark.parametrize("at_once", range(1, 40, 3))
async def test_a_deletion_that_was_interrupted_is_continued(bench: Bench, at_once: int) -> None:
    """The next call that deletes or creates the run deletes the rest. Until then the run does not exist for clients,
    and its bytes count as long as they are stored."""
    beside = await fill_with_everything(bench)
    incarnation = (await bench.store.runs.record(RUN)).incarnation
    await bench.store.runs.close(RUN)
    held = (await bench.store.runs.status(RUN)).bytes
    for _ in range(2):
        reply = await bench.store.scripts.run("delete", PREFIX, at_once, 1000, "begin")
        groups = len(await bench.redis.keys(PREFIX + "payload:*"))
        if reply == [b"OK"]:
            break
        assert reply == [b"MORE"]
        assert int(await bench.redis.get(keys.BYTES) or 0) == beside + 100 * groups
        assert groups < held / 100
        assert await bench.redis.smembers(keys.DELETING) == {RUN.encode()}
        assert (await refusal(bench.store.runs.record(RUN))).code == "run_missing"
        assert (await refusal(bench.store.runs.audit(RUN))).code == "run_missing"
        assert [record.run_id for record in await bench.store.runs.all()] == [OTHER]
    if at_once % 2:
        with contextlib.suppress(ApiProblem):  # done already
            await bench.store.runs.delete(RUN)
        assert {name for name in await key_names(bench.redis) if name.startswith(PREFIX)} == {PREFIX + "fence"}
    record = await create(bench)
    assert record.incarnation == incarnation + 1
    assert await bench.whereabouts() == {}
    assert await bench.store.journal.sources(RUN) == []
    assert await bench.store.envs.all(RUN) == []
    assert int(await bench.redis.get(keys.BYTES) or 0) == beside
    for call in trainer_calls(bench, incarnation):
        assert (await refusal(call)).code == "fenced", "a trainer that outlived its run"


async def test_what_happens_to_a_run_is_told(bench: Bench) -> None:
    ear = Ear(bench.redis, RUN)
    await ear.open()
    await bench.start()
    await bench.ask("env-1", 1)
    await ear.hear()
    woken = {f"ready {PREFIX}", f"permits {PREFIX}"}
    topics, events = await ear.hear(create(bench, OTHER))
    assert (topics - {"open", f"events {keys.prefix(OTHER)}"}, events) == (woken, [{"kind": "suspend"}])
    topics, events = await ear.hear(create(bench))
    others = {f"ready {keys.prefix(OTHER)}", f"permits {keys.prefix(OTHER)}"}
    assert (topics, events) == (woken | others | {"open"}, [{"kind": "resume"}])
    await bench.store.runs.record_version(RUN, (await bench.store.runs.take(RUN, trainer(), [])).incarnation, 1)
    await ear.hear()
    assert await ear.hear(create(bench, steps=11)) == (woken | {"open"}, [{"kind": "extend"}])
    await ear.close()
