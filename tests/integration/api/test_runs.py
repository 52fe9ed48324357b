"""The run record: opened by an environment, taken by a trainer, finished."""

from __future__ import annotations

import pytest
from tests.integration.api.bench import PREFIX, RUN, Bench, submission, trainer
from tests.support.errors import raises
from tests.support.redis_contents import key_names

from gristmill import MetricsRow
from gristmill_api.errors import ApiProblem
from gristmill_api.store import LeaseSize, keys


async def test_the_same_settings_join_and_others_are_refused_by_name(bench: Bench) -> None:
    await bench.store.envs.register(RUN, "env-1", None, None)
    record, new = await bench.store.runs.create(RUN, {"dataset": "d"}, 2)
    assert not new
    assert record.state == "open"
    with raises(ApiProblem, "config_differs") as refused:
        await bench.store.runs.create(RUN, {"dataset": "e"}, 4)
    assert all(change in refused.value.message for change in ("dataset: 'd' -> 'e'", "group_size: 2 -> 4"))


async def test_one_run_is_open_at_a_time(bench: Bench) -> None:
    await bench.store.envs.register(RUN, "env-1", None, None)
    with raises(ApiProblem, "run_open") as refused:
        await bench.store.runs.create("other", {}, 2)
    assert repr(RUN) in refused.value.message
    incarnation = await bench.start()
    await bench.store.runs.finish(RUN, incarnation)
    assert await bench.store.runs.open_run() is None
    _, new = await bench.store.runs.create("other", {}, 2)
    assert new
    assert [record.run_id for record in await bench.store.runs.all()] == [RUN, "other"]


async def test_a_finished_run_is_told_so(bench: Bench) -> None:
    incarnation = await bench.start()
    held = await bench.ask("env-1", 1)
    await bench.store.runs.finish(RUN, incarnation)
    assert (await bench.store.runs.finish(RUN, incarnation)).state == "finished", "a retry"
    assert (await bench.create()).state == "finished"
    assert (await bench.store.permits.grant(RUN, "env-1", 1)).state == "finished"
    assert (await bench.store.runs.status(RUN)).outstanding == 0
    for call in (
        bench.store.runs.take(RUN, trainer(), []),
        bench.lease(incarnation, "b", 1),
        bench.store.runs.record_version(RUN, incarnation, 1),
        bench.submit("env-1", held[0]),
    ):
        with pytest.raises(ApiProblem) as refused:
            await call
        assert refused.value.code == "finished"


@pytest.mark.parametrize("taken", [False, True])
async def test_an_operator_ends_a_run_whoever_has_it(bench: Bench, taken: bool) -> None:
    if taken:
        incarnation = await bench.start()
        ready = await bench.fill(2)
    assert (await bench.store.runs.close(RUN)).state == "finished"
    assert (await bench.store.runs.close(RUN)).state == "finished", "a retry"
    if taken:
        assert await bench.whereabouts() == {"ready": ready}, "closing loses nothing"
        with pytest.raises(ApiProblem) as refused:
            await bench.lease(incarnation, "b", 1)
        assert refused.value.code == "finished"
    _, new = await bench.store.runs.create("other", {}, 2)
    assert new
    with raises(ApiProblem, "run_missing") as refused:
        await bench.store.runs.close("nowhere")
    assert "'nowhere'" in refused.value.message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 3}, ["batch_size", "gradient_accumulation_steps", "group_size 2"]),
        ({"training_steps": 0}, ["training_steps"]),
        ({"max_staleness": None}, ["max_staleness"]),
        ({"batch_size": True}, ["batch_size"]),
    ],
)
async def test_a_trainer_whose_numbers_do_not_fit_is_refused(
    bench: Bench, change: dict[str, object], named: list[str]
) -> None:
    with raises(ApiProblem, "bad_config") as refused:
        await bench.store.runs.take(RUN, {**trainer(), **change}, [])
    assert refused.value.status == 422
    assert all(name in refused.value.message for name in named)
    assert (await bench.store.runs.record(RUN)).incarnation == 0


async def test_another_trainer_half_is_refused(bench: Bench) -> None:
    record = await bench.store.runs.take(RUN, trainer(learning_rate=1e-3), [])
    assert (record.incarnation, record.groups_per_step, record.training_steps) == (1, 4, 10)
    await bench.store.runs.record_version(RUN, 1, 1)
    with raises(ApiProblem, "config_differs") as refused:
        await bench.store.runs.take(RUN, trainer(learning_rate=1e-2), [])
    assert "learning_rate: 0.001 -> 0.01" in refused.value.message
    assert (await bench.store.runs.take(RUN, trainer(learning_rate=1e-3), [])).incarnation == 2


async def test_a_taken_run_fences_the_trainer_before(bench: Bench) -> None:
    old = await bench.start()
    await bench.fill(4)
    await bench.lease(old, "b1", 2)
    new = await bench.start()
    for call in (
        bench.lease(old, "b2", 1),
        bench.store.queue.extend(RUN, old, ["b1"]),
        bench.store.queue.ack(RUN, old, ["b1"]),
        bench.store.runs.record_version(RUN, old, 5),
        bench.store.runs.finish(RUN, old),
    ):
        with raises(ApiProblem, "fenced") as refused:
            await call
        assert all(f"incarnation {number}" in refused.value.message for number in (old, new))
    assert (await bench.store.runs.record(RUN)).version == "2.0"


async def test_a_take_that_is_repeated_is_one_take(bench: Bench) -> None:
    first = await bench.store.runs.take(RUN, trainer(), [], 0, taker="one")
    assert await bench.store.runs.take(RUN, trainer(), [], 0, taker="one") == first
    second = await bench.store.runs.take(RUN, trainer(), [], 0, taker="two")
    assert (second.incarnation, second.taker) == (first.incarnation + 1, "two")
    # Without the name of a taker, each call is a take.
    for number in (1, 2):
        assert (await bench.store.runs.take(RUN, trainer(), [], 0)).incarnation == second.incarnation + number


async def test_take_settles_what_the_checkpoint_covers_and_returns_the_rest_in_place(bench: Bench) -> None:
    old = await bench.start()
    a, b, c, d = await bench.fill(4)
    await bench.lease(old, "b1", 2)
    await bench.lease(old, "b2", 1)
    # b was leased and d was not; both are in the checkpoint. An unknown id has no effect.
    new = (await bench.store.runs.take(RUN, trainer(), [b, d, "g99999999"])).incarnation
    assert await bench.whereabouts() == {"ready": [a, c], "trained": [b, d]}
    assert await bench.lease(new, "b1", 2) == [a, c], "batch ids belong to an incarnation"
    status = await bench.store.runs.status(RUN)
    assert (status.accepted, status.bytes) == (4, 200)


async def test_a_trainer_that_goes_back_gets_permits_for_the_steps_it_does_again(bench: Bench) -> None:
    """The weights do not contain the groups that were trained after the older checkpoint. Those groups must not block
    the run."""
    incarnation = await bench.start()
    for step in range(2):
        await bench.store.runs.record_version(RUN, incarnation, step)
        await bench.fill(4)
        await bench.lease(incarnation, f"b{step}", 4)
        await bench.store.queue.ack(RUN, incarnation, [f"b{step}"])
    await bench.store.runs.record_version(RUN, incarnation, 2)
    (waiting,) = await bench.fill(1)
    incarnation = (await bench.store.runs.take(RUN, trainer(), [], 1)).incarnation
    await bench.store.runs.record_version(RUN, incarnation, 1)
    assert len(await bench.ask("env-1", 9)) == 3, "step 2 again, minus the group that is ready"
    assert await bench.whereabouts() | {"trained": []} == {
        "ready": [waiting],
        "trained": [],
        "outstanding": ["g00000009", "g00000010", "g00000011"],
    }
    # The newest checkpoint reverts nothing: the work that a kill interrupted keeps its counts.
    before = await bench.store.runs.status(RUN)
    await bench.store.runs.take(RUN, trainer(), [], 1)
    assert (await bench.store.runs.status(RUN)).accepted == before.accepted


async def test_take_refuses_a_checkpoint_of_another_creation_of_the_run(bench: Bench) -> None:
    """A run is deleted and created again. Its first groups have the ids of groups that the old checkpoint covers."""
    await bench.start()
    first = await bench.store.runs.record(RUN)
    covered = await bench.fill(2)
    await bench.store.runs.close(RUN)
    await bench.store.runs.delete(RUN)
    await bench.create()
    incarnation = await bench.start()
    assert await bench.fill(2) == covered
    second = await bench.store.runs.record(RUN)
    assert len({first.creation, second.creation, ""}) == 3
    for ids, step in ((covered, 1), ([], 1), ([], 0)):
        with pytest.raises(ApiProblem) as refused:
            await bench.store.runs.take(RUN, trainer(), ids, step, first.creation)
        assert (refused.value.status, refused.value.code) == (409, "other_creation")
    assert await bench.whereabouts() == {"ready": covered}, "nothing was settled"
    assert (await bench.store.runs.record(RUN)).incarnation == incarnation
    taken = await bench.store.runs.take(RUN, trainer(), covered, 1, second.creation)
    assert (taken.incarnation, taken.creation) == (incarnation + 1, second.creation)
    assert await bench.whereabouts() == {"trained": covered}


async def test_versions_only_go_forward(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.store.runs.record_version(RUN, incarnation, 3)
    assert (await bench.store.runs.record_version(RUN, incarnation, 3)).version == "1.3"
    with raises(ApiProblem, "version_backwards") as refused:
        await bench.store.runs.record_version(RUN, incarnation, 2)
    assert all(step in refused.value.message for step in ("step 3", "step 2"))
    # A trainer that resumes from an earlier checkpoint repeats steps under a new incarnation.
    incarnation = (await bench.store.runs.take(RUN, trainer(), [])).incarnation
    assert (await bench.store.runs.record(RUN)).version == "1.3"
    assert (await bench.store.runs.record_version(RUN, incarnation, 1)).version == "2.1"


async def test_a_finished_runs_version_may_be_told_again(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.store.runs.record_version(RUN, incarnation, 2)
    await bench.store.runs.finish(RUN, incarnation)
    assert (await bench.store.runs.record_version(RUN, incarnation, 2)).version == f"{incarnation}.2"
    with pytest.raises(ApiProblem) as refused:
        await bench.store.runs.record_version(RUN, incarnation, 3)
    assert refused.value.code == "finished"


async def test_runs_beside_each_other_do_not_meet(bench: Bench) -> None:
    """Two runs of two stacks use the same ids, holders and batch names; one run ends and is deleted."""
    incarnation = await bench.start()
    ids = await bench.fill(4)
    other = "run-2"
    await bench.store.runs.create(other, {}, 2, stack="second")
    assert (await bench.store.runs.open_run("second")).run_id == other  # type: ignore[union-attr]
    assert (await bench.store.runs.take(other, trainer(), [])).incarnation == incarnation
    await bench.store.runs.record_version(other, incarnation, 0)
    granted = [permit.group_id for permit in (await bench.store.permits.grant(other, "env-1", 4)).permits]
    assert granted == ids
    for group_id in granted:
        assert await bench.store.queue.submit(other, "env-1", submission(group_id, "other"))
    await bench.lease(incarnation, "b1", 2)
    leased = await bench.store.queue.lease(other, incarnation, "b1", LeaseSize("groups", 3))
    assert len(leased.groups) == 3
    await bench.store.queue.ack(other, incarnation, ["b1"])
    assert await bench.whereabouts() == {"leased": ids[:2], "ready": ids[2:]}
    with pytest.raises(ApiProblem) as refused:
        await bench.store.runs.delete(other)
    assert refused.value.code == "run_open"
    await bench.store.runs.close(other)
    await bench.store.runs.delete(other)
    assert await bench.store.runs.open_run("second") is None
    assert [record.run_id for record in await bench.store.runs.all()] == [RUN]
    assert await bench.redis.keys("*run-2*") == [b"gm:{run-2}:fence"]
    assert int(await bench.redis.get(keys.BYTES) or 0) == 400
    assert (await bench.store.queue.ack(RUN, incarnation, ["b1"])).groups == 2
    with raises(ApiProblem, "run_missing") as missing:
        await bench.store.runs.delete(other)
    assert "'run-2'" in missing.value.message


async def test_a_run_without_a_stack_stands_in_nobodys_way(bench: Bench) -> None:
    for name in ("a", "b"):
        _, new = await bench.store.runs.create(name, {}, 2, stack=None)
        assert new
    assert (await bench.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]
    await bench.store.envs.register("a", "env-1", None, None)
    with raises(ApiProblem, "config_differs") as refused:
        await bench.store.runs.create("a", {}, 2)
    assert "stack: None -> 'default'" in refused.value.message
    await bench.store.runs.close("a")
    assert (await bench.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]


async def test_a_deleted_run_leaves_nothing_but_its_fence(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.store.envs.register(RUN, "env-1", 1.0, None)
    await bench.fill(4)
    await bench.give_up(incarnation)
    await bench.lease(incarnation, "b1", 1)
    await bench.lease(incarnation, "b2", 1)
    await bench.store.queue.ack(RUN, incarnation, ["b1"])
    await bench.lease(incarnation, "b3", 1)
    await bench.expire_lease("b3")
    await bench.lease(incarnation, "b4", 9)
    assert await bench.redis.sismember(PREFIX + "expired", "b3")
    await bench.ask("env-1", 1)
    await bench.store.journal.record_metrics(RUN, MetricsRow(source="trainer", step=1, values={"loss": 1.0}))
    await bench.store.runs.close(RUN)
    await bench.store.runs.delete(RUN)
    assert await key_names(bench.redis) == {keys.BYTES, keys.JOURNAL, PREFIX + "fence"}
    assert int(await bench.redis.get(keys.JOURNAL) or 0) == 0
    assert int(await bench.redis.get(keys.BYTES) or 0) == 0
    assert (await bench.create()).state == "open", "the id is free again"


async def test_a_run_that_is_not_there_is_missing_to_every_verb(bench: Bench) -> None:
    store, run = bench.store, "none"
    for call in (
        store.permits.grant(run, "env-1", 1),
        store.permits.renew(run, "env-1", None),
        store.permits.return_permit(run, "env-1", "g00000000", "abandoned"),
        store.permits.release_all(run, "env-1"),
        store.queue.submit(run, "env-1", submission("g00000000")),
        store.queue.lease(run, 1, "b1", LeaseSize("groups", 1)),
        store.queue.extend(run, 1, ["b1"]),
        store.queue.nack(run, 1, ["b1"]),
        store.queue.ack(run, 1, ["b1"]),
        store.runs.record_version(run, 1, 0),
        store.runs.finish(run, 1),
        store.runs.close(run),
        store.runs.delete(run),
        store.runs.status(run),
        store.dead_letters.replay(run, None),
        store.dead_letters.purge(run, None),
        store.envs.register(run, "env-1", None, None),
        store.envs.heartbeat(run, "env-1"),
        store.envs.unregister(run, "env-1"),
        store.journal.record_metrics(run, MetricsRow(source="trainer", step=1, values={"loss": 1.0})),
    ):
        with pytest.raises(ApiProblem) as refused:
            await call
        assert refused.value.code == "run_missing", call
    for script, arguments in {"take": ("{}", 1, 1, 1, "", ""), "archived": ("g00000000",)}.items():
        assert await store.scripts.run(script, keys.prefix(run), *arguments) == [b"MISSING"]
    assert await bench.redis.keys(keys.prefix(run) + "*") == []
