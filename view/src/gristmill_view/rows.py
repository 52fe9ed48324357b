"""The rows of the table of rollouts: one per completion, or one for a group whose completions are not known.

`SCHEMA` is the contract. docs/look-at-a-run.md explains each column.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gristmill.archive import decode, segment
from gristmill.archive.drops import Drop
from gristmill.archive.segment import ArchivedGroup
from gristmill.archive.trained import NOT_RECORDED, TRAINED, TrainedGroup, TrainedSequence
from gristmill.folders import EVALUATION_GROUPS_FILE
from gristmill.group import SOURCE
from gristmill.internal import foreign, metrics
from gristmill.internal.saved import SavedCompletion, SavedGroup, saved_groups
from gristmill.policy_version import PolicyVersion
from gristmill.run import RunRecord
from gristmill_view.samples import read_tokenizer
from gristmill_view.source import LEFT_OUT

_LOG = logging.getLogger(__name__)
SCHEMA_VERSION: Final = 10
OTHER_TRAINING: Final = -1
"""`creation` of an evaluation that an earlier training of the same run id made."""

EVALUATION: Final = "evaluation"
"""Outcome of the completions of an evaluation."""

SCHEMA: Final = pa.schema(
    [
        pa.field("run", pa.string()),
        pa.field("creation", pa.int64()),
        pa.field("step", pa.int32()),
        pa.field("group_id", pa.string()),
        pa.field("sequence", pa.int32()),
        pa.field("rollout", pa.int32()),
        pa.field("branch", pa.int32()),
        pa.field("env_id", pa.string()),
        pa.field("row", pa.int64()),
        pa.field("index", pa.int64()),
        pa.field("source", pa.string()),
        pa.field("version_first", pa.string()),
        pa.field("version_last", pa.string()),
        pa.field("staleness", pa.int32()),
        pa.field("prompt", pa.string()),
        pa.field("completion", pa.string()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("mask", pa.list_(pa.bool_())),
        pa.field("sampler_logprobs", pa.list_(pa.float32())),
        pa.field("trainer_logprobs", pa.list_(pa.float32())),
        pa.field("advantage", pa.float32()),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("entropy", pa.list_(pa.float32())),
        pa.field("reward", pa.float32()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float32())),
        pa.field("finish_reason", pa.string()),
        pa.field("turns", pa.int32()),
        pa.field("replies", pa.list_(pa.int32())),
        pa.field("messages", pa.string()),
        pa.field("temperature", pa.float32()),
        pa.field("outcome", pa.string()),
        pa.field("outcome_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("acked", pa.bool_()),
        pa.field("answer", pa.string()),
        pa.field("extracted", pa.string()),
        pa.field("answer_searched", pa.bool_()),
        pa.field("submitted_ms", pa.int64()),
        pa.field("seconds", pa.float32()),
        pa.field("ratio", pa.float32()),
        pa.field("ratio_max", pa.float32()),
        pa.field("entropy_mean", pa.float32()),
        pa.field("repeated", pa.float32()),
        pa.field("garbled", pa.float32()),
    ],
    metadata={"gristmill_rollouts_schema": str(SCHEMA_VERSION)},
)

_NGRAM = 4
_MOST_LEFT_OUT: Final = 1024
"""Rollouts of a group. More are not read: `meta` is what a client sent."""
_GARBLED = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class Texts:
    """Decodes tokens with the tokenizer of the run's model. Without it, or without `tokenizers`, texts are None."""

    def __init__(self, file: Path | None) -> None:
        if file is None:
            _LOG.warning("the run has no tokenizer in its folder, so the table has no texts")
        self._tokenizer: Any = read_tokenizer(file)
        self._prompt: tuple[bytes, str] | None = None

    def prompt(self, tokens: npt.NDArray[np.int32]) -> str | None:
        """Returns the prompt as the model reads it, with special tokens."""
        if self._tokenizer is None:
            return None
        key = tokens.tobytes()
        if self._prompt is None or self._prompt[0] != key:  # The completions of a group mostly have one prompt.
            self._prompt = (key, self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
        return self._prompt[1]

    def completions(self, tokens: Sequence[npt.NDArray[np.int32]]) -> Sequence[str | None]:
        """Returns the completions without special tokens."""
        if self._tokenizer is None:
            return [None] * len(tokens)
        texts: list[str] = self._tokenizer.decode_batch([ids.tolist() for ids in tokens], skip_special_tokens=True)
        return texts


@dataclass(frozen=True, eq=False, kw_only=True)
class Submitted:
    """A group as the environment submitted it."""

    group_id: str
    env_id: str
    row: int
    tokens: list[npt.NDArray[np.int32]]
    mask: list[Bool]
    """True for sampled tokens."""
    logprobs: list[F32] | None
    rewards: Sequence[float]
    parts: Mapping[str, Sequence[float | None]]
    finish_reasons: Sequence[str]
    versions: Sequence[tuple[str, str]]
    """First and last weights of each sequence."""
    temperature: float
    messages: Sequence[Any] | None = None
    """The conversation of each sequence, if the environment sent them (`include_messages`)."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    rollouts: Sequence[int] | None = None
    """The rollout of each sequence; None: each sequence is a rollout."""

    @property
    def answer(self) -> str | None:
        """The row's answer, if the environment sent it."""
        return _text(self.meta.get("answer"))

    @property
    def answer_searched(self) -> bool:
        """Whether the environment sent what it found as the answers of the rollouts."""
        extracted = self.meta.get("extracted")
        return isinstance(extracted, list) and len(extracted) == len(set(self.rollout_of))

    @property
    def extracted(self) -> Sequence[str | None]:
        """The answer of each sequence's rollout. None: no answer, or `answer_searched` is False."""
        if not self.answer_searched:
            return [None] * len(self.tokens)
        return [_text(self.meta["extracted"][rollout]) for rollout in self.rollout_of]

    @property
    def left_out(self) -> list[tuple[str | None, str | None]]:
        """Code and text of the error of each rollout that failed and was left out."""
        failures = self.meta.get("failed")
        errors = failures[:_MOST_LEFT_OUT] if isinstance(failures, list) else []
        return [(_text(one.get("error")), _text(one.get("text"))) for one in errors if isinstance(one, dict)]

    @property
    def rollout_of(self) -> Sequence[int]:
        """The rollout of each sequence, also without `rollouts`."""
        return range(len(self.tokens)) if self.rollouts is None else self.rollouts

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each sequence before its first sampled token."""
        return [int(np.argmax(mask)) if mask.any() else len(mask) for mask in self.mask]

    @property
    def oldest_step(self) -> int:
        """Step of the oldest weights that sampled a token of the group."""
        return min(PolicyVersion.parse(first).step for first, _ in self.versions)


def step_without_record(oldest_step: int | None, run: RunRecord | None, created_ms: int) -> int | None:
    """Returns the step that trained on an acked group of which the trainer has no record; None if it is not known.

    A synchronous run (max_staleness 0) trains on groups of the newest weights only, so the group's weights give the
    step. `oldest_step`: of the group's weights. `run`: the record of the run's newest creation.
    """
    if oldest_step is None or run is None or run.max_staleness != 0 or run.created_ms != created_ms:
        return None
    return oldest_step + 1


def read_submitted(archived: ArchivedGroup, run_id: str) -> Submitted:
    """Returns an archived group. Raises GristmillError."""
    group = decode(archived, f"the archive of run {run_id}")
    ends = np.cumsum(group.lengths)[:-1]
    versions = []
    for spans in group.versions:
        labels = sorted({span.version for span in spans}, key=PolicyVersion.parse)
        versions.append((labels[0], labels[-1]))
    return Submitted(
        group_id=group.group_id,
        env_id=group.env_id,
        row=group.row,
        tokens=np.split(group.tokens, ends),
        mask=np.split(group.mask, ends),
        logprobs=np.split(group.logprobs, ends) if group.logprobs_known else None,
        rewards=group.rewards.tolist(),
        parts=group.reward_parts,
        finish_reasons=group.finish_reasons,
        versions=versions,
        temperature=group.sampling.temperature,
        messages=group.messages,
        meta=group.meta,
        rollouts=group.rollout_of.tolist(),
    )


class Rows:
    """Collects rows by column."""

    def __init__(self, run_id: str, texts: Texts, run: RunRecord | None = None) -> None:
        """`run`: the record of the run's newest creation."""
        self._run_id = run_id
        self._run = run
        self._texts = texts
        self._columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        self.tokens = 0
        """Tokens of the collected rows."""

    def __len__(self) -> int:
        return len(self._columns["run"])

    def take(self) -> pa.Table:
        """Returns the rows and forgets them."""
        columns, self._columns = self._columns, {name: [] for name in SCHEMA.names}
        self.tokens = 0
        return pa.table([_array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA)

    def add(self, group: Submitted, creation: int, record: TrainedGroup | None) -> None:
        """Adds the rows of an acked group. `record`: the trainer's record, if there is one."""
        starts = group.prompt_lengths
        texts = self._texts.completions([ids[start:] for ids, start in zip(group.tokens, starts, strict=True)])
        step = step_without_record(group.oldest_step, self._run, creation) if record is None else record.step
        staleness = None if step is None else step - 1 - group.oldest_step
        conversations = group.messages if group.messages is not None and len(group.messages) == len(starts) else None
        extracted, answer_searched = group.extracted, group.answer_searched
        rollouts = group.rollout_of
        branches = Counter(rollouts)
        firsts = dict(zip(reversed(rollouts), reversed(range(len(rollouts))), strict=True))
        of_group = {
            "creation": creation,
            "step": step,
            "group_id": group.group_id,
            "env_id": group.env_id,
            "row": group.row,
            "index": _whole(group.meta.get("index")),
            "source": _text(group.meta.get(SOURCE)),
            "acked": True,
            "answer": group.answer,
            "submitted_ms": _whole(group.meta.get("submitted_ms")),
            "seconds": metrics.number(group.meta.get("seconds")),
        }
        for index, (tokens, start) in enumerate(zip(group.tokens, starts, strict=True)):
            sampled = group.mask[index]
            sequence = None if record is None else record.sequences.get(index)
            outcome, reason = _outcome(record, sequence)
            logprobs = None if group.logprobs is None else group.logprobs[index]
            first, last = group.versions[index]
            text = texts[index]
            replies = _replies(sampled)
            self.tokens += len(tokens)
            self._append(
                sequence=index,
                rollout=rollouts[index],
                branch=index - firsts[rollouts[index]],
                version_first=first,
                version_last=last,
                staleness=staleness,
                prompt=self._texts.prompt(tokens[:start]),
                completion=text,
                prompt_tokens=start,
                completion_tokens=len(tokens) - start,
                tokens=tokens,
                sampler_logprobs=logprobs,
                reward=group.rewards[index],
                reward_parts=[
                    (name, values[index]) for name, values in group.parts.items() if values[index] is not None
                ],
                finish_reason=group.finish_reasons[index],
                turns=len(replies) // 2,
                replies=replies if len(replies) > 2 or branches[rollouts[index]] > 1 else None,
                messages=None if conversations is None else _json(conversations[index]),
                temperature=group.temperature,
                outcome=outcome,
                outcome_reason=reason,
                extracted=extracted[index],
                answer_searched=answer_searched,
                repeated=_repeated(tokens[start:]),
                garbled=None if text is None else _garbled(text),
                **_of_trainer(sequence, sampled, logprobs),
                **of_group,
            )
        for rollout, (reason, error) in enumerate(group.left_out, len(branches)):
            self._append(rollout=rollout, outcome=LEFT_OUT, outcome_reason=reason, error=error, **of_group)

    def add_leased(self, record: TrainedGroup, creation: int) -> None:
        """Adds rows for a group of a step that no checkpoint covers yet: its completions are not on disk."""
        for index, sequence in record.sequences.items() or ((None, None),):
            _, reason = _outcome(record, sequence)
            self._append(
                creation=creation,
                step=record.step,
                group_id=record.group_id,
                sequence=index,
                row=-1 if (number := group_number(record.group_id)) is None else number,
                outcome="leased",
                outcome_reason=reason,
                acked=False,
                advantage=None if sequence is None else _mean(sequence.token_advantages),
            )

    def add_absent(self, drop: Drop, record: TrainedGroup | None) -> None:
        """Adds rows without content: for a group that was dropped, is a dead letter, or was let go by the archive."""
        lost = drop.what == "let_go"
        step = None if record is None else record.step
        if lost and record is None:
            step = step_without_record(drop.step, self._run, drop.creation)
        sequences = record.sequences if record is not None else {}
        for index, sequence in sequences.items() or ((None, None),):
            self._append(
                creation=drop.creation,
                step=step,
                group_id=drop.group_id,
                sequence=index,
                env_id=drop.env_id,
                row=drop.row,
                outcome="lost" if lost else drop.what,
                outcome_reason=drop.reason,
                acked=lost,
                advantage=None if sequence is None else _mean(sequence.token_advantages),
            )

    def add_saved(
        self, group: SavedGroup, outcome: str, creation: int, group_id: str, *, row: int, reason: str | None,
        env_id: str | None = None, submitted_ms: int | None = None,
    ) -> None:  # fmt: skip
        """Adds the rows of a group whose content the environment saved: of a dropped group, or of an evaluation."""
        single = all(completion.why is None for completion in group.completions)
        completions: Sequence[SavedCompletion | None] = group.completions or [None]
        for index, completion in enumerate(completions):
            labels = completion.versions if completion is not None and completion.versions else group.versions
            labels = sorted(filter(_is_version, labels), key=PolicyVersion.parse)
            self._append(
                creation=creation,
                step=PolicyVersion.parse(labels[0]).step if labels and outcome == EVALUATION else None,
                group_id=group_id,
                sequence=None if completion is None else index,
                rollout=None if completion is None else index,
                branch=None if completion is None else 0,
                env_id=env_id or group.env_id,
                row=row,
                index=group.index,
                source=group.source,
                version_first=labels[0] if labels else None,
                version_last=labels[-1] if labels else None,
                prompt=group.prompt_text or group.prompt or None,
                prompt_tokens=group.prompt_tokens,
                temperature=None if group.sampling is None else group.sampling.temperature,
                outcome=outcome,
                outcome_reason=reason or (None if completion is None else completion.error),
                error=group.error if completion is None or single else completion.why,
                acked=False,
                answer=group.answer,
                submitted_ms=submitted_ms,
                seconds=group.seconds,
                **({} if completion is None else _of_saved(completion, group)),
            )

    def _append(self, **values: Any) -> None:
        values["run"] = self._run_id
        for name, column in self._columns.items():
            column.append(values.get(name))


def evaluation_rows(rows: Rows, folder: Path, creation: int) -> int:
    """Adds the rows of the evaluation in `folder`. Returns its prompts."""
    prompts = 0
    with foreign.open_file(folder / EVALUATION_GROUPS_FILE) as file:
        for group in saved_groups(file):
            if group.row is not None:
                place = f"{folder.name}/{group.row}"
                rows.add_saved(group, EVALUATION, creation, place, row=group.row, reason=group.reason)
                prompts += 1
    return prompts


def _outcome(record: TrainedGroup | None, sequence: TrainedSequence | None) -> tuple[str, str | None]:
    """Returns what became of a sequence of an acked group, and why."""
    if record is None or record.outcome == NOT_RECORDED:
        return TRAINED, None
    if record.outcome is not None:
        return "dropped", record.outcome
    if sequence is None or sequence.outcome == TRAINED:
        return TRAINED, None
    return "dropped", sequence.outcome


def _of_saved(completion: SavedCompletion, group: SavedGroup) -> dict[str, Any]:
    turns = completion.turns
    return {
        "completion": completion.text,
        "completion_tokens": completion.tokens,
        "reward": completion.total,
        "reward_parts": [(name, value) for name, value in completion.scores.items() if value is not None],
        "finish_reason": completion.finish_reason,
        "turns": sum(message.get("role") == "assistant" for message in turns),
        "messages": None if group.messages is None else _json([*group.messages, *turns]),
        "extracted": completion.extracted,
        "answer_searched": completion.extracted is not None or completion.right is not None,
        "garbled": _garbled(completion.text),
    }


def _of_trainer(sequence: TrainedSequence | None, sampled: Bool, sampler: F32 | None) -> dict[str, Any]:
    """Returns the columns that depend on the trainer's record. Lists have a value for each token, 0 if not trained."""
    length = len(sampled)
    if sequence is None:
        mask = sampled.copy()
        mask[:1] = False  # No token predicts the first token.
        return {"mask": mask}
    places = np.flatnonzero(sequence.mask)
    mask = np.zeros(length, np.bool_)
    mask[places] = True
    columns: dict[str, Any] = {"mask": mask}
    advantages = sequence.token_advantages
    if len(advantages):
        columns["advantage"] = _mean(advantages)
        if len(sequence.advantages) > 1:
            columns["advantages"] = _spread(advantages, places, length)
    if sequence.logprobs is not None:
        columns["trainer_logprobs"] = _spread(sequence.logprobs, places, length)
        if sampler is not None:
            ratio = np.exp(np.clip(sequence.logprobs.astype(np.float64) - sampler[places], -60.0, 60.0))
            columns["ratio"], columns["ratio_max"] = float(ratio.mean()), float(ratio.max())
    if sequence.entropy is not None:
        columns["entropy"] = _spread(sequence.entropy, places, length)
        columns["entropy_mean"] = _mean(sequence.entropy)
    return columns


def _spread(values: F32, places: npt.NDArray[np.int64], length: int) -> F32:
    spread = np.zeros(length, np.float32)
    spread[places] = values
    return spread


def _replies(sampled: Bool) -> npt.NDArray[np.int32]:
    """Returns the first token of each run of sampled tokens and the token after its last, one pair after the other."""
    edges = np.flatnonzero(np.diff(sampled, prepend=False, append=False))
    return edges.astype(np.int32)


def _repeated(tokens: npt.NDArray[np.int32]) -> float | None:
    """Returns the share of 4-grams that were in the completion before; None for fewer than 8 tokens."""
    if len(tokens) < 2 * _NGRAM:
        return None
    grams = np.lib.stride_tricks.sliding_window_view(tokens, _NGRAM)
    distinct = len(np.unique(np.ascontiguousarray(grams).view(f"V{4 * _NGRAM}")))
    return 1.0 - distinct / len(grams)


def _garbled(text: str) -> float:
    """Returns the share of characters that are replacement or control characters."""
    return len(_GARBLED.findall(text)) / len(text) if text else 0.0


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Lists of numbers go through numpy, without Python objects for each token."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    present = [value for value in values if value is not None]
    flat = np.concatenate(present) if present else np.zeros(0)
    missing = np.array([value is None for value in values], np.bool_)
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False), kind.value_type),
        type=kind,
        mask=pa.array(missing) if missing.any() else None,
    )


def _mean(values: F32) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


def group_number(group_id: str) -> int | None:
    """Returns the number of a permit's group; None for the groups of Atropos' protocol."""
    return int(group_id[1:]) if group_id[:1] == "g" and group_id[1:].isdecimal() else None


def new_frames(
    paths: Iterable[Path], read: dict[str, int] | None = None, damaged: list[str] | None = None
) -> Iterator[tuple[str, int, int, bytes, int]]:
    """Yields (file, offset, creation, frames, size of head) of each group of some segments that is not read yet.

    `read`: bytes that are read, by creation and file; it is updated. The groups after a damaged place of a segment are
    left out, and `damaged` receives the file.
    """
    read, damaged = {} if read is None else read, [] if damaged is None else damaged
    for path in paths:
        try:
            file = foreign.open_file(path)
        except FileNotFoundError:
            continue  # The oldest segment was removed meanwhile.
        with file:
            try:
                opening = segment.read_opening(file, str(path))
                if opening is None:
                    continue
                # A new run of the same id may begin with a file of the same name.
                place = f"{opening.created_ms}/{path.name}"
                start = max(file.tell(), read.get(place, 0))
                file.seek(start)
                for frames, head, end in segment.read_frames(file, str(path)):
                    yield path.name, start, opening.created_ms, frames, head
                    start = read[place] = end
            except segment.ArchiveError as error:
                _LOG.warning("groups are missing: %s", error)
                damaged.append(str(path))


def _is_version(label: str) -> bool:
    try:
        PolicyVersion.parse(label)
    except ValueError:
        return False
    return True


def _json(value: object) -> str | None:
    """Returns a client's value as JSON; None if JSON cannot hold it, as for bytes or NaN."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


# `meta` of a group is what a client sent, of any type.
def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 1 << 62 else None
