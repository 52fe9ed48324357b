"""An evaluation's folder: its plan and the records of finished prompts, which survive a kill.

evaluation.json exists before the first prompt. samples.jsonl grows by one line per prompt; each line is on disk before
its prompt is counted. A torn last line after a kill is removed, and its prompt is evaluated again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType

import msgspec

from gristmill.disk import write_file
from gristmill.lines import LineFile, read_lines
from gristmill.redaction import redact_text
from gristmill_env.errors import BusyEvaluationError, DropReason, EvaluationError, RewardError
from gristmill_env.evaluation.plan import Plan
from gristmill_env.rewards import Scorer
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.values import whole

PLAN_FILE, SAMPLES_FILE = "evaluation.json", "samples.jsonl"
_ENCODER = msgspec.json.Encoder()


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of samples.jsonl: one prompt with its completions, or the reason for having no completions."""

    number: int
    """The prompt's place in the evaluation, from 0."""
    index: int
    """The prompt's row in the data set."""
    prompt: str
    """The prompt as the model saw it."""
    answer: str | None
    """The row's own answer."""
    prompt_tokens: int
    max_tokens: int
    """Maximum number of tokens in each completion."""
    samples: list[SampleRecord]
    skipped: str | None = None
    """Reason for having no completions: a `DropReason`, such as "too_long", "bad_row" or "timeout"."""
    why: str | None = None
    """The reason in a sentence."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    text: str
    tokens: int | None
    """Number of tokens; None if the server does not report it."""
    finish_reason: str
    """ "stop", or "length" for a truncated completion."""
    answer: str | None
    """The final answer that the correctness reward extracts, in a normal form. None: no answer was found, or the reward
    returned no value."""
    right: bool | None
    """Verdict of the correctness reward; None if the reward returned no value or failed."""
    total: float | None
    parts: dict[str, float | None]
    """Each reward's value, unweighted; None if the reward skipped the completion or failed."""
    error: str | None = None
    """The first failed reward with a weight, and its error. The completion then has no total."""
    failed: dict[str, str] = {}
    """Every failed reward and its error, including parts, composed rewards and metrics."""
    versions: list[str]
    """Weight labels that sampled the completion, in order; empty if the server reports no label."""


_DECODER = msgspec.json.Decoder(PromptRecord)


EXTRACTION = "extract_answer"
"""Name of a failed extraction in `SampleRecord.failed`, after the name of its reward and a dot."""


async def answered(number: int, group: RolloutGroup, scorer: Scorer) -> PromptRecord:
    """Returns the record of a prompt that has completions. `scorer`: has scored them, and extracts their answers."""
    samples = []
    correctness = scorer.correctness
    answers = await scorer.extracted([rollout.text for rollout in group.rollouts], group.item.columns)
    for rollout, score, answer in zip(group.rollouts, group.scores, answers, strict=True):
        right = correctness.is_right(score.parts[correctness.name])
        judged = correctness.compares and right is not None
        failed = {name: failure.text for name, failure in score.failed.items()}
        if judged and isinstance(answer, RewardError):
            failed[f"{correctness.name}.{EXTRACTION}"] = str(answer)
        samples.append(
            SampleRecord(
                text=rollout.text,
                tokens=rollout.sampled,
                finish_reason=rollout.finish_reason,
                # A user's extraction may cut a character in half.
                answer=whole(answer) if judged and isinstance(answer, str) else None,
                right=right,
                total=score.total,
                parts=dict(score.parts),
                error=score.error,
                failed=failed,
                versions=list(dict.fromkeys(span.version for span in rollout.labels)),
            )
        )
    return PromptRecord(
        number=number,
        index=group.item.index,
        prompt=group.prompt.text,
        answer=group.item.answer,
        prompt_tokens=len(group.prompt.token_ids),
        max_tokens=group.sampling.max_tokens,
        samples=samples,
    )


def skipped(number: int, reason: DropReason, why: str) -> PromptRecord:
    """Returns the record of a skipped prompt. An evaluation takes rows in order, so the number is also the row."""
    return PromptRecord(
        number=number, index=number, prompt="", answer=None, prompt_tokens=0, max_tokens=0, samples=[],
        skipped=reason.value, why=redact_text(why),
    )  # fmt: skip


class SampleFile:
    """The folder of an unfinished evaluation. Only one process at a time may have it open."""

    def __init__(self, folder: Path, plan: Plan, *, resume: bool) -> None:
        """Creates the folder, or continues in it. `done`: the existing records, by number.

        Raises EvaluationError when the folder cannot be written, holds an evaluation and `resume` is not set, or holds
        an evaluation with other settings. Raises BusyEvaluationError when another process is at work in the folder.
        """
        self.folder = folder
        self.plan = plan
        try:
            begun = (folder / PLAN_FILE).exists()
            if not begun and (folder / SAMPLES_FILE).exists():
                raise EvaluationError(
                    "samples_of_something_else",
                    f"{folder} holds a {SAMPLES_FILE} of something else; name another folder (--out)",
                    folder=folder,
                )
            if begun:
                self._check(resume)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                write_file(folder / PLAN_FILE, msgspec.json.format(_ENCODER.encode(plan), indent=2))
            self._file = LineFile(folder / SAMPLES_FILE, exclusive=True)
        except BlockingIOError as error:
            raise BusyEvaluationError(
                "evaluation_busy", f"another process is at work on the evaluation in {folder}", folder=folder
            ) from error
        except OSError as error:
            raise EvaluationError(
                "output_unwritable",
                f"{folder} cannot be written: {error.strerror or error}; name another folder",
                path=folder,
            ) from error
        try:
            self.done = {record.number: record for record in read_samples(folder)}
        except EvaluationError:
            self.close()
            raise
        self._turn = asyncio.Lock()

    async def add(self, record: PromptRecord) -> None:
        """Adds a record, which is on disk when this returns."""
        async with self._turn:
            await asyncio.to_thread(self._file.append, _ENCODER.encode(record))
            self.done[record.number] = record

    def finish(self) -> list[PromptRecord]:
        """Returns all records in the prompts' order, and sorts the file in the same order."""
        ordered = [self.done[number] for number in sorted(self.done)]
        write_file(self.folder / SAMPLES_FILE, b"".join(_ENCODER.encode(record) + b"\n" for record in ordered))
        return ordered

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check(self, resume: bool) -> None:
        if not resume:
            raise EvaluationError(
                "evaluation_exists",
                f"{self.folder} holds an evaluation already; continue it with --resume, or name another folder (--out)",
                folder=self.folder,
            )
        if changed := read_plan(self.folder).differences(self.plan):
            raise EvaluationError(
                "config_differs",
                f"the evaluation in {self.folder} is of other settings ({'; '.join(changed)}); name another folder, or "
                "set them as they were",
                path=self.folder,
                changed=changed,
            )


def read_plan(folder: Path) -> Plan:
    """Returns the plan of the evaluation in `folder`. Raises EvaluationError when the plan is missing or invalid."""
    path = folder / PLAN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise EvaluationError(
            "evaluation_missing", f"no evaluation in {folder}: {path} cannot be read ({error.strerror})", path=path
        ) from error
    except msgspec.DecodeError as error:
        raise EvaluationError(
            "not_an_evaluation", f"{path} is not what `evaluate` writes: {error}", path=path
        ) from error


def read_samples(folder: Path) -> list[PromptRecord]:
    """Returns the finished prompts in order. Raises EvaluationError when they cannot be read."""
    path = folder / SAMPLES_FILE
    try:
        with path.open("rb") as file:
            records = [_DECODER.decode(line) for _, line in read_lines(file)]
    except OSError as error:
        raise EvaluationError(
            "evaluation_missing", f"no evaluation in {folder}: {path} cannot be read ({error.strerror})", path=path
        ) from error
    except msgspec.DecodeError as error:
        raise EvaluationError(
            "not_an_evaluation", f"{path} is not what `evaluate` writes: {error}", path=path
        ) from error
    return sorted(records, key=lambda record: record.number)
