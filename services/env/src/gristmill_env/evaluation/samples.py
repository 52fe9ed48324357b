"""An evaluation's folder: its plan and the finished prompts, which survive a kill.

evaluation.json exists before the first prompt. samples.jsonl grows by one line per prompt; each line is on disk before
its prompt is counted. A torn last line after a kill is removed, and its prompt is evaluated again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType

import msgspec

from gristmill_env.durable import LineFile, read_lines, write_file
from gristmill_env.errors import BusyEvaluationError, EvaluationError
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.records import PromptRecord

PLAN_FILE, SAMPLES_FILE = "evaluation.json", "samples.jsonl"

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(PromptRecord)


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
                f"{self.folder} holds an evaluation already; go on with it by --resume, or name another folder (--out)",
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
