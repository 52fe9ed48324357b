"""Evaluations of a run while it trains: when, by which of its environments, and what rollouts do meanwhile.

One is due at the first version that is seen in each stretch of steps_per_eval steps (0 to 99, 100 to 199, ...), so
before the first step too, and at the end of the run. Of several environments one does it: who would, tells the API so
in a row of metrics, waits, and reads who was the last to tell; all others found a row and leave it, unless it is of a
process of their own machine that has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from gristmill import ApiError, Client, PolicyVersion
from gristmill.logs import line
from gristmill_env.errors import BusyEvaluationError
from gristmill_env.evaluation.evaluate import Roll
from gristmill_env.evaluation.results import Evaluated
from gristmill_env.evaluation.telling import SOURCE, row
from gristmill_env.holder import has_ended
from gristmill_env.settings import EnvConfig, EvalHandling
from gristmill_env.tracking import Tracker

logger = logging.getLogger(__name__)

CLAIMS = "eval.claim"
"""Source of the rows that say who does an evaluation."""
_SETTLE = 1.0
"""Seconds in which two environments that both found no claim will have told theirs."""

Measure = Callable[[str, Roll], Awaitable[Evaluated]]
"""Evaluates what the model server has. It is told the newest version, and how to make completions."""


class Evaluations(Protocol):
    """What the serve loop asks and tells."""

    def room(self, workers: int) -> int:
        """How many of `workers` may be at rollouts now."""

    async def may_begin(self) -> None:
        """Wait until a rollout may begin."""

    def see(self, version: str, roll: Roll, tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """The newest version. An evaluation that is due becomes one of `tasks`; there is more room when it ends."""

    async def at_end(self, version: str | None, roll: Roll) -> None:
        """The run is finished: evaluate its last version, if that was not done."""


class NoEvaluations:
    """A run without an evaluation set."""

    def room(self, workers: int) -> int:
        return workers

    async def may_begin(self) -> None:
        """At once."""

    def see(self, version: str, roll: Roll, tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """Nothing is due."""
        return None

    async def at_end(self, version: str | None, roll: Roll) -> None:
        """Nothing is due."""


class RunEvaluations:
    """One environment's part in the evaluations of its run."""

    def __init__(
        self, config: EnvConfig, run_id: str, holder: str, api: Client, measure: Measure, tracker: Tracker
    ) -> None:
        """`holder`: this process' name towards the API. `tracker`: is told of the results, as the API is."""
        self._config = config
        self._run_id = run_id
        self._holder = holder
        self._api = api
        self._measure = measure
        self._tracker = tracker
        self._considered: int | None = None
        self._measured = -1
        """Step of the version that this process evaluated last."""
        self._work: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def room(self, workers: int) -> int:
        if self._idle.is_set() or self._config.eval_handling is EvalHandling.NONE:
            return workers
        if self._config.eval_handling is EvalHandling.STOP_TRAIN:
            return 0
        return max(1, int(workers * self._config.eval_limit_ratio))

    async def may_begin(self) -> None:
        if self._config.eval_handling is EvalHandling.STOP_TRAIN:
            await self._idle.wait()

    def see(self, version: str, roll: Roll, tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        newest = PolicyVersion.parse(version)
        stretch = newest.step // self._config.steps_per_eval
        if stretch == self._considered or not self._idle.is_set():
            return None
        self._considered = stretch
        self._idle.clear()
        first = stretch * self._config.steps_per_eval
        self._work = tasks.create_task(self._consider(newest, first, roll))
        return self._work

    async def at_end(self, version: str | None, roll: Roll) -> None:
        if self._work is not None:
            await self._work
        if version is not None:
            last = PolicyVersion.parse(version)
            await self._consider(last, last.step, roll)

    async def _consider(self, version: PolicyVersion, due: int, roll: Roll) -> None:
        """Evaluate at `version`, unless it is done or another does it. `due`: the step since which one is."""
        if self._measured >= due:  # which the API may not have taken
            self._idle.set()
            return
        try:
            done = await self._api.metrics(self._run_id, SOURCE, after_step=due - 1)
            if not done and await self._is_mine(due):
                await self._evaluate(version, roll)
        except BusyEvaluationError as error:
            logger.info("%s", error)  # two found no claim, and this one was the slower
        finally:
            self._idle.set()

    async def _evaluate(self, version: PolicyVersion, roll: Roll) -> None:
        logger.info(line("evaluate", run=self._run_id, version=version, handling=self._config.eval_handling))
        evaluated = await self._measure(str(version), roll)
        self._measured = version.step
        values = row(evaluated)
        try:
            await self._api.report_metrics(self._run_id, SOURCE, version.step, values)
        except ApiError as error:
            if error.code != "bad_request":
                raise
            logger.warning("the API takes no figures of the evaluation in %s: %s", evaluated.folder, error)
        self._tracker.evaluation(
            {name: float(value) for name, value in values.items() if isinstance(value, int | float)}, version.step
        )
        told = {name: values[name] for name in ("pass@1", "total", "truncated", "seconds") if name in values}
        logger.info(line("evaluated", run=self._run_id, version=version, **told, folder=evaluated.folder))

    async def _is_mine(self, due: int) -> bool:
        holder = await self._holder_of(due)
        if holder is None or (holder != self._holder and has_ended(holder)):
            await self._api.report_metrics(self._run_id, CLAIMS, due, {"holder": self._holder})
            await asyncio.sleep(_SETTLE)
            holder = await self._holder_of(due)
        return holder == self._holder

    async def _holder_of(self, due: int) -> str | None:
        rows = await self._api.metrics(self._run_id, CLAIMS, after_step=due - 1)
        return next((str(found.values["holder"]) for found in rows if found.step == due), None)
