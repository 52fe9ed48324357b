"""The trainer's batches at a real API: leased one step ahead, in order, and returned unless they were used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.integration.api.store_harness import RUN
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.scripted_run import ENV, GROUP_SIZE, expected_group, plan

from gristmill import ApiError, LeaseSession, PolicyVersion, SyncClient, TrajectoryGroup
from gristmill.hyperparameters import Hyperparameters

# The functions below import torch. The workers that run other files need none.
if TYPE_CHECKING:
    from gristmill_trainer.batch_source import Batch, Prefetch
    from gristmill_trainer.data.samples import Prepared

GROUPS = 4
SETTINGS = Hyperparameters()


@dataclass
class Run:
    api: SyncClient
    session: LeaseSession

    def fill(self, count: int) -> list[str]:
        permits = self.api.permits(RUN, "env-1", count, wait=0).permits
        assert len(permits) == count
        for permit in permits:
            self.api.submit(expected_group(RUN, permit.group_id), "env-1")
        return [permit.group_id for permit in permits]


@pytest.fixture
def run(redis_url: str, shared_api: ApiServer) -> Iterator[Run]:
    with SyncClient(shared_api.url, patience=10) as api:
        api.create_run(RUN, ENV, GROUP_SIZE)
        with LeaseSession(api, RUN, plan(10, staleness=2)) as session:
            session.record_version(0)
            yield Run(api, session)


def _ids(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [group.group_id for group in batch.groups]


def _prepare(step: int, groups: list[TrajectoryGroup]) -> Prepared:
    from gristmill_trainer.data.checks import Limits
    from gristmill_trainer.data.samples import to_samples

    return to_samples(groups, Limits(vocabulary=1 << 20, seq_len=512, policy=PolicyVersion(1, step - 1)), SETTINGS)


def _prefetch(run: Run, steps: int, prepare: Callable[[int, list[TrajectoryGroup]], Prepared] = _prepare) -> Prefetch:
    from gristmill_trainer.batch_source import Prefetch

    return Prefetch(run.session, prepare, 1, steps)


def test_session_covers_and_acks_only_trained_batches(run: Run) -> None:
    first, second = run.fill(GROUPS), run.fill(GROUPS)
    assert run.session.lease(1, wait=0) is not None
    assert run.session.lease(2, wait=0) is not None
    assert run.session.covered == []
    run.session.trained(1)
    assert run.session.covered == first
    run.session.ack()
    audit = run.api.audit(RUN)
    assert (audit.trained, audit.leased) == (first, second)
    assert run.session.covered == []


def test_an_abandoned_batch_is_ready_at_once_and_leased_again_under_its_name(run: Run) -> None:
    ids = run.fill(GROUPS)
    assert run.session.lease(1, wait=0) is not None
    run.session.give_back(1, 2)
    assert run.api.audit(RUN).ready == ids
    again = run.session.lease(1, wait=0)
    assert again is not None
    assert [group.group_id for group in again] == ids


def test_prefetch_is_one_step_ahead_in_order_and_gives_back_the_rest(run: Run) -> None:
    first, second, third = (run.fill(GROUPS) for _ in range(3))
    prefetch = _prefetch(run, 10)
    assert _ids(prefetch.get(1, 30)) == first
    assert _ids(prefetch.get(2, 30)) == second
    prefetch.close()
    audit = run.api.audit(RUN)
    assert sorted(audit.leased) == first + second
    assert audit.ready == third


def test_prefetch_makes_samples_of_a_batch_before_it_is_asked_for(run: Run) -> None:
    ready = threading.Event()

    def prepare(step: int, groups: list[TrajectoryGroup]) -> Prepared:
        if step == 2:
            ready.set()
        return _prepare(step, groups)

    for _ in range(2):
        run.fill(GROUPS)
    prefetch = _prefetch(run, 2, prepare)
    assert prefetch.get(1, 30) is not None
    assert ready.wait(30)
    ready.clear()
    batch = prefetch.get(2, 30)
    assert batch is not None
    assert len(batch.prepared.samples) == GROUPS * GROUP_SIZE
    assert not ready.is_set(), "once"
    prefetch.close()


def test_prefetch_raises_the_lease_error_when_groups_are_requested(run: Run) -> None:
    run.api.take(RUN, plan(10, staleness=2), [])
    prefetch = _prefetch(run, 10)
    with raises(ApiError, "fenced") as refused:
        prefetch.get(1, 5)
    assert "incarnation 2" in refused.value.message
    prefetch.close()
