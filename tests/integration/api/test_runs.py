"""The run record: opened by an environment, taken by a trainer, finished."""

from __future__ import annotations

import pytest
from tests.integration.api.bench import RUN, Bench, trainer

from gristmill_api.errors import Refused


async def test_the_same_settings_join_and_others_are_refused_by_name(bench: Bench) -> None:
    record, new = await bench.store.create_run(RUN, {"dataset": "d"}, 2)
    assert not new
    assert record.state == "open"
    with pytest.raises(Refused, match=r"dataset: 'd' -> 'e'; group_size: 2 -> 4") as refused:
        await bench.store.create_run(RUN, {"dataset": "e"}, 4)
    assert refused.value.code == "config_differs"


async def test_one_run_is_open_at_a_time(bench: Bench) -> None:
    with pytest.raises(Refused, match=RUN) as refused:
        await bench.store.create_run("other", {}, 2)
    assert refused.value.code == "run_open"
    incarnation = await bench.start()
    await bench.store.finish(RUN, incarnation)
    assert await bench.store.open_run() is None
    _, new = await bench.store.create_run("other", {}, 2)
    assert new
    assert [record.run_id for record in await bench.store.runs()] == [RUN, "other"]


async def test_a_finished_run_is_told_so(bench: Bench) -> None:
    incarnation = await bench.start()
    held = await bench.ask("env-1", 1)
    await bench.store.finish(RUN, incarnation)
    assert (await bench.store.finish(RUN, incarnation)).state == "finished", "a retry"
    assert (await bench.create()).state == "finished"
    assert (await bench.store.permits(RUN, "env-1", 1)).state == "finished"
    assert (await bench.store.status(RUN)).outstanding == 0
    for call in (
        bench.store.take(RUN, trainer(), []),
        bench.lease(incarnation, "b", 1),
        bench.store.record_version(RUN, incarnation, 1),
        bench.submit("env-1", held[0]),
    ):
        with pytest.raises(Refused) as refused:
            await call
        assert refused.value.code == "finished"


@pytest.mark.parametrize("taken", [False, True])
async def test_an_operator_ends_a_run_whoever_has_it(bench: Bench, taken: bool) -> None:
    if taken:
        incarnation = await bench.start()
        ready = await bench.fill(2)
    assert (await bench.store.close_run(RUN)).state == "finished"
    assert (await bench.store.close_run(RUN)).state == "finished", "a retry"
    if taken:
        assert await bench.whereabouts() == {"ready": ready}, "closing loses nothing"
        with pytest.raises(Refused) as refused:
            await bench.lease(incarnation, "b", 1)
        assert refused.value.code == "finished"
    _, new = await bench.store.create_run("other", {}, 2)
    assert new
    with pytest.raises(Refused, match="no run 'nowhere'"):
        await bench.store.close_run("nowhere")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_size": 3}, "batch_size 3 x gradient_accumulation_steps 1 = 3 .* group_size 2"),
        ({"training_steps": 0}, "training_steps"),
        ({"max_staleness": None}, "max_staleness"),
        ({"batch_size": True}, "batch_size"),
    ],
)
async def test_a_trainer_whose_numbers_do_not_fit_is_refused(
    bench: Bench, change: dict[str, object], told: str
) -> None:
    with pytest.raises(Refused, match=told) as refused:
        await bench.store.take(RUN, {**trainer(), **change}, [])
    assert refused.value.status == 422
    assert (await bench.store.record(RUN)).incarnation == 0


async def test_another_trainer_half_is_refused(bench: Bench) -> None:
    record = await bench.store.take(RUN, trainer(learning_rate=1e-3), [])
    assert (record.incarnation, record.groups_per_step, record.training_steps) == (1, 4, 10)
    with pytest.raises(Refused, match=r"learning_rate: 0.001 -> 0.01") as refused:
        await bench.store.take(RUN, trainer(learning_rate=1e-2), [])
    assert refused.value.code == "config_differs"
    assert (await bench.store.take(RUN, trainer(learning_rate=1e-3), [])).incarnation == 2


async def test_a_taken_run_fences_the_trainer_before(bench: Bench) -> None:
    old = await bench.start()
    await bench.fill(4)
    await bench.lease(old, "b1", 2)
    new = await bench.start()
    for call in (
        bench.lease(old, "b2", 1),
        bench.store.extend(RUN, old, ["b1"]),
        bench.store.ack(RUN, old, ["b1"]),
        bench.store.record_version(RUN, old, 5),
        bench.store.finish(RUN, old),
    ):
        with pytest.raises(Refused, match=f"incarnation {old} .* replaced by incarnation {new}") as refused:
            await call
        assert refused.value.code == "fenced"
    assert (await bench.store.record(RUN)).version == "2.0"


async def test_take_settles_what_the_checkpoint_covers_and_returns_the_rest_in_place(bench: Bench) -> None:
    old = await bench.start()
    a, b, c, d = await bench.fill(4)
    await bench.lease(old, "b1", 2)
    await bench.lease(old, "b2", 1)
    # b was leased and d never was; both are in the checkpoint. An unknown id is nobody's business.
    new = (await bench.store.take(RUN, trainer(), [b, d, "g99999999"])).incarnation
    assert await bench.whereabouts() == {"ready": [a, c], "trained": [b, d]}
    assert await bench.lease(new, "b1", 2) == [a, c], "batch ids belong to an incarnation"
    status = await bench.store.status(RUN)
    assert (status.accepted, status.bytes) == (4, 200)


async def test_a_trainer_that_goes_back_gets_permits_for_the_steps_it_does_again(bench: Bench) -> None:
    """What was trained after the older checkpoint is in no weights any more, and must not hold the run up."""
    incarnation = await bench.start()
    for step in range(2):
        await bench.store.record_version(RUN, incarnation, step)
        await bench.fill(4)
        await bench.lease(incarnation, f"b{step}", 4)
        await bench.store.ack(RUN, incarnation, [f"b{step}"])
    await bench.store.record_version(RUN, incarnation, 2)
    (waiting,) = await bench.fill(1)
    incarnation = (await bench.store.take(RUN, trainer(), [], 1)).incarnation
    await bench.store.record_version(RUN, incarnation, 1)
    assert len(await bench.ask("env-1", 9)) == 3, "step 2 anew, less the group that is ready"
    assert await bench.whereabouts() | {"trained": []} == {
        "ready": [waiting],
        "trained": [],
        "outstanding": ["g00000009", "g00000010", "g00000011"],
    }
    # The newest checkpoint takes nothing back: what a kill interrupted is counted as it was.
    before = await bench.store.status(RUN)
    await bench.store.take(RUN, trainer(), [], 1)
    assert (await bench.store.status(RUN)).accepted == before.accepted


async def test_versions_only_go_forward(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.store.record_version(RUN, incarnation, 3)
    assert (await bench.store.record_version(RUN, incarnation, 3)).version == "1.3"
    with pytest.raises(Refused, match=r"step 3.*step 2") as refused:
        await bench.store.record_version(RUN, incarnation, 2)
    assert refused.value.code == "version_backwards"
    # A trainer that resumes from an earlier checkpoint repeats steps under a new incarnation.
    incarnation = (await bench.store.take(RUN, trainer(), [])).incarnation
    assert (await bench.store.record(RUN)).version == "1.3"
    assert (await bench.store.record_version(RUN, incarnation, 1)).version == "2.1"
