"""Calls all rewards of a run for the completions of a prompt, and computes their weighted sum."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from gristmill_env.errors import RewardError
from gristmill_env.gather import gather
from gristmill_env.outages import Outages, Wait
from gristmill_env.rewards.calls import Execution, RewardProcesses, call_here, processes_of
from gristmill_env.rewards.composed import has_value_in_part, weighted_sum
from gristmill_env.rewards.inputs import RowSchema, Sample
from gristmill_env.rewards.outcomes import Failure, Outcome, Outcomes
from gristmill_env.rewards.reward import BoundReward, Reward
from gristmill_env.running.limiter import Limiter

logger = logging.getLogger(__name__)

FULL = 1 - 1e-9
"""Values from here on count as 1, to allow for rounding errors."""
_WINDOW = 64
"""Number of last completions in which the failures of a reward are counted."""
_FEW = 3
"""Failures within the window up to which no warning is logged; the total count reports them."""


@dataclass(frozen=True)
class WeightedReward:
    """One line of `reward_functions`."""

    reward: Reward
    weight: float


@dataclass(frozen=True)
class Score:
    """The results of all rewards for one completion."""

    total: float | None
    """Sum of weight × value over the rewards that have a value. None if no reward has a value, or if a reward with a
    nonzero weight failed or has a value for other completions of the group only."""
    parts: Mapping[str, float | None]
    """Unweighted value of each reward, including the parts of composed rewards ("combined/accuracy"). None if the
    reward returned None or failed."""
    error: str | None = None
    """The name and error of the first failed reward with a nonzero weight."""
    failed: Mapping[str, Failure] = field(default_factory=dict)
    """Every failed reward and its failure. A failed metric (weight 0) is listed here, and `total` remains valid."""


class Scorer:
    """The rewards of a run.

    A reward has three outcomes: a score, None or an error. None for all completions of a prompt leaves the reward and
    its weight out of the sums. None for some of them leaves these completions without a total: without the reward their
    sums cannot be compared with the others', and would count as a 0. An
    error is counted, and the sample stays unscored. An error is never a silent 0, because the model would learn from
    a 0. If a reward with weight 0 fails, the sample keeps its score, because the reward's value does not count.

    The rewards of a user run in processes. `async with` starts and ends them; otherwise the first call starts them, and
    close() ends them.
    """

    def __init__(
        self,
        rewards: Iterable[WeightedReward],
        *,
        has_answer: bool,
        columns: Sequence[str] = (),
        execution: Execution = Execution(),  # noqa: B008  it is frozen
        failure_limit: float = 1.0,
        patience: float = 0.0,
    ) -> None:
        """`columns`: the data set's columns. `failure_limit`: the share of the last 64 completions on which a reward
        may fail. A reward with weight 0 may fail on all completions. `patience`: seconds for which calls are repeated
        whose error may pass, such as a judge's status 503; a reward with weight 0 is not repeated.

        Raises RewardError if `rewards` is empty, if all weights are 0, or if two rewards have the same name.
        Also raises RewardError if a reward asks for an input that the rows do not have.
        """
        self.rewards = tuple(rewards)
        names = self.names
        if not names:
            raise RewardError("no_rewards", "reward_functions is empty; name at least one reward")
        if twice := {name for name in names if names.count(name) > 1}:
            raise RewardError(
                "duplicate_name",
                f"reward_functions lists {', '.join(sorted(twice))} twice; once is enough, or give each its own "
                "name (name:) if their params differ",
                names=sorted(twice),
            )
        if all(weighted.weight == 0 for weighted in self.rewards):
            raise RewardError(
                "all_weights_zero",
                "all of reward_functions have weight 0: they are metrics, and nothing is left to score by",
            )
        self.execution = execution
        schema = RowSchema(columns, has_answer)
        leaves = {name: leaf for weighted in self.rewards for name, leaf in weighted.reward.leaves().items()}
        self._bound = {name: leaf.bind(schema, name) for name, leaf in leaves.items()}
        self._repeated = {name for weighted in self.rewards if weighted.weight for name in weighted.reward.leaves()}
        self._outages = Outages(patience, "reward", RewardError)
        self._limiter = Limiter(execution.limits, execution.threads)
        self._processes: Mapping[str, RewardProcesses] = processes_of(leaves, schema, execution)
        self._closed = False
        self._failure_limit = failure_limit
        self._errors: Counter[str] = Counter()
        self.begin_window()

    @property
    def names(self) -> list[str]:
        """The names of the rewards, in the order of the configuration."""
        return [weighted.reward.name for weighted in self.rewards]

    @property
    def correctness(self) -> CorrectnessReward:
        """The reward that decides whether a completion is right."""
        return correctness_reward([weighted.reward for weighted in self.rewards])

    @property
    def errors(self) -> Mapping[str, int]:
        """Number of failures by the name in Score.parts. A failed group-level reward counts once per completion."""
        return dict(self._errors)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns the scores of the completions of one prompt, in the order of `samples`.

        The scores contain the errors of rewards. Raises RewardError when a reward fails on more of the last 64
        completions than `failure_limit` allows, or calls a service that does not answer for `patience` seconds.
        """
        if not samples:
            return []
        results = await self.outcomes(samples)
        by_name = {name: [outcomes[name] for outcomes in results] for name in results[0]}
        for name, column in by_name.items():
            self._count(name, column)
        for weighted in self.rewards:
            self._watch(weighted, by_name[weighted.reward.name])
        partly = [w.reward.name for w in self.rewards if w.weight != 0 and has_value_in_part(by_name[w.reward.name])]
        return [self._score(outcomes, partly) for outcomes in results]

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Returns the outcomes of all rewards and parts for each sample. All items have the same names.

        Raises RewardError if a reward calls a service that does not answer for `patience` seconds, and after `close`.
        """
        self._refuse_closed()
        found = await gather(self._leaf(name, bound, samples) for name, bound in self._bound.items())
        self._refuse_closed()  # the end of a process is a failure of its calls
        called = dict(zip(self._bound, found, strict=True))
        results = [weighted.reward.outcomes(weighted.reward.name, called) for weighted in self.rewards]
        names = dict.fromkeys(name for column in results for outcomes in column for name in outcomes)
        merged = [{name: one for part in parts for name, one in part.items()} for parts in zip(*results, strict=True)]
        return [{name: outcomes.get(name) for name in names} for outcomes in merged]

    async def extracted(self, texts: Sequence[str], row: Mapping[str, Any]) -> list[str | RewardError | None]:
        """Returns the answer that the correctness reward finds in each text, or its error; None if it compares none.

        The extraction may be a user's code, so it runs where the reward runs, within its limits.
        """
        correctness = self.correctness
        if not correctness.compares:
            return [None] * len(texts)
        self._refuse_closed()
        extraction = self._bound[correctness.name].reward.extraction(correctness.name)
        results = await self._call(correctness.name, extraction, [Sample(text, row=row) for text in texts])
        answers = (next(iter(outcomes.values())) for outcomes in results)
        return [one.raised() if isinstance(one, Failure) else one if isinstance(one, str) else None for one in answers]

    def begin_window(self) -> None:
        """Forgets earlier failures, so that `failure_limit` counts completions from here on."""
        self._recent: dict[str, deque[Failure | None]] = {name: deque(maxlen=_WINDOW) for name in self.names}
        self._since_warning = dict.fromkeys(self.names, _WINDOW)

    async def start(self) -> None:
        """Starts the processes of a user's rewards. Raises RewardError if their code cannot be loaded there."""
        await gather(processes.start() for processes in set(self._processes.values()))

    async def close(self) -> None:
        """Ends the processes. A thread that hangs in this process remains, and ends with this process."""
        self._closed = True
        await gather(processes.close() for processes in set(self._processes.values()))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

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

    def _score(self, said: Outcomes, partly: Sequence[str]) -> Score:
        parts = {name: outcome if isinstance(outcome, float) else None for name, outcome in said.items()}
        failures = [said[w.reward.name] for w in self.rewards if w.weight != 0]
        error = next((str(failure) for failure in failures if isinstance(failure, Failure)), None)
        total = None
        if error is None and all(said[name] is not None for name in partly):
            total = weighted_sum((w.weight, parts[w.reward.name]) for w in self.rewards)
            if total is not None and math.isinf(total):
                total, error = None, "the weighted sum of the rewards overflows"
        failed = {name: outcome for name, outcome in said.items() if isinstance(outcome, Failure)}
        return Score(total, parts, error, failed)

    def _watch(self, weighted: WeightedReward, column: Sequence[Outcome]) -> None:
        """Warns when a reward fails on more than `_FEW` of the last completions. Raises RewardError above the limit."""
        name = weighted.reward.name
        recent = self._recent[name]
        recent.extend(outcome if isinstance(outcome, Failure) else None for outcome in column)
        failures = [failure for failure in recent if failure is not None]
        if not failures:
            return
        summary = f"reward '{name}' failed on {len(failures)} of the last {len(recent)} completions"
        last = " ".join(str(failures[-1]).split())
        limited = weighted.weight != 0
        if limited and len(recent) == _WINDOW and len(failures) > self._failure_limit * _WINDOW:
            raise RewardError(
                "too_many_failures",
                f"{summary}; reward_failure_limit is {self._failure_limit:.0%}; the last error: {last}",
                reward=name,
                failures=len(failures),
                failed=failures[-1].reward,
                last=failures[-1].code,
            )
        self._since_warning[name] += len(column)
        if len(failures) > _FEW and self._since_warning[name] >= _WINDOW:
            self._since_warning[name] = 0
            ends = f"above {self._failure_limit:.0%} of {_WINDOW} the run ends" if limited else "it has weight 0"
            logger.warning("%s (%s); the last error: %s", summary, ends, last)

    def _count(self, name: str, column: Sequence[Outcome]) -> None:
        """Logs a reward's first error in full, and further errors at a count of 10, 100, 1000 and so on."""
        for outcome in column:
            if not isinstance(outcome, Failure) or outcome.reward != name:  # a part's failure is counted for the part
                continue
            self._errors[name] += 1
            if (count := self._errors[name]) == 1:
                trace = {"trace": outcome.trace}
                logger.error("reward '%s' failed: %s", name, outcome.text, extra=trace, exc_info=outcome.cause)
            elif str(count).strip("0") == "1":
                logger.error("reward '%s' has failed %d times, last: %s", name, count, outcome.text)


def _that_may_pass(outcomes: Outcomes, name: str) -> Failure | None:
    outcome = outcomes.get(name)
    return outcome if isinstance(outcome, Failure) and outcome.may_pass else None


@dataclass(frozen=True)
class CorrectnessReward:
    """The reward that decides whether a completion is right."""

    name: str
    """The name in Score.parts, for example "r1/accuracy" for a part of a composed reward."""
    reward: Reward
    compares: bool
    """Whether the reward compares the completion with the row's answer, so that completions can be right and can
    vote."""

    def is_right(self, value: float | None) -> bool | None:
        """Decides from the unweighted value; None if the reward returned None or failed."""
        return None if value is None else value >= FULL


def correctness_reward(rewards: Sequence[Reward]) -> CorrectnessReward:
    """Returns the reward that decides whether a completion is right, for evaluations and for training metrics.

    1. The first reward that extracts answers: accuracy, exact_match, mcq, or a user's reward with `extract_answer`.
    2. If no reward extracts answers, the first reward that asks for the row's answer.
    3. If no reward asks for the answer, the first reward. It measures the quality of a completion, not its correctness.

    "First" refers to the order in the configuration. For a composed reward its parts are considered, not their sum,
    because the weights determine the scale of the sum: `r1/accuracy` decides, not `r1`. `rewards`: a run's rewards, at
    least one.
    """
    leaves = {name: leaf for reward in rewards for name, leaf in reward.leaves().items()}
    for name, leaf in leaves.items():
        if leaf.reads_answers:
            return CorrectnessReward(name, leaf, compares=True)
    for name, leaf in leaves.items():
        if leaf.compares:
            return CorrectnessReward(name, leaf, compares=True)
    return CorrectnessReward(rewards[0].name, rewards[0], compares=False)
