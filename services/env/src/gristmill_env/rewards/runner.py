"""Calls the rewards of a run: the rewards of this package in this process, those of a user in child processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gristmill_env.errors import RewardError
from gristmill_env.gather import gather
from gristmill_env.outages import Outages, Wait
from gristmill_env.rewards.bound import BoundReward
from gristmill_env.rewards.calls import Execution, RewardProcesses, call_here, processes_of
from gristmill_env.rewards.inputs import RowSchema, Sample
from gristmill_env.rewards.outcomes import Failure, Outcomes
from gristmill_env.rewards.reward import Reward
from gristmill_env.running.limiter import Limiter


class RewardRunner:
    """The calls of a run's rewards. The processes start with `start` or with the first call, and end with `close`."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        schema: RowSchema,
        execution: Execution = Execution(),  # noqa: B008  it is frozen
        *,
        metrics: Collection[str] = (),
        patience: float = 0.0,
    ) -> None:
        """`patience`: seconds for which calls are repeated whose error may pass, such as a judge's status 503.
        `metrics`: names of the rewards that are not repeated.

        Raises RewardError if a reward asks for an input that the rows do not have.
        """
        self._rewards = rewards
        leaves = {name: leaf for reward in rewards for name, leaf in reward.leaves().items()}
        self._bound = {name: leaf.bind(schema, name) for name, leaf in leaves.items()}
        self._repeated = {name for reward in rewards if reward.name not in metrics for name in reward.leaves()}
        self._outages = Outages(patience, "reward", RewardError)
        self._limiter = Limiter(execution.limits, execution.threads)
        self._processes: Mapping[str, RewardProcesses] = processes_of(leaves, schema, execution)
        self._closed = False

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Scores a group. Returns the outcomes of all rewards and parts for each sample. All items have the same names.

        Raises RewardError if a reward calls a service that does not answer for `patience` seconds, and after `close`.
        """
        self._refuse_closed()
        found = await gather(self._leaf(name, bound, samples) for name, bound in self._bound.items())
        self._refuse_closed()  # the end of a process is a failure of its calls
        called = dict(zip(self._bound, found, strict=True))
        results = [reward.outcomes(reward.name, called) for reward in self._rewards]
        names = dict.fromkeys(name for column in results for outcomes in column for name in outcomes)
        merged = [{name: one for part in parts for name, one in part.items()} for parts in zip(*results, strict=True)]
        return [{name: outcomes.get(name) for name in names} for outcomes in merged]

    async def extracted(
        self, name: str, texts: Sequence[str], row: Mapping[str, Any]
    ) -> list[str | RewardError | None]:
        """Returns the answer that a reward finds in each text, or the error of its extraction.

        `name`: the full name of a reward that is called, for example "r1/accuracy".

        The extraction may be a user's code, so it runs where the reward runs, within its limits.
        """
        self._refuse_closed()
        extraction = self._bound[name].reward.extraction(name)
        found = await self._call(name, extraction, [Sample(text, row=row) for text in texts])
        answers = (next(iter(outcomes.values())) for outcomes in found)
        return [one.raised() if isinstance(one, Failure) else one if isinstance(one, str) else None for one in answers]

    async def start(self) -> None:
        """Starts the processes. Raises RewardError if the code of a reward cannot be loaded there."""
        await gather(processes.start() for processes in set(self._processes.values()))

    async def close(self) -> None:
        """Ends the processes. A thread that hangs in this process remains, and ends with this process."""
        self._closed = True
        await gather(processes.close() for processes in set(self._processes.values()))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RewardError("scorer_closed", "the scorer is closed, and its rewards are not called any more")

    async def _leaf(self, name: str, bound: BoundReward, samples: Sequence[Sample]) -> list[Outcomes]:
        """Returns the outcomes of one reward. Repeats the calls whose failure may pass."""
        found = await self._call(name, bound, samples)
        wait = Wait()
        while name in self._repeated:
            failed = {at: one for at, outcomes in enumerate(found) if (one := _that_may_pass(outcomes, name))}
            if len(failed) < len(samples):
                self._outages.answered(name)
            if not failed or not await self._outages.wait(name, wait, next(iter(failed.values())).text):
                break
            again = list(range(len(samples)) if bound.group_level else failed)
            repeated = await self._call(name, bound, [samples[at] for at in again])
            for at, outcomes in zip(again, repeated, strict=True):
                found[at] = outcomes
        return found

    async def _call(self, name: str, bound: BoundReward, samples: Sequence[Sample]) -> list[Outcomes]:
        if (processes := self._processes.get(name)) is not None:
            return await processes.call(bound, samples)
        return await call_here(bound, samples, self._limiter)


def _that_may_pass(outcomes: Outcomes, name: str) -> Failure | None:
    outcome = outcomes.get(name)
    return outcome if isinstance(outcome, Failure) and outcome.may_pass else None
