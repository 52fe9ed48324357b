"""Metrics since the last log, under the names that users of Atropos know.

====================================  ====================================================================
train/rewards_mean, _std, _max, _min  totals of all completions that have a total
train/percent_correct                 share of right completions, 0 to 1, by the reward that also decides in
                                      an evaluation; omitted if no reward compares with an answer
train/completion_lengths              mean tokens sampled; also _std, _max, _min, and _p95, the 95th
                                      percentile (Atropos logs under _p95 how many exceed 95 % of the limit)
train/truncation_rate                 share of truncated completions
reward/NAME/mean_raw, /min, /max      a reward's values, before its weight
reward/NAME/skipped, /errors          share of completions without a value; with an error of the reward
train_perf/task_duration_mean, ...    seconds per prompt; also _std, _max, _min
train/items_sent_to_api               groups submitted
train/items_rejected                  prompts dropped
groups/submitted, groups/dropped_WHY  the same since the process started
====================================  ====================================================================

All metrics except the last three cover every scored prompt. A share of right answers over submitted groups alone
would be biased, because groups with equal scores, such as all right or all wrong, are dropped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from gristmill_env.rewards import Decision
from gristmill_env.tally import Tally
from gristmill_env.tracking.tracker import ScoredPrompt


class Window:
    """Collects scored prompts until they are logged."""

    def __init__(self, decision: Decision) -> None:
        """`decision`: the run's correctness reward."""
        self._decision = decision
        self.prompts = 0
        self._sent_before = self._dropped_before = 0
        self._clear()

    def add(self, prompt: ScoredPrompt) -> None:
        """Adds a scored prompt."""
        self.prompts += 1
        self._seconds.append(prompt.seconds)
        self._lengths += prompt.lengths
        self._cut += [reason == "length" for reason in prompt.finish_reasons]
        for score in prompt.scores:
            if score.total is not None:
                self._totals.append(score.total)
            for name, value in score.parts.items():
                self._parts[name].append(value)
                self._failed[name] += name in score.failed

    def take(self, tally: Tally | None) -> dict[str, float]:
        """Returns the metrics by name, and starts a new window. Without a tally, omits the metrics of groups."""
        values: dict[str, float] = {}
        if self._totals:
            values |= _spread("train/rewards", self._totals)
        values |= self._rewards()
        if self._lengths:
            lengths = _spread("train/completion_lengths", self._lengths)
            values |= {name.removesuffix("_mean"): value for name, value in lengths.items()}
            values["train/completion_lengths_p95"] = float(np.quantile(self._lengths, 0.95))
            values["train/truncation_rate"] = float(np.mean(self._cut))
        if self._seconds:
            values |= _spread("train_perf/task_duration", self._seconds)
        if tally is not None:
            dropped = tally.dropped.total()
            values["train/items_sent_to_api"] = tally.submitted - self._sent_before
            values["train/items_rejected"] = dropped - self._dropped_before
            values["groups/submitted"] = tally.submitted
            values |= {f"groups/dropped_{reason}": count for reason, count in tally.dropped.items()}
            self._sent_before, self._dropped_before = tally.submitted, dropped
        self._clear()
        return values

    def _rewards(self) -> dict[str, float]:
        values: dict[str, float] = {}
        said = {name: [value for value in parts if value is not None] for name, parts in self._parts.items()}
        for name, parts in self._parts.items():
            failed = self._failed[name]
            values[f"reward/{name}/skipped"] = 1 - (len(said[name]) + failed) / len(parts)
            values[f"reward/{name}/errors"] = failed / len(parts)
            if said[name]:
                values[f"reward/{name}/mean_raw"] = float(np.mean(said[name]))
                values[f"reward/{name}/min"], values[f"reward/{name}/max"] = min(said[name]), max(said[name])
        if self._decision.compares and (judged := said.get(self._decision.name)):
            values["train/percent_correct"] = float(np.mean([self._decision.is_right(value) for value in judged]))
        return values

    def _clear(self) -> None:
        self.prompts = 0
        self._totals: list[float] = []
        self._lengths: list[int] = []
        self._cut: list[bool] = []
        self._seconds: list[float] = []
        self._parts: defaultdict[str, list[float | None]] = defaultdict(list)
        self._failed: Counter[str] = Counter()


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    found = np.asarray(values, np.float64)
    return {
        f"{name}_mean": float(found.mean()),
        f"{name}_std": float(found.std()),
        f"{name}_max": float(found.max()),
        f"{name}_min": float(found.min()),
    }
