"""Harbor: rows of task folders, and an environment that plays and tests a task in the sandbox.

The sandbox runs Python only, without the task's image. So a task is read as what it asks of Python: files that its
Dockerfile copies, and the Python file that its tests/test.sh runs. `Task.read` refuses every other line.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from gristmill_env import sandbox
from gristmill_env.data import Item, Message
from gristmill_env.environments.tools import ToolLoop
from gristmill_env.errors import DatasetError, EpisodeError

_MOST_BYTES: Final = 2**20
"""Of the answer of a program: its output, and the files of the task's folders in base64."""
_REWARD: Final = r"[\"']?/logs/verifier/reward\.txt[\"']?"
_HIDDEN: Final = ("/tests", "/logs/verifier")
"""Folders of the tests only. A program of the model cannot read or fill them."""
_RUNNER: Final = (
    r"(?:python3? +(?:-[BIsuE]+ +)*(?P<python>/tests/\S+\.py)(?P<arguments>(?: +[\w./=:-]+)*)|"
    r"(?:(?:uvx|uv run)(?: +(?:-p|--python) +[\d.]+| +(?:-w|--with) +pytest(?:-json-ctrf)?(?:[=<>~]=?[\d.]+)?)* +)?"
    r"(?:python3? +-m +)?pytest(?: +-[rxvqs]\w*| +--(?:tb|color|ctrf|junitxml)[= ][\w./-]+)* +"
    r"(?P<pytest>/tests/\S+\.py)(?: +-[rxvqs]\w*)*)(?: +2>&1)?(?: *\| *tee +/logs/\S+)?"
)
_PASSED: Final = rf"echo +[\"']?1(?:\.0)?[\"']? *> *{_REWARD}"
_FAILED: Final = rf"echo +[\"']?0(?:\.0)?[\"']? *> *{_REWARD}"
_LINES: Final = (
    ("", r"#.*|set +[-+]\w+(?: +pipefail)?|mkdir +-p +/logs/\S+|cd +/\S*|echo +[^<>|&;`$]*|exit(?: +\S+)?"),
    ("", r"apt-get +(?:-\S+ +)*(?:update|install(?: +-\S+)* +(?:curl|python3|ca-certificates)(?: +-\S+)*)(?: +&& .*)?"),
    ("", r"curl +-LsSf +https://astral\.sh/uv/\S+ *\| *sh|(?:source|\.) +\S+/\.local/bin/env|cat +/logs/verifier/\S+"),
    ("", r"(?:pip3?|uv pip) +install +(?:-\S+ +)*pytest(?:==[\d.]+)?"),
    ("p", r'if +\[ +"?\$PWD"? += +"?/"? +\]; *then'),
    ("i", rf"if +{_RUNNER}; *then"),
    (
        "b",
        rf"{_RUNNER} *&& *{_PASSED} *\|\| *{_FAILED}",
    ),
    ("r", _RUNNER),
    ("s", r"\w+=(?:\$\?|\$\{PIPESTATUS\[0\]\})"),
    ("c", r'if +\[\[? +"?\$(?:\?|\w+)"? +(?:-eq|==?) +0 +\]\]?; *then'),
    ("1", _PASSED),
    ("0", _FAILED),
    ("e", r"else"),
    ("f", r"fi"),
)
"""Statements of a test.sh that are understood. Their letters form a word: `_WORDS`."""
_WORDS: Final = r"(?:pf)?(?P<own>r)s?|(?:pf)?(?:rs?c|i)1e0f|(?:pf)?b"
"""What a test.sh may be: a run whose program writes the reward (`own`), or one whose exit code decides it."""
_BASE: Final = re.compile(r"(?:docker\.io/)?(?:library/)?(?:python|ubuntu|debian)(?::\S+)?", re.IGNORECASE)


class Task(msgspec.Struct, frozen=True):
    """What a task folder asks for."""

    name: str
    instruction: str
    workdir: str
    folders: list[str]
    """Folders of the container that a program may use."""
    files: dict[str, str]
    """Content in base64 by path, before the first action."""
    tests: dict[str, str]
    command: list[str]
    """"python" or "pytest", the file, and its arguments."""
    writes_reward: bool
    seconds: float

    @staticmethod
    def read(folder: Path) -> Task:
        """Reads a task. Raises DatasetError with the file and the line that this sandbox cannot carry out."""
        settings = _settings(folder)
        verifier = settings.get("verifier") or {}
        workdir, folders, content = _container(folder)
        command, writes_reward = _command(folder / "tests" / "test.sh")
        tests = folder / "tests"
        return Task(
            name=folder.name,
            instruction=_text(folder / "instruction.md"),
            workdir=workdir,
            folders=sorted({workdir, *folders, "/tmp"}),
            files=content,
            tests={
                f"/tests/{path.relative_to(tests).as_posix()}": _base64(path)
                for path in sorted(tests.rglob("*"))
                if path.is_file() and path.name != "test.sh"
            },
            command=command,
            writes_reward=writes_reward,
            seconds=min(float(verifier.get("timeout_sec", 60.0)), 60.0),
        )


def rows(*, folder: Path, skip_unsupported: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the tasks of a folder of task folders, in the order of their names.

    `skip_unsupported`: leaves out tasks that need more than the sandbox has. Raises DatasetError for such a task
    otherwise, and if no task is left.
    """
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    count = 0
    for task in found:
        try:
            made = Task.read(task)
        except DatasetError as error:
            if not skip_unsupported or error.code != "harbor_unsupported":
                raise
            continue
        count += 1
        yield {"prompt": made.instruction, "name": made.name, "folder": str(task.resolve())}
    if not count:
        raise DatasetError(
            "harbor_no_task",
            f"{folder} has {len(found)} task folders, of which the sandbox can run none; a task folder has a task.toml",
            folder=str(folder), tasks=len(found),
        )  # fmt: skip


class Harbor(ToolLoop):
    """A task of `rows`. The model has one tool, `python`, whose programs share the files of the task's folders.

    The tests run in another process when the model has ended, on the files that are then there.
    """

    def __init__(
        self,
        *,
        max_turns: Annotated[int, Field(ge=1)] = 16,
        seconds: Annotated[float, Field(gt=0, le=60)] = 10.0,
    ) -> None:
        """`seconds`: of a program of the model. The tests have the time of their task, at most 60 seconds."""
        self.max_turns = max_turns  # type: ignore[misc]
        self._seconds = seconds

    async def begin(self, item: Item) -> Sequence[Message]:
        """Returns the row's messages. Raises DatasetError for a row that is not of `rows`."""
        folder = item.columns.get("folder")
        if not isinstance(folder, str):
            raise DatasetError("harbor_row", f"row {item.index} has no folder of a task", row=item.index)
        self._task = Task.read(Path(folder))
        self._files = dict(self._task.files)
        return item.messages

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Returns the tool `python`."""
        return [self.python]

    async def python(self, code: str) -> str:
        """Runs a Python program in the task's folder and returns what it printed. Files stay for the next program.

        Args:
            code: The program. It has Python's standard library, but no network and no other processes.
        """
        report, answer = await self._run(self._files, self._seconds, program=code)
        if answer is None or not isinstance(content := answer.get("files"), dict):
            ended = f"The program was ended: {report.status}. Its changes of files are lost."
            return "".join([report.stdout, report.stderr, ended])
        inside = tuple(f"{folder}/" for folder in self._task.folders)
        self._files = {
            path: text
            for path, text in content.items()
            if path.startswith(inside) and ".." not in path.split("/") and isinstance(text, str)
        }
        return str(answer.get("output")) or "(no output)"

    async def run_all(self, results: Sequence[Any]) -> list[str]:
        """Runs one call after the other, because they share files."""
        return [await result for result in results]

    async def score(self) -> float:
        """Runs the task's tests. Raises EpisodeError if they end without a reward."""
        task = self._task
        report, answer = await self._run(self._files | task.tests, task.seconds, tests=task.command, hidden=_HIDDEN)
        if answer is None and self._files != task.files:
            return 0.0  # The tests import files of the model, which do not end, or end the process.
        if answer is None or answer.get("missing") == ["pytest"]:
            why = f"{report.status} {report.stderr[-300:]}" if answer is None else "they import pytest"
            raise EpisodeError(
                "harbor_tests",
                f"the tests of {task.name} did not run: {why}. A sandbox's image may have more packages, such as "
                "pytest: SANDBOX_IMAGE names it",
                task=task.name,
            )
        return _reward(task, answer)

    async def _run(
        self, content: Mapping[str, str], seconds: float, *, hidden: Sequence[str] = (), **what: Any
    ) -> tuple[sandbox.Report, dict[str, Any] | None]:
        """Returns how the sandbox's process ended, and its answer if it gave one."""
        folders = [*self._task.folders, *hidden]
        given = {"folders": folders, "files": dict(content), "workdir": self._task.workdir, **what}
        source = files("gristmill_env.adapters").joinpath("harbor_program.py").read_text("utf-8")
        program = f"{source}\n\nmain(json.loads({json.dumps(given)!r}))\n"
        [report] = (await sandbox.run(program, [""], seconds=seconds, output_bytes=_MOST_BYTES)).runs
        try:
            answer = json.loads(report.stdout.rpartition("\n")[2]) if report.succeeded else None
        except ValueError:
            answer = None
        return report, answer if isinstance(answer, dict) else None


def _reward(task: Task, answer: Mapping[str, Any]) -> float:
    """Returns the reward of reward.json, else of reward.txt, else of the exit code."""
    if not task.writes_reward:
        return float(answer.get("passed") is True)
    written = answer.get("rewards") or {}
    text = written.get("reward.json") or written.get("reward.txt")
    try:
        value = json.loads(text or "")
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else value.popitem()[1] if len(value) == 1 else None
        return float(value)
    except (ValueError, TypeError, KeyError) as error:
        output = str(answer.get("output"))[-300:]
        raise EpisodeError(
            "harbor_reward",
            f"the tests of {task.name} wrote {text!r:.80} as their reward; a number, or an object with the number "
            f"'reward' is expected. Their output ends with: {output}",
            task=task.name,
        ) from error


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "task.toml"
    try:
        found = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise DatasetError("harbor_task", f"{path}: {error}", file=str(path)) from error
    environment, verifier = found.get("environment") or {}, found.get("verifier") or {}
    needs = {
        "steps": found.get("steps"),
        "environment.docker_image": environment.get("docker_image"),
        "environment.gpus": environment.get("gpus"),
        "environment.mcp_servers": environment.get("mcp_servers"),
        "environment.env": environment.get("env"),
        "environment.os": environment.get("os") not in (None, "linux"),
        "verifier.env": verifier.get("env"),
        "verifier.environment_mode": verifier.get("environment_mode") not in (None, "shared"),
    }
    for name, value in needs.items():
        if value:
            raise _unsupported(folder, path, 0, name)
    return found


def _container(folder: Path) -> tuple[str, list[str], dict[str, str]]:
    """Returns the working folder, the other folders, and the files in base64 of the Dockerfile."""
    path = folder / "environment" / "Dockerfile"
    workdir, folders, content = "/", list[str](), dict[str, str]()
    others = sorted((folder / "environment").glob("docker-compose.y*ml"))
    if others:
        raise _unsupported(folder, others[0], 0, "more than one container")
    for number, line in _statements(path):
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word.upper():
            case "FROM" if _BASE.fullmatch(rest):
                pass
            case "WORKDIR" if "$" not in rest:
                workdir = str(PurePosixPath(workdir, rest))
            case "COPY" if "$" not in rest and not rest.startswith(("--", "[")):
                content |= _copied(folder, path, number, line, workdir)
            case "RUN" if made := re.fullmatch(r"mkdir +(?:-p +)?((?:[\w./-]+ *)+)", rest):
                folders += [str(PurePosixPath(workdir, name)) for name in made[1].split()]
            case "CMD" | "ENTRYPOINT" | "LABEL" | "MAINTAINER":
                pass
            case _:
                raise _unsupported(folder, path, number, line)
    if workdir == "/":
        workdir = "/app"
    inside = {str(PurePosixPath(name).parent) for name in content}
    return workdir, [name for name in [*folders, *inside] if name != "/"], content


def _copied(folder: Path, path: Path, number: int, line: str, workdir: str) -> dict[str, str]:
    context = path.parent.resolve()
    *sources, target = shlex.split(line)[1:]
    found: dict[str, str] = {}
    for source in sources:
        place = (context / source).resolve()
        if not place.is_relative_to(context) or not place.exists():
            raise _unsupported(folder, path, number, line)
        to = PurePosixPath(workdir, target)
        if place.is_dir():
            found |= {
                str(to / file.relative_to(place).as_posix()): _base64(file)
                for file in sorted(place.rglob("*"))
                if file.is_file() and file != path.resolve()
            }
        else:
            into = target.endswith("/") or target in (".", "..") or len(sources) > 1
            found[str(to / place.name if into else to)] = _base64(place)
    return found


def _command(path: Path) -> tuple[list[str], bool]:
    """Returns what a test.sh runs, and whether that program writes the reward itself."""
    folder, word, runs, skips = path.parent.parent, "", list[re.Match[str]](), False
    for number, line in _statements(path):
        if skips and line != "fi":
            continue  # What happens in a wrong working folder.
        letter, match = next(
            ((letter, match) for letter, pattern in _LINES if (match := re.fullmatch(pattern, line))), ("", None)
        )
        if match is None:
            raise _unsupported(folder, path, number, line)
        skips = letter == "p"
        word += letter
        runs += [match] if "pytest" in match.re.groupindex else []
    if not (shape := re.fullmatch(_WORDS, word)):
        raise _unsupported(folder, path, 0, "statements in an order that is not understood")
    found = runs[0].groupdict()
    if found["pytest"]:
        return ["pytest", found["pytest"]], shape["own"] is not None
    return ["python", found["python"], *found["arguments"].split()], shape["own"] is not None


def _statements(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file with their numbers, without comments, with `then` at the end of its `if`."""
    begun, text = 0, ""
    for number, line in enumerate(_text(path).splitlines(), 1):
        begun = begun or number
        text += line.strip().removesuffix("\\") + " "
        ends_if = text.startswith("if ") and not re.search(r"\bthen\s*$", text)
        if line.rstrip().endswith("\\") or ends_if:
            continue
        statement = re.sub(r"\s*;?\s+then$", "; then", text.strip())
        if statement and not statement.startswith("#"):
            yield begun, statement
        begun, text = 0, ""
    if text.strip():
        yield begun, text.strip()


def _unsupported(folder: Path, path: Path, number: int, what: str) -> DatasetError:
    place = path.relative_to(folder).as_posix() + (f", line {number}" if number else "")
    return DatasetError(
        "harbor_unsupported",
        f"task '{folder.name}' needs more than the sandbox, which runs Python without the task's image: {place}: "
        f"{what:.200}. Leave the task out, or set rows_params: {{skip_unsupported: true}}",
        task=folder.name, file=path.relative_to(folder).as_posix(), line=number,
    )  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError("harbor_task", f"{path} cannot be read: {error}", file=str(path)) from error


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
