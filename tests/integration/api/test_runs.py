"""The run record: opened by an environment, taken by a trainer, finished."""

from __future__ import annotations

import pytest
from tests.integration.api.store_harness import RUN, StoreHarness, submission, trainer
from tests.support.errors import raises

from gristmill import MetricsRow
from gristmill_api.errors import ApiProblem
from gristmill_api.store import LeaseSize, keys


async def test_create_joins_with_the_same_settings_and_names_different_ones(harness: StoreHarness) -> None:
    await harness.store.envs.register(RUN, "env-1", None)
    record, new = await harness.store.runs.create(RUN, {"dataset": "d"}, 2)
    assert not new
    assert record.state == "open"
    with raises(ApiProblem, "config_differs") as refused:
        await harness.store.runs.create(RUN, {"dataset": "e"}, 4)
    assert all(change in refused.value.message for change in ("dataset: 'd' -> 'e'", "group_size: 2 -> 4"))


async def test_whole_numbers_with_and_without_a_decimal_point_are_the_same_settings(harness: StoreHarness) -> None:
    runs = harness.store.runs
    created, _ = await runs.create("one", {"temperature": 1, "weights": [2.0]}, 2, stack=None)
    await runs.take("one", trainer(seed=1), [])
    await runs.record_version("one", 1, 1)
    joined, new = await runs.create("one", {"temperature": 1.0, "weights": [2]}, 2, stack=None)
    assert (new, joined.digest, str(joined.env)) == (False, created.digest, str(created.env))
    taken = await runs.take("one", trainer(seed=1.0), [])
    assert (taken.incarnation, str((taken.trainer or {})["seed"])) == (2, "1")
    for other in (True, 1.5):
        with raises(ApiProblem, "config_differs") as refused:
            await runs.take("one", trainer(seed=other), [])
        assert f"seed: 1 -> {other}" in refused.value.message
    await runs.close("one")
    with raises(ApiProblem, "finished"):
        await runs.take("one", trainer(seed=1.0), [])


async def test_one_run_is_open_at_a_time(harness: StoreHarness) -> None:
    await harness.store.envs.register(RUN, "env-1", None)
    with raises(ApiProblem, "run_open") as refused:
        await harness.store.runs.create("other", {}, 2)
    assert repr(RUN) in refused.value.message
    incarnation = await harness.start()
    await harness.store.runs.finish(RUN, incarnation)
    assert await harness.store.runs.open_run() is None
    _, new = await harness.store.runs.create("other", {}, 2)
    assert new
    assert [record.run_id for record in await harness.store.runs.all()] == [RUN, "other"]


async def test_every_call_on_a_finished_run_reports_finished(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    held = await harness.ask("env-1", 1)
    await harness.store.runs.finish(RUN, incarnation)
    assert (await harness.store.runs.finish(RUN, incarnation)).state == "finished", "a retry"
    assert (await harness.create()).state == "finished"
    assert (await harness.store.permits.grant(RUN, "env-1", 1)).state == "finished"
    assert (await harness.store.runs.status(RUN)).outstanding == 0
    for call in (
        harness.store.runs.take(RUN, trainer(), []),
        harness.lease(incarnation, "b", 1),
        harness.store.runs.record_version(RUN, incarnation, 1),
        harness.submit("env-1", held[0]),
    ):
        with pytest.raises(ApiProblem) as refused:
            await call
        assert refused.value.code == "finished"


@pytest.mark.parametrize("taken", [False, True])
async def test_close_ends_a_run_with_or_without_a_trainer(harness: StoreHarness, taken: bool) -> None:
    if taken:
        incarnation = await harness.start()
        ready = await harness.fill(2)
    assert (await harness.store.runs.close(RUN)).state == "finished"
    assert (await harness.store.runs.close(RUN)).state == "finished", "a retry"
    if taken:
        assert await harness.whereabouts() == {"ready": ready}, "closing loses nothing"
        with pytest.raises(ApiProblem) as refused:
            await harness.lease(incarnation, "b", 1)
        assert refused.value.code == "finished"
    _, new = await harness.store.runs.create("other", {}, 2)
    assert new
    with raises(ApiProblem, "run_missing") as refused:
        await harness.store.runs.close("nowhere")
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
async def test_take_refuses_inconsistent_trainer_settings(
    harness: StoreHarness, change: dict[str, object], named: list[str]
) -> None:
    with raises(ApiProblem, "bad_config") as refused:
        await harness.store.runs.take(RUN, {**trainer(), **change}, [])
    assert refused.value.status == 422
    assert all(name in refused.value.message for name in named)
    assert (await harness.store.runs.record(RUN)).incarnation == 0


async def test_take_refuses_changed_trainer_settings_after_a_step(harness: StoreHarness) -> None:
    record = await harness.store.runs.take(RUN, trainer(learning_rate=1e-3), [])
    assert (record.incarnation, record.groups_per_step, record.training_steps) == (1, 4, 10)
    await harness.store.runs.record_version(RUN, 1, 1)
    with raises(ApiProblem, "config_differs") as refused:
        await harness.store.runs.take(RUN, trainer(learning_rate=1e-2), [])
    assert "learning_rate: 0.001 -> 0.01" in refused.value.message
    assert (await harness.store.runs.take(RUN, trainer(learning_rate=1e-3), [])).incarnation == 2


async def test_take_fences_the_previous_trainer(harness: StoreHarness) -> None:
    old = await harness.start()
    await harness.fill(4)
    await harness.lease(old, "b1", 2)
    new = await harness.start()
    for call in (
        harness.lease(old, "b2", 1),
        harness.store.queue.extend(RUN, old, ["b1"]),
        harness.store.queue.ack(RUN, old, ["b1"]),
        harness.store.runs.record_version(RUN, old, 5),
        harness.store.runs.finish(RUN, old),
    ):
        with raises(ApiProblem, "fenced") as refused:
            await call
        assert all(f"incarnation {number}" in refused.value.message for number in (old, new))
    assert (await harness.store.runs.record(RUN)).version == "2.0"


async def test_repeated_take_of_one_taker_counts_once(harness: StoreHarness) -> None:
    first = await harness.store.runs.take(RUN, trainer(), [], 0, taker="one")
    assert await harness.store.runs.take(RUN, trainer(), [], 0, taker="one") == first
    second = await harness.store.runs.take(RUN, trainer(), [], 0, taker="two")
    assert (second.incarnation, second.taker) == (first.incarnation + 1, "two")
    # Without the name of a taker, each call is a take.
    for number in (1, 2):
        assert (await harness.store.runs.take(RUN, trainer(), [], 0)).incarnation == second.incarnation + number


async def test_take_settles_what_the_checkpoint_covers_and_returns_the_rest_in_place(harness: StoreHarness) -> None:
    old = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.lease(old, "b1", 2)
    await harness.lease(old, "b2", 1)
    # b was leased and d was not; both are in the checkpoint. An unknown id has no effect.
    new = (await harness.store.runs.take(RUN, trainer(), [b, d, "g99999999"])).incarnation
    assert await harness.whereabouts() == {"ready": [a, c], "trained": [b, d]}
    assert await harness.lease(new, "b1", 2) == [a, c], "batch ids belong to an incarnation"
    status = await harness.store.runs.status(RUN)
    assert (status.accepted, status.bytes) == (4, 200)


async def test_trainer_that_resumes_earlier_gets_permits_for_the_repeated_steps(harness: StoreHarness) -> None:
    """The weights do not contain the groups that were trained after the older checkpoint. Those groups must not block
    the run."""
    incarnation = await harness.start()
    for step in range(2):
        await harness.store.runs.record_version(RUN, incarnation, step)
        await harness.fill(4)
        await harness.lease(incarnation, f"b{step}", 4)
        await harness.store.queue.ack(RUN, incarnation, [f"b{step}"])
    await harness.store.runs.record_version(RUN, incarnation, 2)
    (waiting,) = await harness.fill(1)
    incarnation = (await harness.store.runs.take(RUN, trainer(), [], 1)).incarnation
    await harness.store.runs.record_version(RUN, incarnation, 1)
    assert len(await harness.ask("env-1", 9)) == 3, "step 2 again, minus the group that is ready"
    assert await harness.whereabouts() | {"trained": []} == {
        "ready": [waiting],
        "trained": [],
        "outstanding": ["g00000009", "g00000010", "g00000011"],
    }
    # The newest checkpoint reverts nothing: the work that a kill interrupted keeps its counts.
    before = await harness.store.runs.status(RUN)
    await harness.store.runs.take(RUN, trainer(), [], 1)
    assert (await harness.store.runs.status(RUN)).accepted == before.accepted


async def test_take_refuses_a_checkpoint_of_another_creation_of_the_run(harness: StoreHarness) -> None:
    """A run is deleted and created again. Its first groups have the ids of groups that the old checkpoint covers."""
    await harness.start()
    first = await harness.store.runs.record(RUN)
    covered = await harness.fill(2)
    await harness.store.runs.close(RUN)
    await harness.store.runs.delete(RUN)
    await harness.create()
    incarnation = await harness.start()
    assert await harness.fill(2) == covered
    second = await harness.store.runs.record(RUN)
    assert len({first.creation, second.creation, ""}) == 3
    for ids, step in ((covered, 1), ([], 1), ([], 0)):
        with pytest.raises(ApiProblem) as refused:
            await harness.store.runs.take(RUN, trainer(), ids, step, first.creation)
        assert (refused.value.status, refused.value.code) == (409, "other_creation")
    assert await harness.whereabouts() == {"ready": covered}, "nothing was settled"
    assert (await harness.store.runs.record(RUN)).incarnation == incarnation
    taken = await harness.store.runs.take(RUN, trainer(), covered, 1, second.creation)
    assert (taken.incarnation, taken.creation) == (incarnation + 1, second.creation)
    assert await harness.whereabouts() == {"trained": covered}


async def test_versions_only_go_forward(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    await harness.store.runs.record_version(RUN, incarnation, 3)
    assert (await harness.store.runs.record_version(RUN, incarnation, 3)).version == "1.3"
    with raises(ApiProblem, "version_backwards") as refused:
        await harness.store.runs.record_version(RUN, incarnation, 2)
    assert all(step in refused.value.message for step in ("step 3", "step 2"))
    # A trainer that resumes from an earlier checkpoint repeats steps under a new incarnation.
    incarnation = (await harness.store.runs.take(RUN, trainer(), [])).incarnation
    assert (await harness.store.runs.record(RUN)).version == "1.3"
    assert (await harness.store.runs.record_version(RUN, incarnation, 1)).version == "2.1"


async def test_finished_run_accepts_its_last_version_again(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    await harness.store.runs.record_version(RUN, incarnation, 2)
    await harness.store.runs.finish(RUN, incarnation)
    assert (await harness.store.runs.record_version(RUN, incarnation, 2)).version == f"{incarnation}.2"
    with pytest.raises(ApiProblem) as refused:
        await harness.store.runs.record_version(RUN, incarnation, 3)
    assert refused.value.code == "finished"


async def test_runs_of_two_stacks_with_equal_ids_are_independent(harness: StoreHarness) -> None:
    """Two runs of two stacks use the same ids, holders and batch names; one run ends and is deleted."""
    incarnation = await harness.start()
    ids = await harness.fill(4)
    other = "run-2"
    await harness.store.runs.create(other, {}, 2, stack="second")
    assert (await harness.store.runs.open_run("second")).run_id == other  # type: ignore[union-attr]
    assert (await harness.store.runs.take(other, trainer(), [])).incarnation == incarnation
    await harness.store.runs.record_version(other, incarnation, 0)
    granted = [permit.group_id for permit in (await harness.store.permits.grant(other, "env-1", 4)).permits]
    assert granted == ids
    for group_id in granted:
        assert await harness.store.queue.submit(other, "env-1", submission(group_id, "other"))
    await harness.lease(incarnation, "b1", 2)
    leased = await harness.store.queue.lease(other, incarnation, "b1", LeaseSize("groups", 3))
    assert len(leased.groups) == 3
    await harness.store.queue.ack(other, incarnation, ["b1"])
    assert await harness.whereabouts() == {"leased": ids[:2], "ready": ids[2:]}
    with pytest.raises(ApiProblem) as refused:
        await harness.store.runs.delete(other)
    assert refused.value.code == "run_open"
    await harness.store.runs.close(other)
    await harness.store.runs.delete(other)
    assert await harness.store.runs.open_run("second") is None
    assert [record.run_id for record in await harness.store.runs.all()] == [RUN]
    assert await harness.redis.keys("*run-2*") == [b"gm:{run-2}:fence"]
    assert int(await harness.redis.get(keys.BYTES) or 0) == 400
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).groups == 2
    with raises(ApiProblem, "run_missing") as missing:
        await harness.store.runs.delete(other)
    assert "'run-2'" in missing.value.message


async def test_run_without_a_stack_blocks_no_other_run(harness: StoreHarness) -> None:
    for name in ("a", "b"):
        _, new = await harness.store.runs.create(name, {}, 2, stack=None)
        assert new
    assert (await harness.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]
    await harness.store.envs.register("a", "env-1", None)
    with raises(ApiProblem, "config_differs") as refused:
        await harness.store.runs.create("a", {}, 2)
    assert "stack: None -> 'default'" in refused.value.message
    await harness.store.runs.close("a")
    assert (await harness.store.runs.open_run()).run_id == RUN  # type: ignore[union-attr]


async def test_every_verb_reports_run_missing_for_an_unknown_run(harness: StoreHarness) -> None:
    store, run = harness.store, "none"
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
        store.envs.register(run, "env-1", None),
        store.envs.heartbeat(run, "env-1"),
        store.envs.unregister(run, "env-1"),
        store.journal.record_metrics(run, MetricsRow(source="trainer", step=1, values={"loss": 1.0})),
    ):
        with pytest.raises(ApiProblem) as refused:
            await call
        assert refused.value.code == "run_missing", call
    for script, arguments in {
        "take": ("{}", 1, 1, 1, "", ""),
        "archived": ("", "", "g00000000"),
        "fates_written": ("", 1),
    }.items():
        assert await store.scripts.run(script, keys.prefix(run), *arguments) == [b"MISSING"]
    assert await harness.redis.keys(keys.prefix(run) + "*") == []
