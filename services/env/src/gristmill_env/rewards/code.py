"""The reward `code`: runs the program of a completion in the sandbox, and compares its output or runs tests."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from gristmill_env import sandbox
from gristmill_env.answers.extraction import after_thinking
from gristmill_env.errors import RewardError
from gristmill_env.rewards.registry import reward

_LEAST_OUTPUT, _MOST_OUTPUT = 64 * 2**10, 2**20
"""Bytes that a program may print: more if a right output is long."""
MOST_CASES: Final = 256
"""The sandbox takes no more runs in a request (services/sandbox, app.MAX_RUNS)."""
_PYTHON: Final = re.compile(r"py|python[\d.]*")
"""The first word after the marks of a block of Python."""


@reward("code")
class Code:
    """1 if the program in the completion passes all of the row's cases or its tests, else 0.

    The program is the last fenced block of Python after the reasoning. If no block is labelled as Python, it is the
    last block without a label, and without one all of that text. It runs in the sandbox (docs/sandbox.md), without
    files, network or other processes.

    Options: `cases_field`, a column with a list of {input, output}: the program runs once for each input, on stdin,
    and must print the output. Lines are compared without white space at their ends. Expected outputs never enter the
    sandbox. Or `tests_field`, a column with a Python file whose asserts call the program's functions from another
    process. `partial` gives the share of the cases that pass instead. `seconds` and `memory_mb` limit each process.
    """

    def __init__(
        self,
        *,
        cases_field: str | None = None,
        tests_field: str | None = None,
        partial: bool = False,
        seconds: Annotated[float, Field(gt=0, le=60)] = 5.0,
        memory_mb: Annotated[int, Field(ge=64, le=2048)] = 512,
    ) -> None:
        """Raises RewardError unless exactly one of the two fields is set."""
        if (cases_field is None) == (tests_field is None):
            raise RewardError(
                "code_source", "the reward 'code' needs cases_field or tests_field, a column of the data set; set one"
            )
        self._cases, self._tests, self._partial = cases_field, tests_field, partial
        self._limits: dict[str, Any] = {"seconds": seconds, "memory_bytes": memory_mb * 2**20}

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one completion. Raises RewardError for a row without cases, SandboxError if the sandbox fails."""
        text = program_of(completion)
        if self._tests is not None:
            answer = await sandbox.run(text, tests=_column(row, self._tests, str), **self._limits)
            return float(answer.tests is not None and answer.tests.succeeded)
        cases = _cases(row, str(self._cases))
        room = min(max(_LEAST_OUTPUT, 2 * max(_size(wanted) for _, wanted in cases)), _MOST_OUTPUT)
        answer = await sandbox.run(text, [given for given, _ in cases], output_bytes=room, **self._limits)
        passed = [
            report.succeeded and _lines(report.stdout) == _lines(wanted)
            for report, (_, wanted) in zip(answer.runs, cases, strict=True)
        ]
        return sum(passed) / len(passed) if self._partial else float(all(passed))


def program_of(completion: str) -> str:
    """Returns the program in a completion, as `Code` says. Takes linear time."""
    text = after_thinking(completion)
    labelled = unlabelled = None
    language: str | None = None
    block: list[str] = []
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if language is None:
            if mark.startswith("```") and "`" not in (label := mark[3:].lower()):
                language, block = (label.split() or [""])[0], []
                indented = not line.startswith("```")
        elif mark == "```":
            body = "".join(block)
            body = textwrap.dedent(body) if indented else body  # as in an item of a list
            if not language:
                unlabelled = body
            elif _PYTHON.fullmatch(language):
                labelled = body
            language = None
        else:
            block.append(line)
    return next((found for found in (labelled, unlabelled) if found is not None), text)


def _size(output: str) -> int:
    return len(output.encode("utf-8", "surrogatepass"))


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _cases(row: Mapping[str, Any], field: str) -> list[tuple[str, str]]:
    cases = _column(row, field, Sequence)
    pairs = []
    for number, case in enumerate(cases):
        if not isinstance(case, Mapping) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise RewardError(
                "code_case_invalid",
                f"case {number} of column '{field}' is {case!r:.80}; an object with the texts input and output is "
                "expected",
                column=field,
                case=number,
            )
        if (size := _size(case["output"])) > _MOST_OUTPUT:
            raise RewardError(
                "code_case_invalid",
                f"the output of case {number} of column '{field}' has {size} bytes; a program may print {_MOST_OUTPUT}",
                column=field,
                case=number,
            )
        pairs.append((case["input"], case["output"]))
    if not 1 <= len(pairs) <= MOST_CASES:
        raise RewardError(
            "code_case_invalid",
            f"column '{field}' of the row has {len(pairs)} cases; 1 to {MOST_CASES} are possible",
            column=field,
            case=len(pairs),
        )
    return pairs


def _column(row: Mapping[str, Any], field: str, kind: type) -> Any:
    value = row.get(field)
    if value is None:
        raise RewardError(
            "column_missing",
            f"the row has no '{field}', which the reward 'code' reads; it has {', '.join(row)}",
            column=field,
            columns=list(row),
        )
    if not isinstance(value, kind) or isinstance(value, str) != (kind is str):
        what = "text" if kind is str else "a list of cases"
        raise RewardError(
            "code_case_invalid",
            f"column '{field}' of the row is {value!r:.80}; {what} is expected",
            column=field,
            case=0,
        )
    return value
