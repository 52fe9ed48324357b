"""Evaluations of a run while it trains: their times, the environment that evaluates, and rollouts meanwhile.

Each stretch of steps_per_eval steps (0 to 99, 100 to 199, ...) has one evaluation, at the first version seen in it.
An evaluation is therefore due before the first step, and another at the end of the run. Of several environments, the
environment that gets the API's claim evaluates and renews the claim meanwhile. The others continue with rollouts. If
the claim expires, because its holder died or was stopped, another environment evaluates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from gristmill import ApiError, Client, PolicyVersion
from gristmill.logs import line
from gristmill_env.errors import BusyEvaluationError, EvaluationError, RewardError
from gristmill_env.evaluation.evaluate import Roll
from gristmill_env.evaluation.results import Evaluated
from gristmill_env.evaluation.telling import SOURCE, row
from gristmill_env.settings import EnvConfig, EvalHandling
from gristmill_env.tracking import Observers

logger = logging.getLogger(__name__)

_TTL = 30.0
"""Seconds until a claim expires without renewal."""
_EVERY = 10.0
"""Seconds between renewals, and between checks whether another process' claim has expired."""

Measure = Callable[[str, Roll], Awaitable[Evaluated]]
"""Evaluates the model server's weights, given the newest version and a function that makes completions."""


class Evaluations(Protocol):
    """The evaluations' interface to the serve loop."""

    def room(self, workers: int) -> int:
        """Returns how many of `workers` may be at rollouts now."""

    async def may_begin(self) -> None:
        """Waits until a rollout may begin."""

    def see(self, version: str, roll: Roll, tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """Receives the newest version. A due evaluation becomes one of `tasks`; there is more room when it ends."""

    async def at_end(self, version: str | None, roll: Roll) -> None:
        """Evaluates the last version of the finished run, unless that is done."""


class NoEvaluations:
    """A run without an evaluation set."""

    def room(self, workers: int) -> int:
        return workers

    async def may_begin(self) -> None:
        """Returns at once."""

    def see(self, version: str, roll: Roll, tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """Returns None, because no evaluation is due."""
        return None

    async def at_end(self, version: str | None, roll: Roll) -> None:
        """Does nothing, because no evaluation is due."""


class RunEvaluations:
    """One environment's part in the evaluations of its run."""

    def __init__(
        self, config: EnvConfig, run_id: str, holder: str, api: Client, measure: Measure, observers: Observers
    ) -> None:
        """`holder`: this process' name at the API. `observers` receive the results, as the API does."""
        self._config = config
        self._run_id = run_id
        self._holder = holder
        self._api = api
        self._measure = measure
        self._observers = observers
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
        self._stop_waiting()
        self._idle.clear()
        first = stretch * self._config.steps_per_eval
        self._work = tasks.create_task(self._consider(newest, first, roll))
        return self._work

    async def at_end(self, version: str | None, roll: Roll) -> None:
        self._stop_waiting()
        if self._work is not None:
            await asyncio.wait([self._work])
        if version is not None:
            last = PolicyVersion.parse(version)
            await self._consider(last, last.step, roll)

    def _stop_waiting(self) -> None:
        """Stops waiting for an evaluation that another environment does."""
        if self._work is not None and self._idle.is_set():
            self._work.cancel()

    async def _consider(self, version: PolicyVersion, due: int, roll: Roll) -> None:
        """Evaluates at `version`, unless done; waits while another process does it. `due`: the step since it is due."""
        try:
            while self._measured < due and not await self._api.metrics(self._run_id, SOURCE, after_step=due - 1):
                if await self._claim(due):
                    self._idle.clear()
                    if await self._evaluate_under_claim(version, due, roll):
                        return
                self._idle.set()
                await asyncio.sleep(_EVERY)
        except BusyEvaluationError as error:
            logger.info("%s", error)  # a process of this machine, whose claim expired, is still evaluating
        except (EvaluationError, RewardError, OSError) as error:  # a full disk, a reward that cannot extract an answer
            logger.error("the evaluation of version %s failed: %s; training continues without it", version, error)
        finally:
            self._idle.set()

    async def _claim(self, due: int) -> bool:
        holder = await self._api.claim(self._run_id, f"evaluation-{due}", self._holder, _TTL)
        return holder == self._holder

    async def _evaluate_under_claim(self, version: PolicyVersion, due: int, roll: Roll) -> bool:
        """Evaluates, and renews the claim meanwhile. Returns False if it loses the claim and gives up."""
        work = asyncio.create_task(self._evaluate(version, roll))
        try:
            while not (await asyncio.wait([work], timeout=_EVERY))[0]:
                if not await self._claim(due):
                    logger.warning("the evaluation of version %s went to another environment; it is given up", version)
                    return False
            await work
            return True
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])

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
            # The row is still needed, because it marks the evaluation as done.
            await self._api.report_metrics(self._run_id, SOURCE, version.step, {"seconds": values["seconds"]})
        self._observers.evaluation(
            {name: float(value) for name, value in values.items() if isinstance(value, int | float)}, version.step
        )
        told = {name: values[name] for name in ("pass@1", "total", "truncated", "seconds") if name in values}
        logger.info(line("evaluated", run=self._run_id, version=version, **told, folder=evaluated.folder))
