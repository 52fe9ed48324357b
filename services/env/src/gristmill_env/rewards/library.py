"""Scores without a run: `reward.score(["... \\boxed{72}"], answer="#### 72")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from gristmill_env.errors import RewardError
from gristmill_env.rewards.inputs import PLURALS, Execution, Known
from gristmill_env.rewards.plan import Node, calls, outcomes
from gristmill_env.rewards.sample import Failure, Sample
from gristmill_env.running import Runner

_FIELDS = frozenset(field.name for field in fields(Sample)) - {"completion", "row"}


def score_now(
    bind: Callable[[Known, str], Node], name: str, completions: Sequence[str | Sample], inputs: Mapping[str, Any]
) -> list[float | None]:
    """Scores these completions as one group, on threads that all library calls share. Raises RewardError."""
    if isinstance(completions, str):
        raise RewardError(
            "completions_not_a_list",
            f"reward '{name}': score() takes a list of completions; write [completion]",
            reward=name,
        )
    samples = _samples(name, completions, inputs)
    if not samples:
        return []
    try:
        node = bind(_known(samples), name)
    except RewardError as error:
        raise RewardError(
            error.code, f"{error} (In score(), give it by its name: score(completions, answer=...))", **error.values
        ) from error
    made = calls([node], samples)
    _shared_runner().submit(call for group in made.values() for call in group).done.result()
    found = outcomes([node], made)[name]
    for outcome in found:
        if isinstance(outcome, Failure):
            raise RewardError(outcome.code, str(outcome), **outcome.values) from outcome.cause
    return [None if isinstance(outcome, Failure) else outcome for outcome in found]


@cache
def _shared_runner() -> Runner:
    return Runner(Execution().limits)


def _known(samples: Sequence[Sample]) -> Known:
    return Known(
        columns=tuple(dict.fromkeys(str(column) for sample in samples for column in sample.row)),
        has_answer=any(sample.answer is not None for sample in samples),
    )


def _samples(name: str, completions: Sequence[str | Sample], inputs: Mapping[str, Any]) -> list[Sample]:
    if any(isinstance(completion, Sample) for completion in completions):
        if inputs or not all(isinstance(completion, Sample) for completion in completions):
            raise RewardError(
                "samples_and_inputs",
                f"reward '{name}': a Sample holds all inputs; give samples only, or texts and inputs",
                reward=name,
            )
        return [completion for completion in completions if isinstance(completion, Sample)]
    size = len(completions)
    columns: dict[str, list[Any]] = {}
    for key, value in inputs.items():
        if isinstance(value, list) and not _one_message_list(key, value):
            if len(value) != size:
                raise RewardError(
                    "length_mismatch",
                    f"reward '{name}': {key} has {len(value)} items for {size} completions; a list holds one each, "
                    'anything else is shared by all. (Share a list as a column: row={"name": [...]})',
                    reward=name,
                    field=key,
                )
            columns[_singular(key)] = value
        else:
            columns[_singular(key)] = [value] * size
    samples = []
    for at, completion in enumerate(completions):
        if not isinstance(completion, str):
            raise RewardError(
                "completion_not_text",
                f"reward '{name}': completion {at} is {completion!r:.60}; text is wanted",
                reward=name,
                at=at,
            )
        own = {key: _as_text(key, values[at]) for key, values in columns.items()}
        row = {**own.pop("row", {}), **{key: own.pop(key) for key in [*own] if key not in _FIELDS}}
        samples.append(Sample(completion, row=row, **own))
    return samples


def _singular(key: str) -> str:
    key = PLURALS.get(key, key)
    return "answer" if key == "ground_truth" else key


def _one_message_list(key: str, value: list[Any]) -> bool:
    return key == "messages" and bool(value) and isinstance(value[0], Mapping)


def _as_text(key: str, value: Any) -> Any:
    """Converts a number given as an answer to text, because answers are text in a run."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number and key == "answer" else value
