"""The trajectory store in Redis. Every change of state is one Lua script.

runs          the run record, its versions, its end, its counts
permits       permission to generate groups
queue         groups: submit, lease, extend, ack, nack
envs          registered environments, and claims
dead_letters  groups that were delivered too often, or that no batch can hold
journal       metrics, events, examples
archive       trained groups that wait to be written to disk

scripts       runs the Lua scripts
connection    connections to Redis
keys          names of keys and topics
records       converts replies to the SDK's types
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from gristmill_api.settings import Limits
from gristmill_api.store.archive import ArchiveQueue
from gristmill_api.store.dead_letters import DeadLetters
from gristmill_api.store.envs import Environments
from gristmill_api.store.journal import Journal
from gristmill_api.store.permits import Permits
from gristmill_api.store.queue import Batch, GroupQueue, LeasedGroup, LeaseSize, Submission
from gristmill_api.store.runs import Runs
from gristmill_api.store.scripts import Scripts

__all__ = ["Batch", "LeaseSize", "LeasedGroup", "Store", "Submission"]


class Store:
    """All runs. Methods raise ApiProblem if the protocol forbids the call, and redis.RedisError if Redis fails.

    A method that returned has its effect on disk when Redis runs with `appendfsync always`.
    """

    def __init__(self, redis: Redis, limits: Limits, *, archive: bool = False, scripts: Scripts | None = None) -> None:
        """`archive`: acked groups stay until an archiver has written them. `scripts`: of another Store, see `of`."""
        self._redis = redis
        self._options = limits, archive
        self.scripts = scripts or Scripts(redis)
        self.runs = Runs(redis, self.scripts, limits, archive=archive)
        self.permits = Permits(self.scripts, limits)
        self.queue = GroupQueue(redis, self.scripts, limits, archive=archive)
        self.envs = Environments(redis, self.scripts, limits)
        self.dead_letters = DeadLetters(redis, self.scripts)
        self.journal = Journal(redis, self.scripts)
        self.archive = ArchiveQueue(redis, self.scripts)

    def of(self, creation: str | None, word: str | None) -> Store:
        """Returns the store for calls that name the creation of their run, or come from an environment.

        They raise ApiProblem (409) `other_creation` if the run was deleted and created again since, and
        `other_registration` if they act for an environment that was registered with another word. `word` None: the
        caller may act for every environment.
        """
        limits, archive = self._options
        return Store(self._redis, limits, archive=archive, scripts=self.scripts.of(creation, word))

    async def ping(self) -> None:
        await self._redis.ping()

    async def redis_info(self) -> dict[str, Any]:
        """Returns Redis' INFO, sections memory and persistence; empty if Redis does not allow INFO to this user."""
        try:
            return {**await self._redis.info("memory"), **await self._redis.info("persistence")}
        except NoPermissionError:
            return {}
