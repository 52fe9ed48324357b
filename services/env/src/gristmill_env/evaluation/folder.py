"""An evaluation's folder: its plan and the groups of finished prompts, which survive a kill.

evaluation.json exists before the first prompt. groups.jsonl, in the format of saved groups, grows by one line per
prompt; each line is on disk before its prompt is counted. A torn last line after a kill is removed, and its prompt is
evaluated again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gristmill.folders import EVALUATION_FILE, EVALUATION_GROUPS_FILE
from gristmill.internal.disk import complete_file, write_file
from gristmill.internal.lines import LineFile, read_lines, whole_lines
from gristmill.internal.redaction import redact_text
from gristmill.internal.saved import SavedGroup
from gristmill_env.errors import BusyEvaluationError, DropReason, EvaluationError, RewardError
from gristmill_env.evaluation.plan import Plan
from gristmill_env.rewards import Scorer
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.saved.group import Attempt, saved_group
from gristmill_env.values import whole

EXTRACTION = "extract_answer"
"""Name of a failed extraction in `SavedCompletion.errors`, after the name of its reward and a dot."""
_ENCODER = msgspec.json.Encoder()


MAY_PASS = frozenset({DropReason.TIMEOUT, DropReason.ENVIRONMENT_ERROR})
"""Reasons of prompts that were asked, and may be answered in a later process."""


class _Scored(msgspec.Struct):
    scores: dict[str, float | None] = {}
    errors: dict[str, str] = {}

    @property
    def failed(self) -> bool:
        """Whether every reward failed or returned no value, and one failed."""
        return bool(self.errors) and all(value is None for value in self.scores.values())


class _Row(msgspec.Struct):
    row: int
    """The prompt's place in the evaluation, from 0."""
    reason: str | None = None
    completions: list[_Scored] = []

    @property
    def may_pass(self) -> bool:
        """Whether what failed may work in a later process: an environment, or all rewards, as with a wrong key."""
        return self.reason in MAY_PASS or (bool(self.completions) and all(one.failed for one in self.completions))


_ROW = msgspec.json.Decoder(_Row)
_GROUP = msgspec.json.Decoder(SavedGroup)


async def judged(group: RolloutGroup, scorer: Scorer, plan: Plan) -> SavedGroup:
    """Returns the record of a prompt that has completions. `scorer`: has scored them, and extracts their answers.

    It has no time and no log-probabilities, so two evaluations with the same completions write the same file.
    """
    correctness = scorer.correctness
    answers = await scorer.extracted([rollout.text for rollout in group.rollouts], group.item.columns)
    saved = saved_group(
        Attempt.of(group), run=plan.task, model=plan.model, creation=plan.creation,
        settings={"group_size": plan.samples, "dataset": plan.settings},
    )  # fmt: skip
    completions = []
    for completion, answer in zip(saved.completions, answers, strict=True):
        right, errors = correctness.is_right(completion.scores[correctness.name]), completion.errors
        compared = correctness.compares and right is not None
        if compared and isinstance(answer, RewardError):
            errors = {**errors, f"{correctness.name}.{EXTRACTION}": str(answer)}
        # A user's extraction may cut a character in half.
        extracted = whole(answer) if compared and isinstance(answer, str) else None
        completions.append(
            msgspec.structs.replace(completion, right=right, extracted=extracted, errors=errors, logprobs=None)
        )
    versions = saved.versions or ([plan.weights] if plan.weights is not None else [])
    return msgspec.structs.replace(saved, completions=completions, versions=versions, seconds=None, time=None)


def skipped(number: int, reason: DropReason, why: str, plan: Plan) -> SavedGroup:
    """Returns the record of a skipped prompt. An evaluation takes rows in order, so the number is also the row."""
    return SavedGroup(
        run=plan.task, model=plan.model, creation=plan.creation, row=number, index=number, prompt="", completions=[],
        reason=reason.value, error=redact_text(why),
    )  # fmt: skip


class EvaluationFolder:
    """The folder of an unfinished evaluation. Only one process at a time may have it open."""

    def __init__(self, folder: Path, plan: Plan, *, resume: bool) -> None:
        """Creates the folder, or continues in it. `done`: the numbers of the finished prompts, without those that may
        work now.

        Raises EvaluationError when the folder cannot be written, holds an evaluation and `resume` is not set, or holds
        an evaluation with other settings. Raises BusyEvaluationError when another process is at work in the folder.
        """
        self.folder = folder
        self.plan = plan
        try:
            begun = (folder / EVALUATION_FILE).exists()
            if not begun and (folder / EVALUATION_GROUPS_FILE).exists():
                raise EvaluationError(
                    "samples_of_something_else",
                    f"{folder} holds a {EVALUATION_GROUPS_FILE} of something else; name another folder (--out)",
                    folder=folder,
                )
            if begun:
                self._check(resume)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                write_file(folder / EVALUATION_FILE, msgspec.json.format(_ENCODER.encode(plan), indent=2))
            self._file = LineFile(folder / EVALUATION_GROUPS_FILE, exclusive=True)
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
            self.done = {number for number, (row, _) in self._rows().items() if not row.may_pass}
        except EvaluationError:
            self.close()
            raise
        self._turn = asyncio.Lock()

    async def add(self, group: SavedGroup) -> None:
        """Adds a prompt, which is on disk when this returns."""
        async with self._turn:
            await asyncio.to_thread(self._file.append, _ENCODER.encode(group))
            assert group.row is not None
            self.done.add(group.row)

    def finish(self) -> list[SavedGroup]:
        """Sorts the file in the prompts' order, and returns its groups as `read_evaluation` does."""
        path = self.folder / EVALUATION_GROUPS_FILE
        places = {number: start for number, (_, start) in self._rows().items()}
        with path.open("rb") as file, complete_file(path) as temporary, temporary.open("xb") as ordered:
            for row in sorted(places):
                file.seek(places[row])
                ordered.write(file.readline())
        return read_evaluation(self.folder)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EvaluationFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _rows(self) -> dict[int, tuple[_Row, int]]:
        """Returns the last line of each prompt by the prompt's number, and where the line begins in the file."""
        with _errors(self.folder / EVALUATION_GROUPS_FILE), (self.folder / EVALUATION_GROUPS_FILE).open("rb") as file:
            rows = ((_ROW.decode(line), start) for start, line in whole_lines(file))
            return {row.row: (row, start) for row, start in rows}

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
    with _errors(folder / EVALUATION_FILE):
        return msgspec.json.decode((folder / EVALUATION_FILE).read_bytes(), type=Plan)


def read_evaluation(folder: Path) -> list[SavedGroup]:
    """Returns the finished prompts in order, without token ids. Raises EvaluationError when they cannot be read."""
    path = folder / EVALUATION_GROUPS_FILE
    with _errors(path), path.open("rb") as file:
        groups = [_without_tokens(_GROUP.decode(line)) for _, line in read_lines(file)]
    return sorted(groups, key=lambda group: group.row or 0)


def _without_tokens(group: SavedGroup) -> SavedGroup:
    """Saves memory: no figure of an evaluation is computed from token ids."""
    completions = [msgspec.structs.replace(one, token_ids=None, mask=None) for one in group.completions]
    return msgspec.structs.replace(group, completions=completions, prompt_token_ids=None)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            "evaluation_missing", f"no evaluation in {path.parent}: {path} cannot be read ({error.strerror})", path=path
        ) from error
    except ValueError as error:
        raise EvaluationError(
            "not_an_evaluation", f"{path} is not what `evaluate` writes: {error}", path=path
        ) from error
