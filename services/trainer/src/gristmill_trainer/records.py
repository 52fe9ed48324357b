"""Writes what the trainer did with each group of a step, for the table of rollouts: `<run>/trained/*.gmz`.

A thread writes, and the training loop never waits for it. `add` only queues references to arrays that the step has
computed anyway. If the disk is slower than the training, the queue is full. The details of those groups are then left
out and counted, and a small record with the step follows.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill import PolicyVersion, RunRecord
from gristmill.archive.trained import (
    NOT_RECORDED,
    TOKENIZER_FOLDER,
    TRAINED,
    TRAINED_SCHEMA,
    TrainedGroup,
    TrainedSequence,
)
from gristmill.internal.archive_writer import MIN_FREE_BYTES, RunWriter
from gristmill.internal.disk import write_file
from gristmill.internal.logs import line
from gristmill_trainer.data.samples import Prepared
from gristmill_trainer.data.types import F32, Sample
from gristmill_trainer.metrics import StepResult

_LOG = logging.getLogger(__name__)
MAX_BYTES = 10 << 30
"""Bytes of one run's records. Beyond that the oldest are removed. API_ARCHIVE_MAX_BYTES has the same default."""
_QUEUED_STEPS = 8
_CLOSE_S = 10.0

OVERLONG = "overlong_filtered"
"""Outcome of a sequence without trained tokens because it was truncated at max_tokens."""
STEP_SKIPPED = "step_skipped"
"""Outcome of a sequence in a step that changed no weights, because no update was finite."""
UPDATE_LEFT_OUT = "update_left_out"
"""Outcome of a sequence that was only in updates that were not finite."""


@dataclass(frozen=True, eq=False)
class _Step:
    version: PolicyVersion
    prepared: Prepared
    result: StepResult


class TrainedRecords:
    """The records of one training. Errors of the disk are logged and counted, and never end the training."""

    def __init__(
        self, folder: Path, run: RunRecord, tokenizer: str | None = None, *, min_free: int = MIN_FREE_BYTES
    ) -> None:
        """`folder`: <run>/trained. `tokenizer`: folder whose tokenizer.json is copied to the records."""
        self.left_out = 0
        """Groups whose details were left out, because the queue was full."""
        self.lost = 0
        """Groups without a record, because the disk failed or is nearly full."""
        self._folder, self._run_id = folder, run.run_id
        self._created_ms = round(run.created_at * 1000)
        self._min_free = min_free
        self._tokenizer = tokenizer
        self._missed: list[TrainedGroup] = []
        self._queue: queue.Queue[tuple[_Step | None, list[TrainedGroup]]] = queue.Queue(_QUEUED_STEPS)
        self._writer: RunWriter | None = None
        self._thread = threading.Thread(target=self._work, name="trained-records", daemon=True)
        self._thread.start()

    def add(self, version: PolicyVersion, prepared: Prepared, result: StepResult) -> None:
        """Queues the records of one step. `version`: of the weights that the step produced. Never waits."""
        try:
            self._queue.put_nowait((_Step(version, prepared, result), self._missed))
            self._missed = []
        except queue.Full:
            ids = dict.fromkeys(sample.group_id for sample in prepared.samples)
            ids |= dict.fromkeys(one.group_id for one in prepared.rejected)
            if not self.left_out:
                _LOG.warning("the disk of %s is slower than the training; details of groups are left out", self._folder)
            self.left_out += len(ids)
            self._missed += [TrainedGroup(one, version.step, str(version), NOT_RECORDED, {}) for one in ids]

    def close(self) -> None:
        """Writes the queued records, for a few seconds at most."""
        try:
            self._queue.put((None, self._missed), timeout=_CLOSE_S if self._thread.is_alive() else 0)
        except queue.Full:
            _LOG.warning("the records in %s are incomplete: the disk does not take them", self._folder)
            return
        self._thread.join(_CLOSE_S)
        if self.left_out or self.lost:
            _LOG.warning(
                "of %d groups in %s the details are left out, and %d have no record",
                self.left_out,
                self._folder,
                self.lost,
            )

    def _work(self) -> None:
        if self._tokenizer is not None:
            self._copy_tokenizer(Path(self._tokenizer))
        while True:
            step, groups = self._queue.get()
            self._write(groups)
            if step is None:
                if self._writer is not None:
                    self._writer.close()
                return
            self._write(list(trained_groups(step.version, step.prepared, step.result)))

    def _copy_tokenizer(self, source: Path) -> None:
        target = self._folder / TOKENIZER_FOLDER
        try:
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                if (source / name).is_file() and not (target / name).exists():
                    target.mkdir(parents=True, exist_ok=True)
                    write_file(target / name, (source / name).read_bytes())
        except OSError as error:
            _LOG.warning(line("records", folder=target, why=str(error)))

    def _write(self, groups: list[TrainedGroup]) -> None:
        for place, group in enumerate(groups):
            try:
                if self._writer is None:
                    self._writer = RunWriter(self._folder, self._run_id, self._created_ms, MAX_BYTES, self._min_free)
                self._writer.append(group.group_id, TRAINED_SCHEMA, group.encode())
            except OSError as error:
                if not self.lost:
                    _LOG.warning(line("records", folder=self._folder, why=str(error)))
                self.lost += len(groups) - place
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
                return


def trained_groups(version: PolicyVersion, prepared: Prepared, result: StepResult) -> Iterator[TrainedGroup]:
    """Yields the record of each group of a step. `version`: of the weights that the step produced."""
    samples = prepared.samples
    slices = _slices(samples, result.order)
    stats = result.token_stats
    entropy = None if np.isnan(stats.entropy).any() else stats.entropy
    sequences: dict[str, dict[int, TrainedSequence]] = {}
    whole: dict[str, str] = {}
    for number, sample in enumerate(samples):
        found = sequences.setdefault(sample.group_id, {})
        found[sample.sequence] = _sequence(sample, slices.get(number), stats.old_logprobs, entropy, result.skipped)
    for one in prepared.rejected:
        if one.sequence is None:
            whole[one.group_id] = str(one.reason)
        else:
            empty = np.zeros(0, np.float32)
            found = sequences.setdefault(one.group_id, {})
            found[one.sequence] = TrainedSequence(str(one.reason), np.zeros(0, np.bool_), None, empty, None)
    for group_id in dict.fromkeys([*sequences, *whole]):
        yield TrainedGroup(group_id, version.step, str(version), whole.get(group_id), sequences.get(group_id, {}))


def _slices(samples: list[Sample], order: tuple[int, ...]) -> dict[int, slice]:
    """Returns the place of each sample's trained tokens in the step's token statistics, in its first epoch."""
    slices: dict[int, slice] = {}
    start = 0
    for number in order:
        end = start + samples[number].trained_tokens
        slices.setdefault(number, slice(start, end))
        start = end
    return slices


def _sequence(
    sample: Sample, tokens: slice | None, logprobs: F32, entropy: F32 | None, skipped: str | None
) -> TrainedSequence:
    """`tokens`: the place of the sample's trained tokens in `logprobs` and `entropy`. `skipped`: as in StepResult."""
    advantages = sample.advantages[sample.trained]
    if not len(advantages):
        return TrainedSequence(OVERLONG, sample.trained, None, advantages, None)
    if (advantages == advantages[0]).all():
        advantages = advantages[:1]
    if tokens is None:
        outcome = UPDATE_LEFT_OUT if skipped is None else STEP_SKIPPED
        return TrainedSequence(outcome, sample.trained, None, advantages, None)
    return TrainedSequence(
        outcome=TRAINED if skipped is None else STEP_SKIPPED,
        mask=sample.trained,
        logprobs=logprobs[tokens],
        advantages=advantages,
        entropy=None if entropy is None else entropy[tokens],
    )
