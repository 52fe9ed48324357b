"""The store compared with its model, through random histories of environments, trainers and clocks.

Each step does the same to both and compares the answers. After each step the test also compares everything that the
store holds, down to the last key in Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis
from tests.integration.api.model import (
    MAX_ATTEMPTS,
    PER_STEP,
    SEQUENCES,
    SIZE,
    STALENESS,
    STEPS,
    Model,
)
from tests.integration.api.store_harness import RUN, StoreHarness, trainer
from tests.support.redis_server import RedisServer

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import LeaseSize, Store, keys

T = TypeVar("T")

HOLDER_NAMES = ("env-1", "env-2")
HOLDERS = st.sampled_from(HOLDER_NAMES)
ROWS = st.integers(0, STEPS * PER_STEP + 2).map(lambda row: f"g{row:08d}")
BATCH_IDS = ["b1", "b2", "b3", "b4", "b5", "b6"]
BATCHES = st.sampled_from(BATCH_IDS)
LATE = st.integers(0, 9).map(lambda draw: 1 if draw == 9 else 0)
"""Now and then a trainer that was replaced: its incarnation is one behind."""


class StoreMachine(RuleBasedStateMachine):
    """Small id spaces, so that histories collide: two holders, six batch ids, a few rows."""

    redis_url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        with redis.Redis.from_url(self.redis_url) as client:
            client.flushall()
        self.redis = Redis.from_url(self.redis_url)
        self.harness = StoreHarness(Store(self.redis, Limits(max_attempts=MAX_ATTEMPTS)), self.redis)
        self.store = self.harness.store
        self.model = Model()
        self.wait(self.harness.create())

    def teardown(self) -> None:
        self.wait(self.redis.aclose())
        self.runner.close()

    def wait(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self.runner.run(awaited())

    def outcome(self, call: Awaitable[Any]) -> Any:
        """Returns the answer, or the code of the refusal."""
        try:
            return self.wait(call)
        except ApiProblem as refused:
            return refused.code

    @initialize()
    def under_way(self) -> None:
        """Most histories belong to a run that a trainer has taken; the others are rare and short."""
        self.take(set())
        self.version(2, 0)

    @rule(covered=st.sets(ROWS, max_size=4))
    def take(self, covered: set[str]) -> None:
        plan = trainer(steps=STEPS, staleness=STALENESS, groups=PER_STEP)
        record = self.wait(self.store.runs.take(RUN, plan, sorted(covered)))
        self.model.take(covered)
        assert record.incarnation == self.model.incarnation

    @precondition(lambda self: self.model.incarnation > 0)
    @rule(step=st.integers(0, STEPS), late=LATE)
    def version(self, step: int, late: int) -> None:
        told = self.outcome(self.store.runs.record_version(RUN, self.model.incarnation - late, step))
        if late:
            assert told == "fenced"
            return
        refused = self.model.record_version(step)
        assert told == refused if refused else told.version == f"{self.model.incarnation}.{step}"

    @rule(holder=HOLDERS, count=st.integers(1, 5))
    def ask(self, holder: str, count: int) -> None:
        assert self.wait(self.harness.ask(holder, count)) == self.model.permits(holder, count)

    @rule(holder=HOLDERS, group_ids=st.lists(ROWS, max_size=4, unique=True))
    def renew(self, holder: str, group_ids: list[str]) -> None:
        assert self.wait(self.store.permits.renew(RUN, holder, group_ids)).lost == self.model.renew(holder, group_ids)

    @rule(holder=HOLDERS, group_id=ROWS, reason=st.sampled_from(["abandoned", "same_scores", "too_long"]))
    def give_back(self, holder: str, group_id: str, reason: str) -> None:
        told = self.outcome(self.store.permits.return_permit(RUN, holder, group_id, reason))
        assert (told if isinstance(told, str) else None) == self.model.give_back(holder, group_id, reason)

    @rule(holder=HOLDERS)
    def abandon(self, holder: str) -> None:
        assert self.wait(self.store.permits.release_all(RUN, holder)) == self.model.abandon(holder)

    @rule(holder=HOLDERS, group_id=ROWS, content=st.sampled_from(["a", "a", "b"]))
    def submit(self, holder: str, group_id: str, content: str) -> None:
        told = self.outcome(self.harness.submit(holder, group_id, content, self.model.step()))
        assert told == self.model.submit(holder, group_id, content)

    @rule(holder=HOLDERS, count=st.integers(1, 5))
    def work(self, holder: str, count: int) -> None:
        """The usual calls of environments. With random calls alone, few histories would hold groups to lease."""
        self.ask(holder, count)
        for group_id in sorted(self.model.holders):
            self.submit(self.model.holders[group_id], group_id, "a")

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def expire_permits(self, data: st.DataObject) -> None:
        overdue = data.draw(st.sets(st.sampled_from(sorted(self.model.holders)), min_size=1))
        self.wait(self.redis.zadd(keys.prefix(RUN) + "permits", dict.fromkeys(overdue, 1), xx=True))
        self.model.overdue_permits |= overdue

    @precondition(lambda self: self.model.incarnation > 0)
    @rule(batch_id=BATCHES, count=st.integers(1, 3), late=LATE)
    def lease(self, batch_id: str, count: int, late: int) -> None:
        amount = LeaseSize("groups", count)
        told = self.outcome(self.store.queue.lease(RUN, self.model.incarnation - late, batch_id, amount))
        if late:
            assert told == "fenced"
            return
        expected = self.model.lease(batch_id, count)
        assert (told if isinstance(told, str) else [leased.group_id for leased in told.groups] or None) == expected

    @rule(env=HOLDERS)
    def register(self, env: str) -> None:
        self.wait(self.store.envs.register(RUN, env, None))
        self.model.envs.add(env)

    @rule(env=HOLDERS)
    def unregister(self, env: str) -> None:
        assert self.wait(self.store.envs.unregister(RUN, env)) == (env in self.model.envs)
        self.model.envs.discard(env)

    @precondition(lambda self: self.model.version)
    @rule()
    def nothing_is_waited_for_in_vain(self) -> None:
        """All environments send every group that they may send: the sent groups are enough for the batches."""
        before = -1
        while before < len(self.model.groups):
            before = len(self.model.groups)
            for holder in HOLDER_NAMES:
                self.ask(holder, 99)
            for group_id in sorted(self.model.holders):
                self.submit(self.model.holders[group_id], group_id, "a")
        assert self.model.free() == 0
        unused = [batch_id for batch_id in BATCH_IDS if batch_id not in {*self.model.batches, *self.model.acked}]
        good = [group_id for group_id in self.model.ready() if self.model.groups[group_id].attempts < MAX_ATTEMPTS]
        if unused and good:
            self.lease(unused[0], min(PER_STEP, len(good)), late=0)
            assert unused[0] in self.model.batches

    @precondition(lambda self: self.model.incarnation > 0)
    @rule(batch_ids=st.lists(BATCHES, min_size=1, max_size=3, unique=True), late=LATE)
    def nack(self, batch_ids: list[str], late: int) -> None:
        told = self.outcome(self.store.queue.nack(RUN, self.model.incarnation - late, batch_ids))
        assert told == ("fenced" if late else self.model.nack(batch_ids))

    @precondition(lambda self: "dead" in {group.state for group in self.model.groups.values()})
    @rule(group_ids=st.lists(ROWS, max_size=4, unique=True), everything=st.booleans(), again=st.booleans())
    def settle_dead(self, group_ids: list[str], everything: bool, again: bool) -> None:
        chosen = sorted(self.model.groups) if everything else group_ids
        named = None if everything else group_ids
        if again:
            assert self.wait(self.store.dead_letters.replay(RUN, named)) == self.model.replay(chosen)
        else:
            assert self.wait(self.store.dead_letters.purge(RUN, named)) == self.model.purge(chosen)

    @precondition(lambda self: self.model.ready())
    @rule(data=st.data())
    def lease_some(self, data: st.DataObject) -> None:
        unused = [batch_id for batch_id in BATCH_IDS if batch_id not in {*self.model.batches, *self.model.acked}]
        if unused:
            self.lease(unused[0], data.draw(st.integers(1, len(self.model.ready()))), late=0)

    @precondition(lambda self: self.model.batches)
    @rule()
    def run_out_and_lease_again(self) -> None:
        """The trainer is gone for longer than its leases. The groups run out of attempts in the end."""
        for batch_id in sorted(self.model.batches):
            if not self.model.batches[batch_id].expired:
                self.wait(self.redis.zadd(keys.prefix(RUN) + "leases", {batch_id: 1}, xx=True))
                self.model.overdue_leases.add(batch_id)
        unused = [batch_id for batch_id in BATCH_IDS if batch_id not in {*self.model.batches, *self.model.acked}]
        if unused:
            self.lease(unused[0], 1, late=0)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def ack_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.model.batches)), min_size=1))
        self.ack(sorted(chosen), late=0)

    @precondition(lambda self: any(not batch.expired for batch in self.model.batches.values()))
    @rule(data=st.data())
    def expire_lease(self, data: st.DataObject) -> None:
        live = sorted(batch_id for batch_id, batch in self.model.batches.items() if not batch.expired)
        batch_id = data.draw(st.sampled_from(live))
        self.wait(self.redis.zadd(keys.prefix(RUN) + "leases", {batch_id: 1}, xx=True))
        self.model.overdue_leases.add(batch_id)

    @precondition(lambda self: self.model.incarnation > 0)
    @rule(batch_ids=st.lists(BATCHES, min_size=1, max_size=3, unique=True), late=LATE)
    def extend(self, batch_ids: list[str], late: int) -> None:
        told = self.outcome(self.store.queue.extend(RUN, self.model.incarnation - late, batch_ids))
        assert told == ("fenced" if late else self.model.extend(batch_ids))

    @precondition(lambda self: self.model.incarnation > 0)
    @rule(batch_ids=st.lists(BATCHES, min_size=1, max_size=3, unique=True), late=LATE)
    def ack(self, batch_ids: list[str], late: int) -> None:
        told = self.outcome(self.store.queue.ack(RUN, self.model.incarnation - late, batch_ids))
        assert (told if isinstance(told, str) else told.lost) == ("fenced" if late else self.model.ack(batch_ids))

    @invariant()
    def every_group_is_where_the_model_has_it(self) -> None:
        audit = self.wait(self.store.runs.audit(RUN))
        expected = self.model.whereabouts()
        assert {name: getattr(audit, name) for name in expected} == expected
        assert audit.dropped == self.model.dropped

    @invariant()
    def counts_agree(self) -> None:
        status = self.wait(self.store.runs.status(RUN))
        states = [group.state for group in self.model.groups.values()]
        for state in ("ready", "leased", "trained", "dead"):
            assert getattr(status, state) == states.count(state)
        for state in ("ready", "leased", "dead"):
            assert status.sequences[state] == SEQUENCES * states.count(state)
            assert status.bytes_by_state[state] == SIZE * states.count(state)
        assert status.accepted == self.model.accepted()
        assert status.lease_expiries == self.model.expiries
        assert status.redeliveries == self.model.redeliveries
        assert status.outstanding == len(self.model.holders)
        assert status.rows_issued == self.model.rows
        assert status.bytes == SIZE * len(self.model.held())
        assert sum(status.dropped.values()) == len(self.model.dropped)

    @invariant()
    def redis_holds_these_keys_and_no_other(self) -> None:
        start = keys.prefix(RUN)
        held = self.model.held()
        expected = {f"{start}{kind}:{group_id}" for kind in ("group", "payload") for group_id in held}
        expected |= {f"{start}batch:{batch_id}" for batch_id in self.model.batches}
        expected |= {f"{start}env:{env}" for env in self.model.envs}
        examples = {f"{start}example:{group_id}" for group_id in self.model.latest if group_id not in held}
        expected |= examples
        found = {name.decode() if isinstance(name, bytes) else name for name in self.wait(self.redis.keys("*"))}
        assert {name for name in found if name.removeprefix(start).count(":")} - {
            keys.RUNS,
            keys.OPEN,
            keys.STACKS,
            keys.BYTES,
            keys.EXAMPLES,
        } == expected
        counted = self.wait(self.redis.zrange(keys.EXAMPLES, 0, -1))
        assert {name.decode() if isinstance(name, bytes) else name for name in counted} == examples
        assert int(self.wait(self.redis.get(keys.BYTES)) or 0) == SIZE * len(held)


@pytest.mark.timeout(600)
def test_store_matches_its_model_in_random_histories() -> None:
    # A separate Redis: in the shared Redis, the shared API's archiver may take its lock at any time.
    with RedisServer() as server:
        run_state_machine_as_test(
            type("Machine", (StoreMachine,), {"redis_url": server.url}),
            settings=settings(
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
