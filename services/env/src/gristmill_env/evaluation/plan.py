"""The definition of an evaluation: all settings that must be equal for its prompts to belong together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from gristmill import SamplingParams
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import Task
from gristmill_env.settings import DatasetConfig, differences


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
    settings: dict[str, Any]
    """The other settings of `dataset:`, and the rewards."""

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def digest(self) -> str:
        """SHA-256 of the whole plan, as hexadecimal digits."""
        return hashlib.sha256(json.dumps(msgspec.to_builtins(self), sort_keys=True).encode()).hexdigest()

    def differences(self, other: Plan) -> list[str]:
        """Returns a line, such as "samples: 1 -> 4", for every setting that differs in `other`."""
        return differences(msgspec.to_builtins(self), msgspec.to_builtins(other))


def evaluation_dataset(config: DatasetConfig) -> DatasetConfig:
    """Returns the settings of the data set to evaluate on, in the data set's order."""
    update: dict[str, Any] = {"shuffle_dataset": False, "split": config.eval_split or config.split}
    if config.eval_dataset_name or config.eval_dataset_path:
        update |= {
            "dataset_name": config.eval_dataset_name,
            "dataset_config": config.eval_dataset_config,
            "dataset_path": config.eval_dataset_path,
            "dataset_revision": config.eval_dataset_revision,
        }
    return config.model_copy(update=update)


def evaluation_task(run: RunSettings) -> Task:
    """Loads the rows to evaluate on, in their order, and the run's rewards. Raises DatasetError, RewardError."""
    settings = run.config
    dataset = evaluation_dataset(settings.dataset)
    return Task.load(dataclasses.replace(run, config=settings.model_copy(update={"dataset": dataset})))


def evaluations_folder(run: RunSettings) -> Path:
    """Returns the folder of the run's evaluations; each evaluation has a subfolder."""
    return run.run_folder / (run.config.data_dir_to_save_evals or "evaluations")


def has_evaluation_set(config: DatasetConfig) -> bool:
    """Returns whether the run names prompts to evaluate on. Training prompts are not evaluated by default."""
    return bool(config.eval_dataset_name or config.eval_dataset_path or config.eval_split)


def make_plan(
    run: RunSettings, task: Task, *, model: str, weights: str | None, creation: str | None, limit: int | None = None
) -> Plan:
    """`model`: its served name. `weights`: the label. `creation`: of the training, if known. `limit`: most prompts if
    the configuration sets no limit."""
    config, scorer, rows = run.config, task.scorer, len(task.dataset)
    settings = config.dataset
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
        prompts=min(settings.eval_limit or limit or rows, rows),
        samples=settings.eval_samples,
        sampling=SamplingParams(
            temperature=temperature, top_p=settings.top_p if temperature else 1.0, max_tokens=settings.max_tokens
        ),
        max_length=config.max_token_length,
        decides=correctness.name,
        compares=correctness.compares,
        settings={
            key: value
            for key, value in evaluation_dataset(settings).recorded().items()
            if key not in {"temperature", "top_p", "max_tokens", "seed", "shuffle_dataset"}
        },
    )
