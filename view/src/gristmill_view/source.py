"""The shapes of the answers of `RunSource`, which are the data behind the page.

The answers are JSON as the page reads it: a value that is unknown is null. A float that JSON cannot hold (NaN,
infinity) becomes null.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NotRequired, TypedDict, TypeVar

from gristmill.errors import GristmillError

LEFT_OUT: Final = "left_out"
"""Outcome of a rollout that failed, so that its group was submitted without it."""

T = TypeVar("T")
_THREADS: Final = ThreadPoolExecutor(4, thread_name_prefix="page")


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs work of the page in one of the page's threads. The trajectory API, which serves the page, needs the event
    loop's threads for submits and for the archive, and work of the page may wait for a slow Redis or disk.
    """
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *args)


class ViewError(GristmillError):
    """A request of the page that has no answer: an unknown run, step or group, or an invalid filter."""

    def __init__(self, code: str, message: str, *, status: int = 404, remedy: str = "") -> None:
        super().__init__(code, message)
        self.status: Final = status
        """The HTTP status of the answer."""
        self.remedy: Final = remedy


class RunLine(TypedDict):
    """One line of the list of runs."""

    run: str
    state: str
    """open, suspended, finished; `stopped` if no service works on an unfinished run."""
    step: int
    steps: int | None
    """The step at which the run ends; None: unknown."""
    reward: float | None
    """reward_mean of the newest step."""
    started_ms: int | None
    live: bool
    """True if an API reports the run's services."""
    config_name: str | None
    rewards: NotRequired[list[float | None]]
    """At most 60 points of reward_mean, for a sparkline."""


Overview = dict[str, Any]
"""The state of a run: `gristmill_view.overview.Overview` as `to_json` returns it."""


class Band(TypedDict):
    """One metric, one value per bucket of steps. `min` and `max` are missing if each bucket holds one step."""

    mean: list[float | None]
    min: NotRequired[list[float | None]]
    max: NotRequired[list[float | None]]


class Series(TypedDict):
    """Metrics by step, decimated to a number of buckets."""

    step: list[int]
    """The last step of each bucket."""
    sums: dict[str, list[float]]
    """`tokens` and `seconds` of all steps up to the end of each bucket, without pauses between two trainers."""
    series: dict[str, Band]
    phases: dict[str, list[float | None]]
    """Mean seconds per phase of a step."""
    names: list[str]
    """The metrics that the run has. At most 2,000."""


class Span(TypedDict):
    """A part of a `Lane`. Times are seconds since the start of the step."""

    start: float
    end: float
    what: str
    """A phase of the trainer; "work" or "wait" of an environment; the id of a group."""
    row: NotRequired[int]
    """Of a group: its row in the drawing."""


class Lane(TypedDict):
    """One trainer or environment."""

    name: str
    waited: float
    """Seconds without work."""
    spans: list[Span]
    groups: list[Span]


class Timeline(TypedDict):
    """A step from the end of the step before to its own end."""

    start_ms: int
    seconds: float
    lanes: list[Lane]
    complete: bool
    """False if more groups were in work than the answer has."""


class PromptGroup(TypedDict):
    """A group of one prompt."""

    group_id: str
    step: int | None
    """None: the group was not trained on, or its step is unknown."""
    outcome: str
    reason: str | None
    rewards: list[float]
    """At most 64."""
    best: str | None
    """The beginning of the completion with the highest reward. `worst`: with the lowest."""
    worst: str | None


class PromptHistory(TypedDict):
    """The groups of a run that have one prompt."""

    question: str
    total: int
    groups: list[PromptGroup]
    """In order of steps. At most 200, of the last steps; groups without a step are at the end."""


class RolloutPage(TypedDict):
    """One page of the rollouts that a query selects."""

    total: int
    rows: list[dict[str, Any]]
    """Columns of the rollouts table, without tokens and other lists per token."""
    histogram: NotRequired[list[dict[str, float]]]
    """Bars over the rewards of all selected rollouts: `low`, `high`, `count`."""
    recorded: NotRequired[bool]
    """False if a filter by step finds nothing because the run does not know the step of any trained group."""


class News(TypedDict):
    """What changed in a run since a step."""

    steps: list[dict[str, Any]]
    """Rows of metrics, flat, oldest first, each with `step`. At most 512."""
    last_step: int
    """The newest step. Below the step that was asked for if a trainer resumed from an earlier checkpoint."""
    overview: Overview


class Highlight(TypedDict):
    """The completions of a step with the highest and the lowest reward."""

    step: int
    rows: list[dict[str, Any]]
    """One or two, with the names of the rollouts table."""


class Download(StrEnum):
    """Formats of `RunSource.download`."""

    PARQUET = "parquet"
    JSONL = "jsonl"


ORDERS: Final = ("step", "reward", "completion_tokens", "advantage", "staleness", "seconds", "row")
"""Columns that the list of rollouts can be sorted by; a leading `-` sorts downwards."""


OUTCOMES: Final = ("trained", "dropped", "dead", "leased", "lost", "evaluation", LEFT_OUT)
"""The outcomes of completions in the table of rollouts."""


@dataclass(frozen=True, kw_only=True)
class RolloutQuery:
    """Filters of the list of rollouts. None: the filter is off."""

    step_from: int | None = None
    step_to: int | None = None
    """Inclusive."""
    group: str | None = None
    env: str | None = None
    outcome: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    finish_reason: str | None = None
    text: str | None = None
    """Part of the prompt or the completion; letters of both cases are the same."""
    part: str | None = None
    """Name of the reward that `part_min` and `part_max` bound."""
    part_min: float | None = None
    part_max: float | None = None
    order: str = "-step"
    limit: int = 50
    offset: int = 0
