"""The definition of an evaluation: all settings that must be equal for its prompts to belong together."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gristmill import SamplingParams
from gristmill.errors import PluginError
from gristmill_env.data import Item, PromptDataset
from gristmill_env.errors import DatasetError, EvaluationError
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import Task, load_task
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.run import differences

logger = logging.getLogger(__name__)

_MANY_ROWS = 100_000
"""From this number of training rows, the comparison takes seconds and is logged."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation's settings, complete and resolved. Stored with its results."""

    task: str
    """Name of the run or configuration."""
    model: str
    weights: str | None
    """The server's weight label at the start ("1.20"; "default" for the initial weights); None: the server has none."""
    creation: str | None = None
    """`RunRecord.creation` of the training whose weights are evaluated. None: no API knows these weights. A run that
    is deleted and created again has the same versions of other weights."""
    dataset: str
    """The data set and split."""
    rows: int
    """Rows of the data set."""
    prompts: int
    """Number of rows to evaluate, from the first, in the data set's order."""
    samples: int
    """Completions per prompt."""
    sampling: SamplingParams
    """The requested sampling. max_tokens is less for prompts that leave less room."""
    max_length: int
    """max_token_length: most tokens of prompt and completion together."""
    decides: str
    """The reward that decides whether a completion is right: a value of 1 or more. (Chosen by `correctness_reward`.)"""
    compares: bool
    """Whether that reward compares the completion with the row's answer, so that a final answer exists to extract."""
    training_rows: int | None = None
    """Evaluated rows whose prompts are prompts of the training too; None if the training's rows cannot be read."""
    settings: dict[str, Any]
    """The other settings of `dataset:`, and the rewards."""

    @property
    def how(self) -> str:
        """The sampling, for reports."""
        sampling = self.sampling
        return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}" if sampling.temperature else "greedy"

    @property
    def digest(self) -> str:
        """SHA-256 of the whole plan, as hexadecimal digits."""
        return hashlib.sha256(json.dumps(msgspec.to_builtins(self), sort_keys=True).encode()).hexdigest()

    def differences(self, other: Plan) -> list[str]:
        """Returns a line, such as "samples: 1 -> 4", for every setting that differs in `other`.

        `creation` and `training_rows` are not compared if one plan lacks them: the API, or the training's rows, were
        away then.
        """
        old, new = msgspec.to_builtins(self), msgspec.to_builtins(other)
        for name in ("creation", "training_rows"):
            if old[name] is None or new[name] is None:
                old[name] = new[name] = None
        return differences(old, new)


def evaluation_tasks(run: RunSettings) -> list[Task]:
    """Loads the task of each evaluation of the run; its own rows, if it names no evaluation set.

    Raises as `Task.load`, with the name; EvaluationError for a run with `sources` and without an evaluation set.
    """
    parts = run.by_evaluation()
    if not parts and run.config.sources:
        raise EvaluationError(
            "no_evaluation_set",
            "a run with sources has no rows to evaluate on by default: set eval_split or eval_dataset_path in the "
            "dataset of a source, or add `evaluations`",
        )
    if not parts:
        config = run.config.model_copy(update={"dataset": run.config.dataset.evaluation_set()})
        parts = [dataclasses.replace(run, config=config)]
    return [load_task(part, "evaluation") for part in parts]


def evaluations_folder(run: RunSettings) -> Path:
    """Returns the folder of the run's evaluations; each evaluation has a subfolder."""
    return run.run_folder / (run.config.data_dir_to_save_evals or "evaluations")


def number_of_prompts(config: DatasetConfig, rows: int, limit: int | None = None) -> int:
    """Returns the number of rows to evaluate. `limit`: most prompts if the configuration sets no limit."""
    return min(config.eval_limit or limit or rows, rows)


def count_training_rows(evaluated: PromptDataset, prompts: int, *training: PromptDataset) -> int:
    """Returns how many of the first `prompts` rows have the prompt of a training row. The answers are not compared,
    because the data sets may write them differently."""
    if (count := sum(map(len, training))) >= _MANY_ROWS:
        logger.info("compares %d rows of the evaluation with %d training rows", prompts, count)
    rows = Counter(map(_key, _items(evaluated, prompts)))
    unseen = set(rows)
    for item in itertools.chain.from_iterable(_items(dataset, len(dataset)) for dataset in training):
        unseen.discard(_key(item))
        if not unseen:
            break
    return sum(count for key, count in rows.items() if key not in unseen)


def training_datasets(run: RunSettings, name: str | None) -> list[PromptDataset] | None:
    """Loads the rows of the training with which an evaluation is compared; None if they cannot be loaded here.

    `name`: of the evaluation. The evaluation set of a source is compared with the source.
    """
    try:
        parts = run.by_source()
        compared = [part for part in parts if part.source == name] or parts
        return [PromptDataset(part.config.dataset, part.config_folder) for part in compared]
    except (DatasetError, PluginError) as error:
        logger.warning("the evaluation is not compared with the training's rows: %s", error)
        return None


def seen_in_training(count: int, prompts: int) -> str:
    """Returns the sentence about an evaluation on training rows."""
    return (
        f"{count} of {prompts} rows of the evaluation are training rows, so its score does not measure unseen rows; "
        "set eval_split or eval_dataset_path to other rows"
    )


def _items(dataset: PromptDataset, count: int) -> Iterator[Item]:
    for index in range(count):
        with contextlib.suppress(DatasetError):  # a bad row is neither trained on nor evaluated
            yield dataset.item_at(index)


def _key(item: Item) -> int:
    texts = [str(message.get("content")) for message in item.messages if message["role"] != "system"]
    return hash(tuple(" ".join(text.split()) for text in texts))


def make_plan(
    task: Task,
    *,
    model: str,
    weights: str | None,
    creation: str | None,
    limit: int | None = None,
    training_rows: int | None = None,
) -> Plan:
    """Returns the plan of an evaluation's task (`evaluation_tasks`).

    `model`: its served name. `weights`: the label. `creation`: of the training, if known. `limit`: most prompts if
    the configuration sets no limit. `training_rows`: of them, if known."""
    run, scorer, rows = task.run, task.scorer, len(task.dataset)
    config, settings = run.config, run.config.dataset
    named = {} if task.name is None else {"evaluation": task.name, "environment": config.environment.recorded()}
    correctness = scorer.correctness
    temperature = settings.eval_temperature
    if temperature is None:
        temperature = settings.temperature if settings.eval_samples > 1 else 0.0
    return Plan(
        task=run.run_id,
        model=model,
        weights=weights,
        creation=creation,
        dataset=task.dataset.label,
        rows=rows,
        prompts=number_of_prompts(settings, rows, limit),
        training_rows=training_rows,
        samples=settings.eval_samples,
        sampling=SamplingParams(
            temperature=temperature, top_p=settings.top_p if temperature else 1.0, max_tokens=settings.max_tokens
        ),
        max_length=config.max_token_length,
        decides=correctness.name,
        compares=correctness.compares,
        settings={
            key: value
            for key, value in (settings.recorded() | named).items()
            if key not in {"temperature", "top_p", "max_tokens", "seed", "shuffle_dataset"}
        },
    )
