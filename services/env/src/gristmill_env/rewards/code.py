"""The reward `code`: runs the program of a completion in the sandbox, and compares its output or runs tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from gristmill_env import sandbox
from gristmill_env.answers.extraction import after_thinking
from gristmill_env.errors import RewardError
from gristmill_env.rewards.registry import reward

_LEAST_OUTPUT, _MOST_OUTPUT = 64 * 2**10, 2**20
"""Bytes that a program may print: more if a right output is long."""
_PYTHON: Final = frozenset({"", "python", "python3", "py"})


@reward("code")
class Code:
    """1 if the program in the completion passes all of the row's cases or its tests, else 0.

    The program is the last fenced block of Python, or the text after the reasoning if it has no block. It runs in the
    sandbox (docs/sandbox.md), without files, network or other processes.

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
        longest = max(len(wanted.encode("utf-8", "surrogatepass")) for _, wanted in cases)
        room = min(max(_LEAST_OUTPUT, 2 * longest), _MOST_OUTPUT)
        answer = await sandbox.run(text, [given for given, _ in cases], output_bytes=room, **self._limits)
        passed = [
            report.succeeded and _lines(report.stdout) == _lines(wanted)
            for report, (_, wanted) in zip(answer.runs, cases, strict=True)
        ]
        return sum(passed) / len(passed) if self._partial else float(all(passed))


def program_of(completion: str) -> str:
    """Returns the last fenced block of Python after the reasoning, or all of that text. Takes linear time."""
    text = after_thinking(completion)
    program = None
    language: str | None = None
    block: list[str] = []
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if language is None:
            if mark.startswith("```") and "`" not in (name := mark[3:].strip().lower()):
                language, block = name, []
        elif mark == "```":
            program = "".join(block) if language in _PYTHON else program
            language = None
        else:
            block.append(line)
    return text if program is None else program


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
        pairs.append((case["input"], case["output"]))
    if not pairs:
        raise RewardError("code_case_invalid", f"column '{field}' of the row has no case", column=field, case=0)
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
