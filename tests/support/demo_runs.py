"""Synthetic runs for the tests, the benchmark and the screenshots of the page. No service is needed.

quickstart     a finished run of 60 steps that learns to add, like configs/quickstart.yaml
quickstart-lr3 the same with a higher learning rate, for a comparison
quickstart-seed2 the same as quickstart with another seed, stopped at step 45
training       the same, live: one step every two seconds of the clock
crashed        a run whose trainer stopped at step 37
long           10,000 steps and 100,000 rollouts
hostile        completions that try to be more than text
agents         rollouts of one, two and three branches with tool calls; every second group is hostile
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from tests.support.demo_agents import agent_group

from gristmill_view.run_source import RunSource
from gristmill_view.series import series
from gristmill_view.source import (
    Download,
    Highlight,
    News,
    Overview,
    PromptHistory,
    RolloutPage,
    RolloutQuery,
    RunLine,
    Series,
    Timeline,
    ViewError,
)
from gristmill_view.timeline import Work, timeline, window

HOSTILE: Final = (
    "<script>window.__owned = 1; document.title = 'owned'</script>",
    '<img src=x onerror="window.__owned = 1"><svg onload="window.__owned = 1">',
    "</pre></article></main><style>*{display:none}</style><h1 id=owned>owned</h1>",
    'javascript:window.__owned=1 [click](javascript:window.__owned=1) <a href="javascript:window.__owned=1">x</a>',
    "\u202eesrever ni si siht\u202c then normal, \u2066isolated\u2069, zero\u200bwidth, \ufeffmark",
    "\x1b[31mred\x1b[0m \x00null \x07bell \x9b31m \r\n\ttab",
    "{{ 7 * 7 }} ${7 * 7} <%= 7 * 7 %> %s %n &lt;script&gt; &#x202e; <!-- comment",
    "👩‍🚀 e\u0301 漢字 עברית العربية " + "Z\u0351\u036b\u0343\u036a\u0302" * 3,
    "a" * 20_000 + " no break anywhere",
    "<think>I could <b>inject</b> this</think><answer>\u202e57</answer>",
    "",
    "\n".join(f"line {number}" for number in range(900)),
)
_PARTS: Final = {"format": 0.2, "accuracy": 0.8}
_DATA_ROWS: Final = 64
"""Prompts of the data set, which each run goes through again and again."""
_STEP_S: Final = 2.0
_START_MS: Final = 1_795_430_000_000
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Run:
    name: str
    steps: int
    done: int
    groups: int = 16
    size: int = 8
    seed: int = 1
    rate: float = 1.0e-4
    middle: float = 0.38
    """Share of the run after which half of the answers are right."""
    state: str = "finished"
    hostile: bool = False
    live: bool = False
    thinking: bool = False
    agents: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def per_step(self) -> int:
        return self.groups * self.size


_RUNS: Final = {
    run.name: run
    for run in (
        _Run("training", 200, 24, state="open", live=True, seed=7),
        _Run("quickstart", 60, 60),
        _Run("quickstart-lr3", 60, 60, rate=3.0e-4, middle=0.2, seed=2, extra={"trainer.clip_grad_norm": 0.5}),
        _Run("quickstart-seed2", 60, 45, state="stopped", seed=8),
        _Run("crashed", 60, 37, state="stopped", seed=3),
        _Run("long", 10_000, 10_000, groups=1, size=10, seed=4, thinking=True),
        _Run("hostile", 12, 12, groups=2, size=6, seed=5, hostile=True),
        _Run("agents", 4, 4, groups=2, size=3, seed=6, agents=True),
    )
}


@functools.cache
def _draws(run: _Run) -> tuple[_Floats, _Floats]:
    """Returns two uniform numbers per rollout of the whole run."""
    random = np.random.default_rng(run.seed)
    count = run.steps * run.per_step
    return random.random(count), random.random(count)


def _learned(run: _Run, step: _Floats) -> _Floats:
    """Returns the chance of a right answer at a step."""
    return np.asarray(0.06 + 0.9 / (1 + np.exp(-(step / run.steps - run.middle) * 11)))


@functools.cache
def _columns(run: _Run) -> dict[str, npt.NDArray[Any]]:
    """Returns the numeric columns of all rollouts of the whole run."""
    first, second = _draws(run)
    count = len(first)
    index = np.arange(count)
    step = index // run.per_step + 1
    difficulty = np.repeat(np.random.default_rng(run.seed + 50).normal(0, 0.18, count // run.size), run.size)
    chance = _learned(run, step.astype(float))
    right = first < np.clip(chance + difficulty, 0, 1)
    formed = right | (second < np.clip(chance + 0.1, 0, 1))
    reward = _PARTS["format"] * formed + _PARTS["accuracy"] * right
    grouped = reward.reshape(-1, run.size)
    advantage = (grouped - grouped.mean(1, keepdims=True)).reshape(-1)
    tokens = (5 + 2 * second + 14 * ~formed + (40 * second if run.thinking else 0)).astype(int)
    finish = np.where(~formed & (second > 0.93), "length", "stop")
    outcome = np.full(count, "trained", dtype=object)
    groups = np.arange(count // run.size)
    outcome[np.repeat(groups % 97 == 41, run.size)] = "dropped"
    outcome[np.repeat(groups % 211 == 100, run.size)] = "dead"
    outcome[np.repeat(groups % 307 == 19, run.size)] = "lost"
    return {
        "step": step, "right": right, "formed": formed, "reward": reward, "advantage": advantage,
        "completion_tokens": tokens, "finish_reason": finish, "outcome": outcome,
        "staleness": (second[:: run.size].repeat(run.size) > 0.8).astype(int), "row": index // run.size,
        "seconds": 0.02 * tokens + 0.05,
    }  # fmt: skip


@functools.cache
def _metrics(run: _Run) -> dict[str, _Floats]:
    columns = _columns(run)
    random = np.random.default_rng(run.seed + 99)
    steps = np.arange(1, run.steps + 1, dtype=float)

    def noise(scale: float) -> _Floats:
        return random.normal(0, scale, run.steps)

    def by_step(name: str) -> npt.NDArray[Any]:
        return columns[name].astype(float).reshape(run.steps, run.per_step)

    learned = _learned(run, steps)
    wait = np.abs(0.35 + noise(0.08)) + (steps % 20 == 0) * 0.9
    return {
        "reward_mean": by_step("reward").mean(1),
        "reward_std": by_step("reward").std(1),
        "reward_parts.format": by_step("formed").mean(1),
        "reward_parts.accuracy": by_step("right").mean(1),
        "source_rewards.sums": by_step("right").mean(1),
        "source_rewards.programs": by_step("formed").mean(1),
        "completion_tokens_mean": by_step("completion_tokens").mean(1),
        "cut_off_share": (columns["finish_reason"].reshape(run.steps, -1) == "length").mean(1),
        "loss": 0.02 * (1 - learned) + noise(0.012),
        "grad_norm": np.abs(1.1 - 0.7 * learned + noise(0.15)),
        "entropy_mean": 0.45 - 0.36 * learned + noise(0.015),
        "kl_rollout": np.abs(noise(2e-5)) + 1e-6,
        "rollout_logprob_diff_mean": np.abs(2.6e-5 + noise(5e-6)),
        "rollout_logprob_diff_max": np.abs(9e-4 + noise(3e-4)),
        "ratio.p01": 1 - np.abs(0.04 + noise(0.01)),
        "ratio.p50": 1 + noise(0.0005),
        "ratio.p99": 1 + np.abs(0.05 + noise(0.012)),
        "clip_low_share": np.clip(0.004 + noise(0.002), 0, 1),
        "clip_high_share": np.clip(0.006 + noise(0.003), 0, 1),
        "staleness_mean": by_step("staleness").mean(1),
        "zero_advantage_share": (by_step("reward").reshape(run.steps, -1, run.size).std(2) < 1e-9).mean(1),
        "tokens_per_second": 9000 + noise(600) - 1500 * (steps % 20 == 0),
        "learning_rate": np.full(run.steps, run.rate),
        "seconds.wait": wait,
        "seconds.pack": np.abs(0.01 + noise(0.002)),
        "seconds.train": np.abs(0.24 + noise(0.02)),
        "seconds.publish": np.abs(0.07 + noise(0.01)),
        "seconds.checkpoint": (steps % 5 == 0) * np.abs(0.06 + noise(0.01)),
    }


@functools.cache
def _rows(run: _Run) -> list[dict[str, float]]:
    """Returns the trainer's rows of the whole run, flat."""
    metrics = _metrics(run)
    spent = sum(values for name, values in metrics.items() if name.startswith("seconds."))
    ends = _START_MS / 1000 + np.cumsum(spent)
    return [
        {"step": at + 1, "tokens": 2200, "finished_at": float(ends[at])}
        | {name: float(values[at]) for name, values in metrics.items()}
        for at in range(run.steps)
    ]


@functools.cache
def _numbers(row: int) -> tuple[int, int]:
    """Returns the numbers to add in a row of the data set."""
    left, right = np.random.default_rng(row).integers(1, 90, 2)
    return int(left), int(right)


class DemoSource(RunSource):
    """Synthetic runs. `clock`: seconds, which move the live run on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.env_down = False
        """True: the live run's environment has stopped, as if it was killed."""

    async def runs(self) -> list[RunLine]:
        """Returns the runs, the live one first."""
        return [self._run_line(run, number) for number, run in enumerate(_RUNS.values())]

    def _run_line(self, run: _Run, number: int) -> RunLine:
        done = self._done(run)
        rewards = _metrics(run)["reward_mean"][:done]
        picked = np.linspace(0, max(done - 1, 0), min(done, 60)).astype(int)
        return {
            "run": run.name, "state": run.state, "step": done, "steps": run.steps,
            "reward": float(rewards[-1]) if done else None, "started_ms": _START_MS - number * 7_300_000,
            "live": run.live, "config_name": "hostile" if run.hostile else "quickstart",
            "rewards": [float(value) for value in rewards[picked]],
        }  # fmt: skip

    def _run(self, name: str) -> _Run:
        if name not in _RUNS:
            raise ViewError(
                "run_missing", f"The run {name!r} does not exist here.", remedy="Choose a run from the list."
            )
        return _RUNS[name]

    def _done(self, run: _Run) -> int:
        moved = int((self._clock() - self._began) / _STEP_S) if run.live and not self.env_down else 0
        return min(run.steps, run.done + moved)

    async def overview(self, run: str) -> Overview:
        """Returns the state of a run."""
        found = self._run(run)
        done = self._done(found)
        trained = done * found.groups
        version = f"1.{done}"
        crashed, live = found.state == "stopped", found.live
        state = "up" if live else "down" if crashed else "done"
        env_state = "down" if live and self.env_down else state
        trouble: Any = None
        if crashed:
            trouble = {
                "code": "trainer_stopped",
                "text": f"The trainer stopped at step {done} of {found.steps}: it was killed (exit code 137).",
                "remedy": "Free memory or lower trainer.batch_size, then start the same command again: it resumes.",
            }
        elif env_state == "down":
            trouble = {
                "code": "env_down", "text": "The environment env-1 sent its last request 11 s ago.",
                "remedy": "Read runs/training/logs/env.log. The run resumes when it is started again.",
            }  # fmt: skip
        dropped = {"all_scores_same": trained // 97, "stale": trained // 260}
        return {
            "run": run, "state": found.state, "protocol": "gristmill", "step": done, "steps": found.steps,
            "tokens_per_second": float(_metrics(found)["tokens_per_second"][done - 1]) if live else None,
            "seconds_left": (found.steps - done) * _STEP_S if live else None,
            "services": [
                {"name": "model", "state": state, "version": version, "heartbeat_s": 0.4 if live else None,
                 "detail": "serves the newest weights" if live else ""},
                {"name": "env-1", "state": env_state, "version": version,
                 "heartbeat_s": 11.0 if env_state == "down" and live else 0.8 if live else None,
                 "detail": "16 rows in work" if env_state == "up" else ""},
                {"name": "api", "state": state, "version": None, "heartbeat_s": 0.0 if live else None, "detail": ""},
                {"name": "trainer", "state": "down" if crashed else state, "version": version,
                 "heartbeat_s": 1.1 if live else 3120.0 if crashed else None,
                 "detail": "waits for groups" if live else "killed (exit code 137)" if crashed else ""},
            ],
            "queue": {"ready": 3 if live else 5 if crashed else 0, "leased": 16 if live or crashed else 0,
                      "dead": trained // 211, "trained": trained, "dropped": sum(dropped.values())},
            "waiting": [{"who": "trainer", "for": "13 more groups from env-1"}] if live else [],
            "trouble": trouble,
            "settings": self._settings(found),
            "evaluations": [] if found.hostile else self._evaluations(found, done),
            "live": live, "started_ms": _START_MS,
            "dropped": {name: count for name, count in dropped.items() if count},
            "receipts": {
                "proven": done + 1, "publications": done + 1,
                "newest": [{"server": "http://model:9001", "version": version, "state": "ok", "difference": 2.9e-7,
                            "change": 0.031, "seconds": 0.012}],
            },
        }  # fmt: skip

    def _settings(self, run: _Run) -> dict[str, Any]:
        return {
            "model": "tiny", "group_size": run.size, "dataset.dataset_path": "datasets/quickstart/train.jsonl",
            "dataset.temperature": 1.0, "dataset.max_tokens": 24,
            "dataset.reward_functions": "0.2 × format, 0.8 × accuracy",
            "trainer.training_steps": run.steps, "trainer.learning_rate": run.rate, "trainer.max_staleness": 0,
            "trainer.batch_size": 64, "trainer.seed": run.seed, **run.extra,
        }  # fmt: skip

    def _evaluations(self, run: _Run, done: int) -> list[Any]:
        points = []
        for step in range(0, done + 1, max(1, run.steps // 6)):
            score = float(_learned(run, np.array([float(step)]))[0])
            half = 1.96 * math.sqrt(score * (1 - score) / 200)
            points.append({"step": step, "score": score, "n": 200, "low": score - half, "high": min(1.0, score + half)})
        return points

    async def series(self, run: str, names: Sequence[str], points: int) -> Series:
        """Returns metrics in buckets."""
        found = self._run(run)
        return cast(Series, series(_rows(found)[: self._done(found)], names, points))

    async def news(self, run: str, after_step: int) -> News:
        """Returns the steps since `after_step`."""
        found = self._run(run)
        done = self._done(found)
        rows = _rows(found)[max(after_step, done - 512, 0) : done]
        return {"steps": rows, "last_step": done, "overview": await self.overview(run)}

    async def step(self, run: str, step: int) -> dict[str, Any]:
        """Returns the groups of a step."""
        found = self._run(run)
        if not 1 <= step <= self._done(found):
            raise ViewError(
                "step_missing", f"The run {run} has no step {step}.", remedy=f"It has steps 1 to {self._done(found)}."
            )
        columns = _columns(found)
        groups = []
        for number in range((step - 1) * found.groups, step * found.groups):
            part = slice(number * found.size, (number + 1) * found.size)
            rewards = columns["reward"][part]
            question, _ = self._row(found, number)
            groups.append({
                "group_id": f"g{number:08d}", "env_id": "env-1", "row": number,
                "rewards": [float(value) for value in rewards], "outcome": columns["outcome"][part][0],
                "staleness": int(columns["staleness"][part][0]), "prompt_start": question[:160],
                "same": bool(rewards.max() - rewards.min() < 1e-9),
            })  # fmt: skip
        values = {name: value for name, value in _rows(found)[step - 1].items() if name != "step"}
        return {"step": step, "metrics": values, "groups": groups}

    async def timeline(self, run: str, step: int) -> Timeline:
        """Returns the timeline of a step, in which the environment works in the middle of each wait."""
        found = self._run(run)
        row = _rows(found)[step - 1]
        seconds = {name.removeprefix("seconds."): value for name, value in row.items() if name.startswith("seconds.")}
        times = window([{"step": step, "finished_at": row["finished_at"], "seconds": seconds}], step)
        begin, wait = times.start + seconds["publish"] + seconds["checkpoint"], seconds["wait"]
        works = [
            Work(
                f"g{(step - 1) * found.groups + at:08d}", "env-1", begin, begin + wait * (0.3 + 0.4 * at / found.groups)
            )
            for at in range(found.groups)
        ]
        return timeline(times, works)

    async def group(self, run: str, group_id: str) -> dict[str, Any]:
        """Returns a group."""
        found = self._run(run)
        number = int(group_id[1:]) if group_id[1:].isdecimal() and len(group_id) < 12 else -1
        if not 0 <= number < self._done(found) * found.groups:
            raise ViewError("group_missing", f"The run {run} has no group {group_id!r}.", remedy="Search the rollouts.")
        columns = _columns(found)
        first = number * found.size
        if found.agents:
            return agent_group(group_id, int(columns["step"][first]), HOSTILE if number % 2 else ())
        question, answer = self._row(found, number)
        outcome = columns["outcome"][first]
        lost = outcome == "lost"
        completions = [] if lost else [self._completion(found, index) for index in range(first, first + found.size)]
        return {
            "group_id": group_id, "row": number, "env_id": "env-1", "step": int(columns["step"][first]),
            "prompt": f"Question: {question}\nAnswer:", "question": f"Question: {question}", "answer": answer,
            "outcome": outcome,
            "reason": _reason(outcome), "staleness": int(columns["staleness"][first]),
            "messages": [{"role": "system", "content": "Answer as <answer>number</answer>."},
                         {"role": "user", "content": question}],
            "left_out": [], "completions": completions,
        }  # fmt: skip

    def _row(self, run: _Run, number: int) -> tuple[str, str]:
        left, right = _numbers(number % _DATA_ROWS)
        question = f"What is {left} + {right}?"
        return (f"{HOSTILE[number % 7]} {question}" if run.hostile else question), str(left + right)

    def _text(self, run: _Run, index: int) -> tuple[str, str | None]:
        """Returns a completion and the answer that it gives."""
        columns = _columns(run)
        _, answer = self._row(run, index // run.size)
        second = float(_draws(run)[1][index])
        if run.hostile:
            return HOSTILE[index % len(HOSTILE)], None
        value = answer if columns["right"][index] else str(int(answer) + 1 + int(second * 9))
        if columns["finish_reason"][index] == "length":
            return "<answer>" + "1 " * 10, None
        text = (
            f"<answer>{value}</answer>"
            if columns["formed"][index]
            else f"The sum is {value}, or maybe {int(value) + 2}"
        )
        if run.thinking:
            text = f"<think>I add the tens, then the units. That gives {value}.</think>\n{text}"
        return text, value if columns["formed"][index] else None

    def _completion(self, run: _Run, index: int) -> dict[str, Any]:
        columns = _columns(run)
        text, extracted = self._text(run, index)
        random = np.random.default_rng(run.seed * 7_000_003 + index)
        pieces = _pieces(text)
        sampler = np.minimum(-random.exponential(0.25, len(pieces)), -1e-6)
        difference = random.normal(0, 2e-4, len(pieces))
        advantage = float(columns["advantage"][index])
        outcome = columns["outcome"][index]
        trained = outcome == "trained"
        tokens = []
        for at, piece in enumerate(pieces):
            masked = len(pieces) > 8 and 3 <= at % 60 < 6
            trainer = float(sampler[at] + difference[at])
            tokens.append({
                "text": piece, "mask": not masked, "sampler": None if masked else float(sampler[at]),
                "trainer": trainer if trained and not masked else None,
                "ratio": math.exp(difference[at]) * (1.3 if at % 23 == 11 else 1) if trained and not masked else None,
                "entropy": float(random.exponential(0.3)) if trained else None,
                "advantage": advantage if trained and not masked else None,
            })  # fmt: skip
        turns = []
        if run.thinking:
            thinking, _, rest = text.partition("</think>")
            turns = [
                {"role": "assistant", "content": rest.strip(), "thinking": thinking.removeprefix("<think>")},
            ]
        return {
            "text": text, "turns": turns, "reward": float(columns["reward"][index]),
            "parts": {"format": float(columns["formed"][index]), "accuracy": float(columns["right"][index])},
            "advantage": advantage if trained else None, "extracted": extracted,
            "finish_reason": str(columns["finish_reason"][index]), "version": f"1.{int(columns['step'][index]) - 1}",
            "outcome": outcome, "reason": _reason(outcome), "tokens": tokens,
        }  # fmt: skip

    async def prompt(self, run: str, group_id: str, of: str) -> PromptHistory:
        """Returns the groups with the same row of the data set."""
        found, group = self._run(run), await self.group(of, group_id)
        numbers = range(group["row"] % _DATA_ROWS, self._done(found) * found.groups, _DATA_ROWS)
        groups: list[Any] = []
        for number in numbers[-200:]:
            made = await self.group(run, f"g{number:08d}")
            ordered = sorted(made["completions"], key=lambda one: one["reward"])
            groups.append({
                **{name: made[name] for name in ("group_id", "step", "outcome", "reason")},
                "rewards": [one["reward"] for one in made["completions"]],
                "best": ordered[-1]["text"][:300] if ordered else None,
                "worst": ordered[0]["text"][:300] if ordered else None,
            })  # fmt: skip
        return {"question": group["question"], "total": len(numbers), "groups": groups}

    async def rollouts(self, run: str, query: RolloutQuery) -> RolloutPage:
        """Returns a page of rollouts."""
        found = self._run(run)
        chosen = self._select(found, query)
        rewards = _columns(found)["reward"][chosen]
        counts, edges = np.histogram(rewards, bins=20, range=(0, 1)) if len(rewards) else (np.array([]), np.array([]))
        bars = [
            {"low": float(edges[at]), "high": float(edges[at + 1]), "count": int(count)}
            for at, count in enumerate(counts)
        ]
        page = chosen[query.offset : query.offset + query.limit]
        return {"total": len(chosen), "rows": [self._rollout(found, int(index)) for index in page], "histogram": bars}

    def _select(self, run: _Run, query: RolloutQuery) -> npt.NDArray[Any]:
        columns = _columns(run)
        count = self._done(run) * run.per_step
        keep = np.ones(count, bool)
        reward = columns["reward"][:count]
        for limit, name, side in (
            (query.step_from, "step", 1), (query.step_to, "step", -1),
            (query.reward_min, "reward", 1), (query.reward_max, "reward", -1),
        ):  # fmt: skip
            if limit is not None:
                keep &= side * columns[name][:count] >= side * limit - 1e-9
        for value, name in ((query.outcome, "outcome"), (query.finish_reason, "finish_reason")):
            if value is not None:
                keep &= columns[name][:count] == value
        if query.part in ("format", "accuracy"):
            values = columns["formed" if query.part == "format" else "right"][:count].astype(float)
            keep &= values >= (query.part_min if query.part_min is not None else -math.inf)
            keep &= values <= (query.part_max if query.part_max is not None else math.inf)
        if query.group is not None:
            keep &= np.arange(count) // run.size == int(query.group[1:] or -1)
        if query.env not in (None, "env-1"):
            keep &= False
        chosen = np.flatnonzero(keep)
        if query.text is not None:
            needle = query.text.casefold()
            chosen = np.array(
                [
                    at
                    for at in chosen.tolist()
                    if needle in f"{self._row(run, at // run.size)[0]} {self._text(run, at)[0]}".casefold()
                ],
                dtype=np.int64,
            )
        name = query.order.removeprefix("-")
        key = reward[chosen] if name == "reward" else columns[name][chosen]
        return chosen[np.argsort(-key if query.order.startswith("-") else key, kind="stable")]

    def _rollout(self, run: _Run, index: int) -> dict[str, Any]:
        columns = _columns(run)
        text, extracted = self._text(run, index)
        question, answer = self._row(run, index // run.size)
        outcome = columns["outcome"][index]
        return {
            "run": run.name, "step": int(columns["step"][index]), "group_id": f"g{index // run.size:08d}",
            "sequence": index % run.size, "rollout": index % run.size, "branches": 1, "env_id": "env-1",
            "row": index // run.size, "prompt": question,
            "completion": None if outcome == "lost" else text,
            "completion_tokens": int(columns["completion_tokens"][index]),
            "reward": float(columns["reward"][index]),
            "reward_parts": {"format": float(columns["formed"][index]), "accuracy": float(columns["right"][index])},
            "advantage": float(columns["advantage"][index]) if outcome == "trained" else None,
            "finish_reason": str(columns["finish_reason"][index]), "outcome": outcome,
            "outcome_reason": _reason(outcome), "answer": answer, "extracted": extracted,
            "staleness": int(columns["staleness"][index]), "seconds": float(columns["seconds"][index]),
        }  # fmt: skip

    async def highlights(self, run: str, steps: Sequence[int]) -> list[Highlight]:
        """Returns the best and the worst completion of some steps."""
        found: list[Highlight] = []
        for step in steps:
            rows: list[dict[str, Any]] = []
            for order in ("-reward", "reward"):
                query = RolloutQuery(step_from=step, step_to=step, order=order, limit=1, outcome="trained")
                rows += [row for row in (await self.rollouts(run, query))["rows"] if row not in rows]
            found += [{"step": step, "rows": rows}] if rows else []
        return found

    async def download(self, run: str, query: RolloutQuery, kind: Download) -> AsyncIterator[bytes]:
        """Yields JSONL. A synthetic run has no Parquet file."""
        found = self._run(run)
        if kind is Download.PARQUET:
            raise ViewError("no_parquet", "A demo run has no Parquet file.", status=409, remedy="Choose JSONL.")
        for index in self._select(found, query):
            yield json.dumps(self._rollout(found, int(index))).encode() + b"\n"

    async def compare(self, runs: Sequence[str]) -> dict[str, Any]:
        """Returns the settings that differ."""
        settings = {name: self._settings(self._run(name)) for name in runs}
        keys = dict.fromkeys(key for found in settings.values() for key in found)
        differ = [
            {"key": key, "values": {name: found.get(key) for name, found in settings.items()}}
            for key in keys
            if len({json.dumps(found.get(key)) for found in settings.values()}) > 1
        ]
        lines = [line for line in await self.runs() if line["run"] in runs]
        return {"settings_diff": differ, "runs": lines}


def _reason(outcome: str) -> str | None:
    reasons = {
        "dropped": "all_scores_same", "dead": "longer than trainer.seq_len", "lost": "the archive's disk was full"
    }  # fmt: skip
    return reasons.get(outcome)


def _pieces(text: str) -> list[str]:
    """Splits a text into parts of one to four characters, as a tokenizer would."""
    sizes = (3, 1, 2, 4, 1)
    pieces: list[str] = []
    at = 0
    while at < len(text) and len(pieces) < 4000:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    return pieces
