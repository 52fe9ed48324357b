"""The evaluation of a run in training: its prompts, and the folder of its results."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from gristmill_env.evaluation.evaluate import Roll, evaluate
from gristmill_env.evaluation.plan import evaluation_task, evaluations_folder, make_plan
from gristmill_env.evaluation.progress import EvaluationProgress
from gristmill_env.evaluation.results import Evaluated
from gristmill_env.evaluation.samples import SampleFile
from gristmill_env.launch import Launch

logger = logging.getLogger(__name__)

_LIMIT = 100
"""Prompts if eval_limit is not set; Atropos' evaluation takes the same number."""


class RunMeasure:
    """Evaluates the model in training on the run's evaluation set."""

    def __init__(self, launch: Launch, model: str) -> None:
        """Loads the evaluation set. `model`: the model's served name. Raises DatasetError, RewardError."""
        self._launch = launch
        self._model = model
        self._task = evaluation_task(launch)
        self._folder = _writable(evaluations_folder(launch))

    @property
    def label(self) -> str:
        """The data set and split."""
        return self._task.dataset.label

    async def __call__(self, version: str, roll: Roll) -> Evaluated:
        """Evaluates the weights of `version`. Keeps the prompts that a killed evaluation of `version` has finished.

        Raises InferenceError, BusyEvaluationError.
        """
        config, dataset = self._launch.config, self._task.dataset
        plan = make_plan(self._launch, self._task, model=self._model, weights=version, limit=_LIMIT)
        with SampleFile(self._folder / f"{version}-{plan.digest[:8]}", plan, resume=True) as file:
            progress = EvaluationProgress(plan.prompts, len(file.done), console=None, say=logger.info)
            decision, workers = self._task.scorer.decision, config.max_eval_workers
            return await evaluate(file, dataset, roll, decision=decision, workers=workers, progress=progress)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:  # the run folder may be mounted read-only
        instead = Path(tempfile.mkdtemp(prefix="gristmill-evaluations-"))
        logger.warning("evaluations cannot be kept in %s (%s); they are in %s", folder, error.strerror, instead)
        return instead
