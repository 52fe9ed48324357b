"""Reports a training run to its observers: W&B, the file of its groups, Prometheus. Their errors never end the run.

`Observers` receives every event of the serve loop. `WandbTracker` collects scored prompts in a `Window` of metrics and
submitted groups in `Rollouts`, a table of text to read, and logs both every few groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gristmill import Permit, TrajectoryGroup
from gristmill.internal.tracking import ObserverErrors, start_wandb
from gristmill_env.errors import DropReason
from gristmill_env.progress import Tally
from gristmill_env.prometheus import EnvMetrics
from gristmill_env.rewards import CorrectnessReward
from gristmill_env.rollouts.groups import Rollout, RolloutGroup
from gristmill_env.saved import Attempt, DroppedSaver, GroupSaver
from gristmill_env.settings.run import EnvConfig

T = TypeVar("T")

_WANDB = "W&B"
_SAVED = "saved groups"
_DROPPED = "dropped groups"
_PROMETHEUS = "Prometheus"


class Observers:
    """Passes each event of a training to its observers.

    An error of an observer is logged and counted, and the training continues. Without observers, every method does
    nothing.
    """

    def __init__(
        self,
        tracker: Callable[[], WandbTracker] | None = None,
        saver: Callable[[], GroupSaver] | None = None,
        metrics: Callable[[ObserverErrors], EnvMetrics] | None = None,
        dropped: DroppedSaver | None = None,
    ) -> None:
        """`tracker`, `saver` and `metrics` each open an observer. An observer that does not open is omitted.

        Raises ConfigError when a setting of an observer is wrong.
        """
        self.errors = ObserverErrors()
        self._tracker = self._open(_WANDB, tracker)
        self._saver = self._open(_SAVED, saver)
        self._dropped = dropped
        self._metrics = None if metrics is None else self._open(_PROMETHEUS, partial(metrics, self.errors))

    def scored(self, group: RolloutGroup, step: int) -> None:
        """Reports a scored group, submitted or dropped. `step`: training steps done when its permit was given."""
        if self._tracker is not None:
            with self.errors.of(_WANDB):
                self._tracker.scored(group, step)
        if self._metrics is not None:
            with self.errors.of(_PROMETHEUS):
                self._metrics.scored(group)

    async def submitted(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally, scored: RolloutGroup) -> None:
        """Reports a submitted group. `texts`: prompt and completion as text, for each sequence of the group."""
        if self._tracker is not None:
            with self.errors.of(_WANDB):
                self._tracker.group(group, texts, tally)
        if self._saver is not None:
            with self.errors.of(_SAVED):
                await self._saver.save(scored)
        if self._metrics is not None:
            with self.errors.of(_PROMETHEUS):
                self._metrics.finished(None, scored.item.source)

    async def dropping(self, permit: Permit, reason: DropReason, error: str, attempt: Attempt) -> None:
        """Saves the content of a group before its row is dropped, so that no dropped group is without its content."""
        if self._dropped is not None:
            with self.errors.of(_DROPPED):
                await self._dropped.save(permit, reason, error, attempt)

    def dropped(self, reason: DropReason, source: str | None = None) -> None:
        """Reports a row that was dropped. `source`: its name, if the run has `sources`."""
        if self._metrics is not None:
            with self.errors.of(_PROMETHEUS):
                self._metrics.finished(reason, source)

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Reports the evaluation of the weights of training step `step`. `results`: by name, without a prefix."""
        if self._tracker is not None:
            with self.errors.of(_WANDB):
                self._tracker.evaluation(results, step)
        if self._metrics is not None:
            with self.errors.of(_PROMETHEUS):
                self._metrics.evaluation(results, step)

    def close(self) -> None:
        """Flushes and closes every observer, and logs how many errors each observer had."""
        for name, observer in ((_WANDB, self._tracker), (_SAVED, self._saver)):
            if observer is not None:
                with self.errors.of(name):
                    observer.close()
        self.errors.report()

    def _open(self, name: str, factory: Callable[[], T] | None) -> T | None:
        if factory is not None:
            with self.errors.of(name):
                return factory()
        return None


_NOT_IN_THE_DARK = 16
"""Times `min_items_sent_before_logging`: after this number of scored prompts, they are logged even without groups.

Users most need the metrics of a run whose groups are all dropped."""


class WandbTracker:
    """A W&B run; an offline run without credentials, or if W&B does not answer.

    Each environment process has one run, in a group named after the training run. The x axis is `policy_step`: the
    training steps of the newest weights for which a prompt was scored.
    """

    def __init__(
        self,
        run_id: str,
        config: EnvConfig,
        recorded: dict[str, Any],
        folder: Path,
        environ: Mapping[str, str],
        *,
        correctness: Mapping[str | None, CorrectnessReward],
    ) -> None:
        """`recorded`: the run's record, shown as its configuration. `folder`: the runs' folder.

        `correctness`: the correctness reward of each source.
        """
        self._run = start_wandb(run_id, "env", recorded, folder / run_id, environ, name=config.wandb_name)
        self._run.define_metric("policy_step")
        self._run.define_metric("*", step_metric="policy_step")
        self._window = Window(correctness)
        self._rollouts = Rollouts(config.num_rollouts_to_keep, config.num_rollouts_per_group_for_logging)
        self._log_after = max(1, config.min_items_sent_before_logging)
        self._unlogged = 0
        self._step = 0
        self._tally: Tally | None = None

    def scored(self, group: RolloutGroup, step: int) -> None:
        """Counts the prompt. Logs it with the next groups, or without groups if too few are submitted."""
        self._step = max(self._step, step)
        self._window.add(group)
        if self._window.prompts >= _NOT_IN_THE_DARK * self._log_after:
            self._log()

    def group(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally) -> None:
        """Counts the group. Logs all since the last log after `min_items_sent_before_logging` groups."""
        self._rollouts.add(group, texts)
        self._tally = tally
        self._unlogged += 1
        if self._unlogged >= self._log_after:
            self._log()

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Logs the results at once, as eval/NAME."""
        self._run.log({"policy_step": step, **{f"eval/{name}": value for name, value in results.items()}})

    def close(self) -> None:
        """Logs the remaining values, flushes, and closes the run."""
        if self._unlogged or self._window.prompts:
            self._log()
        self._run.finish()

    def _log(self) -> None:
        values: dict[str, Any] = {"policy_step": self._step, **self._window.take(self._tally)}
        if rows := self._rollouts.take():
            import wandb

            values["train/rollouts"] = wandb.Table(columns=[*COLUMNS], data=[list(row) for row in rows])
        self._unlogged = 0
        self._run.log(values)


class Window:
    """Collects scored prompts until they are logged, as metrics under the names that users of Atropos know.

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
    source/NAME/rewards_mean              totals of the completions of a source, if the run has `sources`
    source/NAME/submitted, /dropped       groups of a source since the process started
    ====================================  ====================================================================

    All metrics except groups/ cover every scored prompt. A share of right answers over submitted groups alone
    would be biased, because groups with equal scores, such as all right or all wrong, are dropped.
    """

    def __init__(self, correctness: Mapping[str | None, CorrectnessReward]) -> None:
        """`correctness`: the correctness reward of each source; of None for a run without `sources`."""
        self._correctness = correctness
        self.prompts = 0
        self._sent_before = self._dropped_before = 0
        self._clear()

    def add(self, group: RolloutGroup) -> None:
        """Adds a scored prompt."""
        self.prompts += 1
        self._seconds.append(group.seconds)
        self._lengths += [rollout.sampled for rollout in group.rollouts if rollout.sampled is not None]
        self._cut += [rollout.finish_reason == "length" for rollout in group.rollouts]
        source = group.item.source
        correctness = self._correctness[source]
        for score in group.scores:
            if score.total is not None:
                self._totals.append(score.total)
                if source is not None:
                    self._by_source[source].append(score.total)
            value = score.parts.get(correctness.name) if correctness.compares else None
            if value is not None:
                self._right.append(bool(correctness.is_right(value)))
            for name, value in score.parts.items():
                self._parts[name].append(value)
                self._failed[name] += name in score.failed

    def take(self, tally: Tally | None) -> dict[str, float]:
        """Returns the metrics by name, and starts a new window. Without a tally, omits the metrics of groups."""
        values: dict[str, float] = {}
        if self._totals:
            values |= _spread("train/rewards", self._totals)
        values |= {f"source/{name}/rewards_mean": float(np.mean(found)) for name, found in self._by_source.items()}
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
            for name, counts in tally.by_source.items():
                values |= {f"source/{name}/{outcome}": counts[outcome] for outcome in ("submitted", "dropped")}
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
        if self._right:
            values["train/percent_correct"] = float(np.mean(self._right))
        return values

    def _clear(self) -> None:
        self.prompts = 0
        self._totals: list[float] = []
        self._by_source: defaultdict[str, list[float]] = defaultdict(list)
        self._right: list[bool] = []
        self._lengths: list[int] = []
        self._cut: list[bool] = []
        self._seconds: list[float] = []
        self._parts: defaultdict[str, list[float | None]] = defaultdict(list)
        self._failed: Counter[str] = Counter()


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    numbers = np.asarray(values, np.float64)
    return {
        f"{name}_mean": float(numbers.mean()),
        f"{name}_std": float(numbers.std()),
        f"{name}_max": float(numbers.max()),
        f"{name}_min": float(numbers.min()),
    }


COLUMNS = ("text", "score", "group", "version")
"""Per row: prompt and completion, the weighted total, the group's id, and the version of the weights."""

Row = tuple[str, float, str, str]


class Rollouts:
    """The latest rollouts since the last `take`: a few completions as text, with their scores, for users to read."""

    def __init__(self, keep: int, per_group: int) -> None:
        """`keep`: rows in all. `per_group`: number of rows per group, from its first; -1: all."""
        self._rows: deque[Row] = deque(maxlen=keep)
        self._per_group = None if per_group < 0 else per_group

    def add(self, group: TrajectoryGroup, texts: Sequence[str]) -> None:
        """Keeps some sequences of a group. `texts`: one per sequence of the group."""
        for text, reward in list(zip(texts, group.rewards, strict=True))[: self._per_group]:
            self._rows.append((text, float(reward), group.group_id, str(group.oldest_version)))

    def take(self) -> list[Row]:
        """Returns the rows, oldest first, and clears them."""
        rows = list(self._rows)
        self._rows.clear()
        return rows


def in_words(rollout: Rollout) -> str:
    """Returns prompt and reply as the model saw and wrote them; for several turns, the conversation."""
    if rollout.replies == 1:
        return rollout.prompt.text.removesuffix(rollout.prompt.begun) + rollout.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in rollout.messages)
