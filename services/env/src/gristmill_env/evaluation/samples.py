"""An evaluation's folder: its plan, and the prompts done so far, safe from a kill.

evaluation.json is there before the first prompt. samples.jsonl grows by a line a prompt, on disk before the next is
counted; a line that a kill tore is cut off, and its prompt done again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from types import TracebackType

import msgspec

from gristmill_env.errors import BusyEvaluationError, EvaluationError
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.records import PromptRecord

PLAN_FILE, SAMPLES_FILE = "evaluation.json", "samples.jsonl"

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(PromptRecord)


class SampleFile:
    """The folder of an evaluation under way. One process at a time may have it open."""

    def __init__(self, folder: Path, plan: Plan, *, resume: bool) -> None:
        """Make the folder, or go on in it. `done`: what was there, by number.

        Raises EvaluationError when it cannot be written, holds an evaluation and `resume` is not set, or one of
        other settings; BusyEvaluationError when another process is at work in it.
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
                replace(folder / PLAN_FILE, msgspec.json.format(_ENCODER.encode(plan), indent=2))
            self._file = (folder / SAMPLES_FILE).open("a+b")
            self._lock()
            self.done = {record.number: record for record in self._whole_lines()}
        except OSError as error:
            raise EvaluationError(
                "output_unwritable",
                f"{folder} cannot be written: {error.strerror or error}; name another folder",
                path=folder,
            ) from error
        self._turn = asyncio.Lock()

    async def add(self, record: PromptRecord) -> None:
        """Keep a record. It is on disk when this returns."""
        async with self._turn:
            await asyncio.to_thread(self._append, _ENCODER.encode(record) + b"\n")
            self.done[record.number] = record

    def finish(self) -> list[PromptRecord]:
        """All records in the prompts' order; so is the file from now on."""
        ordered = [self.done[number] for number in sorted(self.done)]
        replace(self.folder / SAMPLES_FILE, b"".join(_ENCODER.encode(record) + b"\n" for record in ordered))
        return ordered

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _append(self, row: bytes) -> None:
        self._file.write(row)
        self._file.flush()
        os.fsync(self._file.fileno())

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

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyEvaluationError(
                "evaluation_busy",
                f"another process is at work on the evaluation in {self.folder}",
                folder=self.folder,
            ) from error

    def _whole_lines(self) -> list[PromptRecord]:
        records, whole = _read(self.folder)
        self._file.truncate(whole)
        return records


def read_plan(folder: Path) -> Plan:
    """The plan of the evaluation in `folder`. Raises EvaluationError when there is none."""
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
    """The prompts done so far, in their order. Raises EvaluationError when there are none to read."""
    try:
        return sorted(_read(folder)[0], key=lambda record: record.number)
    except OSError as error:
        raise EvaluationError(
            "evaluation_missing",
            f"no evaluation in {folder}: {SAMPLES_FILE} cannot be read ({error.strerror})",
            path=folder / SAMPLES_FILE,
        ) from error


def replace(path: Path, content: bytes) -> None:
    """Write a file as a whole: whoever looks, and whatever breaks, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(folder: Path) -> tuple[list[PromptRecord], int]:
    """The records, and the bytes up to the end of the last whole line."""
    content = (folder / SAMPLES_FILE).read_bytes()
    whole = content.rfind(b"\n") + 1
    try:
        # As bytes: in text, splitlines takes characters that a completion may hold for the end of a line.
        return [_DECODER.decode(row) for row in content[:whole].split(b"\n") if row], whole
    except msgspec.DecodeError as error:
        path = folder / SAMPLES_FILE
        raise EvaluationError(
            "not_an_evaluation", f"{path} is not what `evaluate` writes: {error}", path=path
        ) from error
