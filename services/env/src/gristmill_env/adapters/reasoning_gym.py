"""reasoning-gym: rows of its generators for `dataset.rows`, and its own scorers as a reward."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from random import Random
from typing import Annotated, Any

from pydantic import Field

from gristmill.internal.settings import did_you_mean
from gristmill_env.adapters import require
from gristmill_env.errors import DatasetError


def rows(
    *,
    tasks: Annotated[dict[str, dict[str, Any] | None], Field(min_length=1)],
    size: Annotated[int, Field(ge=1)] = 5000,
    seed: int = 42,
    split: str = "train",
) -> Iterator[dict[str, Any]]:
    """Yields questions of the tasks in a random order.

    `tasks`: names of reasoning-gym's generators and their options, such as {chain_sum: {max_terms: 3}}. `size`:
    questions of each task; the rows end when one task has no more. `split`: a name; each has another seed.
    Raises DatasetError for a task that does not exist, and any error of a generator about its options.
    """
    random = Random(f"{seed} {split}")
    specs = {
        name: json.dumps({"size": size, "seed": random.getrandbits(31), **(options or {})})
        for name, options in tasks.items()
    }
    generators = {name: _generator(name, spec) for name, spec in specs.items()}
    used = dict.fromkeys(tasks, 0)
    while True:
        name = random.choice(list(tasks))
        index = used[name]
        if index >= generators[name].size:
            return
        used[name] += 1
        made = generators[name][index]
        entry = {"options": specs[name], "index": index}
        yield {"prompt": made["question"], "answer": made["answer"], "task": name, "entry": entry}


def score(completion: str, task: str, entry: Mapping[str, Any]) -> float:
    """Returns the score of the task for the text in the last <answer> tags: 0 to 1; 0 without such a text."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    generator, made = _made(task, entry["options"], entry["index"])
    return float(generator.score_answer(answer, made))


@functools.lru_cache(maxsize=1024)
def _made(name: str, options: str, index: int) -> tuple[Any, dict[str, Any]]:
    """Returns a generator and its entry, whose metadata may hold any object and is therefore no part of the row."""
    generator = _generator(name, options)
    return generator, generator[index]


@functools.lru_cache(maxsize=256)
def _generator(name: str, options: str) -> Any:
    """`options`: as JSON. Raises DatasetError, and EpisodeError if the package is not installed."""
    require("reasoning_gym", "reasoning-gym")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        hint = did_you_mean(name, list(DATASETS))
        raise DatasetError("unknown_task", f"reasoning-gym has no task '{name}'.{hint}", task=name)
    return reasoning_gym.create_dataset(name, **json.loads(options))
