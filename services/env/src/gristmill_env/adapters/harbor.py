"""Harbor: rows of task folders, and an environment that plays and tests a task in the sandbox.

The sandbox runs Python only, without the task's image. So a task is reduced to its Python parts: the files that its
Dockerfile copies, and the Python file that its tests/test.sh runs. `HarborTask.read` refuses every other line.
"""

from __future__ import annotations

import base64
import json
import math
import posixpath
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from gristmill_env import sandbox
from gristmill_env.data import Item, Message
from gristmill_env.environments.tools import ToolLoop
from gristmill_env.errors import DatasetError, EpisodeError
from gristmill_env.values import json_or_none

_MOST_BYTES: Final = 2**20
"""Of the answer of a program: its output, and the files of the task's folders in base64."""
_MOST_CONTENT: Final = 700_000 * 4 // 3
"""Characters of a task's files in base64, which travel with each program and back."""
_MOST_SHOWN: Final = 2**14
"""Characters of a program's output for the model (harbor_program.py)."""
_REWARD: Final = r"[\"']?/logs/verifier/reward\.txt[\"']?"
_MOST_SECONDS: Final = 60.0
"""Of the sandbox, for a process."""
_HIDDEN: Final = ("/tests", "/logs/verifier")
"""Folders of the tests only. A program of the model cannot read or fill /tests and /logs."""
_SETTINGS: Final = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
"""Files of pytest's settings, which the sandbox leaves out."""
_RUNNER: Final = (
    r"(?:python3? +(?:-[BIsuE]+ +)*(?P<python>/tests/\S+\.py)(?P<arguments>(?: +[\w./=:-]+)*)|"
    r"(?:(?:uvx|uv run)(?: +(?:-p|--python) +[\d.]+| +(?:-w|--with) +pytest(?:-json-ctrf)?(?:[=<>~]=?[\d.]+)?)* +)?"
    r"(?P<module>python3? +-m +)?pytest(?: +-[rxvqs]\w*| +--(?:tb|color|ctrf|junitxml)[= ][\w./-]+)* +"
    r"(?P<pytest>/tests/\S+\.py)(?: +-[rxvqs]\w*)*)(?: +2>&1)?(?: *\| *tee +/logs/\S+)?"
)
_PASSED: Final = rf"echo +[\"']?1(?:\.0)?[\"']? *> *{_REWARD}"
_FAILED: Final = rf"echo +[\"']?0(?:\.0)?[\"']? *> *{_REWARD}"
_APT: Final = r"apt-get +(?:-\S+ +)*(?:update|install(?: +-\S+)* +(?:curl|python3(?:-pip)?|ca-certificates)(?: +-\S+)*)"
_LINES: Final = (
    ("", r"#.*|set +[-+]\w+(?: +pipefail)?|mkdir +-p +/logs/\S+|cd +/\S*|echo +[^<>|&;`$]*|exit(?: +\S+)?"),
    ("", rf"{_APT}(?: +&& .*)?"),
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
"""The forms of a test.sh: a run whose program writes the reward (`own`), or a run whose exit code decides it."""
_BASE: Final = re.compile(
    r"(?:(?:docker\.io/)?(?:library/)?(?:python|ubuntu|debian)|"
    r"(?P<bench>ghcr\.io/laude-institute/t-bench/(?:python|ubuntu)-[\d-]+))(?::\S+)?",
    re.IGNORECASE,
)
"""`bench`: Terminal-Bench's images, which add tmux and asciinema and begin in /app."""
_NO_EFFECT: Final = re.compile(
    rf"{_APT}|apt-get +clean|rm +-rf +/var/lib/apt/lists/\*|ln +-sf? +/usr/bin/python3 +/usr/(?:local/)?bin/python|"
    r"ENV +(?:DEBIAN_FRONTEND|TEST_DIR|PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE)(?: +|=)\S+"
)
"""Statements of a Dockerfile that change nothing for the programs and tests of a task."""
_PACKAGE: Final = r" +['\"]?([A-Za-z][\w.-]*)(?:\[[\w,.-]+\])?(?:[=<>~!][\w.*,=<>~!]+)?['\"]?(?= |$)"
_PIP: Final = re.compile(
    r"(?:python3? +-m +)?pip3? +install(?: +--(?:no-cache-dir|break-system-packages|upgrade|quiet))*"
    rf"((?:{_PACKAGE.replace('([', '(?:[')})+)"
)
_PROCESSES: Final = re.compile(r"^\s*(?:import|from)\s+(?:subprocess|multiprocessing)\b|\bos\.(?:system|popen)\(")
"""Lines of tests that start other programs."""


class HarborTask(msgspec.Struct, frozen=True):
    """The needs of a task folder."""

    name: str
    instruction: str
    workdir: str
    folders: list[str]
    """Folders of the container that a program may use."""
    files: dict[str, str]
    """Content in base64 by path, before the first action."""
    packages: list[str]
    """That the sandbox must have, in any version."""
    tests: dict[str, str]
    command: list[str]
    """"python", "pytest" or "-m pytest", the file, and its arguments."""
    writes_reward: bool
    seconds: float
    """Of the tests. The sandbox gives at most `_MOST_SECONDS`."""

    @staticmethod
    def read(folder: Path) -> HarborTask:
        """Reads a task. Raises DatasetError with the file and the line that this sandbox cannot carry out."""
        seconds = _seconds(folder)
        workdir, folders, content, packages = _container(folder)
        command, writes_reward = _command(folder, workdir)
        tests = folder / "tests"
        files = _tree(folder, "tests", tests, _unsupported(folder, tests, 0, "a link, or no file"))
        settings = [] if command[0] == "python" else [name for name in files if PurePosixPath(name).name in _SETTINGS]
        if settings:
            raise _unsupported(folder, tests / settings[0], 0, "settings of pytest")
        for name, text in files.items():
            for number, line in enumerate(base64.b64decode(text).decode(errors="replace").splitlines(), 1):
                if name.endswith(".py") and _PROCESSES.search(line):
                    raise _unsupported(folder, tests / name, number, line.strip())
        if (size := sum(map(len, (*content.values(), *files.values())))) > _MOST_CONTENT:
            raise _unsupported(folder, folder, 0, f"files of {size * 3 // 4} bytes")
        return HarborTask(
            name=folder.name,
            instruction=_text(folder, folder / "instruction.md"),
            workdir=workdir,
            folders=sorted({workdir, *folders, "/tmp"}),
            files=content,
            packages=[name for name in packages if not name.startswith("pytest")],
            tests={f"/tests/{name}": text for name, text in files.items() if name != "test.sh"},
            command=command,
            writes_reward=writes_reward,
            seconds=seconds,
        )


def rows(*, folder: Path, skip_unsupported: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the tasks of a folder of task folders, in the order of their names.

    `skip_unsupported`: leaves out tasks that need more than the sandbox has. Raises DatasetError for such a task
    otherwise, and if no task is left.
    """
    folders = sorted(path.parent for path in folder.glob("*/task.toml"))
    count = 0
    for task in folders:
        try:
            made = HarborTask.read(task)
        except DatasetError as error:
            if not skip_unsupported or error.code != "harbor_unsupported":
                raise
            continue
        count += 1
        yield {"prompt": made.instruction, "name": made.name, "folder": str(task)}
    if not count:
        raise DatasetError(
            "harbor_no_task",
            f"{folder} has {len(folders)} task folders, of which the sandbox can run none; a task folder has a "
            "task.toml",
            folder=str(folder), tasks=len(folders),
        )  # fmt: skip


class Harbor(ToolLoop):
    """A task of `rows`. The model has one tool, `python`, whose programs share the files of the task's folders.

    The tests run in another process when the model has ended, on the files that are then there.
    """

    one_after_another = True

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
        self._task = HarborTask.read(Path(folder))
        self._files = dict(self._task.files)
        if self._task.packages:
            report, answer = await self._run({}, 60.0, program="", packages=self._task.packages)
            if answer is None or answer.get("failed"):
                raise self._error(str((answer and answer.get("failed")) or f"{report.status} {report.stderr[-300:]}"))
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
            shown = report.stdout.rpartition("\n")[0] + report.stderr  # without what there is of an answer
            return f"{shown[-_MOST_SHOWN:]}{ended}"
        inside = tuple(f"{folder}/" for folder in self._task.folders)
        self._files = {
            path: text
            for path, text in content.items()
            if path.startswith(inside) and path == _joined(path) and not _is_hidden(path) and isinstance(text, str)
        }
        return str(answer.get("output")) or "(no output)"

    async def score(self) -> float:
        """Runs the task's tests. Raises EpisodeError if they end without a reward."""
        task = self._task
        seconds = min(task.seconds, _MOST_SECONDS)
        report, answer = await self._run(self._files | task.tests, seconds, tests=task.command, hidden=_HIDDEN)
        why = ""
        if answer is None:
            shorter = task.seconds > seconds and report.status == "timed_out"
            ended = report.status in ("exited", "signalled", "timed_out") and not shorter
            if ended and self._files != task.files:
                return 0.0  # The tests import files of the model, which do not end, or end the process.
            limit = f": they have {seconds:g} of the task's {task.seconds:g} seconds here" if shorter else ""
            why = f"{report.status}{limit} {report.stderr[-300:]}"
        elif answer.get("failed") or answer.get("missing") == ["pytest"]:
            why = str(answer.get("failed") or "they need pytest")
        if answer is None or why:
            raise self._error(why)
        return _reward(task, answer)

    def _error(self, why: str) -> EpisodeError:
        return EpisodeError(
            "harbor_tests",
            f"the tests of {self._task.name} cannot run: {why}. An image of yours for the sandbox may have more "
            "packages, such as pytest (docs/sandbox.md)",
            task=self._task.name,
        )

    async def _run(
        self, content: Mapping[str, str], seconds: float, *, hidden: Sequence[str] = (), **what: Any
    ) -> tuple[sandbox.Report, dict[str, Any] | None]:
        """Returns how the sandbox's process ended, and its answer if it gave one."""
        folders = [*self._task.folders, *hidden]
        given = {"folders": folders, "files": dict(content), "workdir": self._task.workdir, **what}
        source = files("gristmill_env.adapters").joinpath("harbor_program.py").read_text("utf-8")
        program = f"{source}\n\nmain(json.loads({json.dumps(given)!r}))\n"
        [report] = (await sandbox.run(program, [""], seconds=seconds, output_bytes=_MOST_BYTES)).runs
        answer = json_or_none(report.stdout.rpartition("\n")[2]) if report.succeeded else None
        return report, answer if isinstance(answer, dict) else None


def _reward(task: HarborTask, answer: Mapping[str, Any]) -> float:
    """Returns the reward of reward.json, else of reward.txt, else of the exit code."""
    if not task.writes_reward:
        return float(answer.get("passed") is True)
    written = answer.get("rewards") or {}
    text = written.get("reward.json") or written.get("reward.txt")
    try:
        value = json_or_none(text or "")
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else value.popitem()[1] if len(value) == 1 else None
        if not math.isfinite(reward := float(value)):
            raise ValueError(reward)
        return reward
    except (ValueError, TypeError, KeyError) as error:
        output = str(answer.get("output"))[-300:]
        raise EpisodeError(
            "harbor_reward",
            f"the tests of {task.name} wrote {text!r:.80} as their reward; a number, or an object with the number "
            f"'reward' is expected. Their output ends with: {output}",
            task=task.name,
        ) from error


def _seconds(folder: Path) -> float:
    """Returns the time of the tests. Raises DatasetError for settings that need more than the sandbox."""
    path = folder / "task.toml"
    try:
        found = tomllib.loads(_text(folder, path))
    except tomllib.TOMLDecodeError as error:
        raise DatasetError("harbor_task", f"{path}: {error}", file=str(path)) from error
    environment, verifier = found.get("environment", {}), found.get("verifier", {})
    for name, table in {"environment": environment, "verifier": verifier}.items():
        if not isinstance(table, dict):
            raise _unsupported(folder, path, 0, f"{name} = {table!r}")
    seconds = verifier.get("timeout_sec", 600.0)  # Harbor's default.
    needs = {
        "steps": found.get("steps"),
        "environment.docker_image": environment.get("docker_image"),
        "environment.gpus": environment.get("gpus"),
        "environment.mcp_servers": environment.get("mcp_servers"),
        "environment.env": environment.get("env"),
        "environment.os": environment.get("os") not in (None, "linux"),
        f"verifier.timeout_sec = {seconds!r}": type(seconds) not in (int, float) or not 0 < seconds < math.inf,
        "verifier.env": verifier.get("env"),
        "verifier.environment_mode": verifier.get("environment_mode") not in (None, "shared"),
    }
    for name, value in needs.items():
        if value:
            raise _unsupported(folder, path, 0, name)
    return float(seconds)


def _container(folder: Path) -> tuple[str, list[str], dict[str, str], list[str]]:
    """Returns the working folder, the other folders, the files in base64, and the packages of the Dockerfile."""
    path = folder / "environment" / "Dockerfile"
    workdir, folders, content, packages = "/", {"/tmp"}, dict[str, str](), list[str]()
    others = sorted((folder / "environment").glob("docker-compose.y*ml"))
    if others:
        raise _unsupported(folder, others[0], 0, "more than one container")
    for number, line in _statements(folder, path):
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word.upper():
            case "FROM" if base := _BASE.fullmatch(rest):
                workdir = "/app" if base["bench"] else "/"
            case "WORKDIR" if re.fullmatch(r"[\w./-]+", rest):
                workdir = _joined(workdir, rest)
                folders.add(workdir)
            case "COPY" if "$" not in rest and not rest.startswith(("--", "[")):
                content |= _copied(folder, line, workdir, folders, _unsupported(folder, path, number, line))
                folders |= {posixpath.dirname(name) for name in content}
            case "RUN":
                for command in map(str.strip, rest.split("&&")):
                    if made := re.fullmatch(r"mkdir(?: +-p)?((?: +[\w./][\w./-]*)+)", command):
                        folders |= {_joined(workdir, name) for name in made[1].split()}
                    elif made := _PIP.fullmatch(command):
                        packages += re.findall(_PACKAGE, made[1])
                    elif not _NO_EFFECT.fullmatch(command):
                        raise _unsupported(folder, path, number, command)
            case "ENV" if _NO_EFFECT.fullmatch(line):
                pass
            case "CMD" | "ENTRYPOINT" | "LABEL" | "MAINTAINER":
                pass
            case _:
                raise _unsupported(folder, path, number, line)
    if _is_hidden(workdir):
        raise _unsupported(folder, path, 0, f"the working folder {workdir}, which only the tests have")
    if workdir == "/":
        workdir = "/app"
    return workdir, [name for name in folders if name != "/" and not _is_hidden(name)], content, packages


def _copied(folder: Path, line: str, workdir: str, known: Set[str], refused: DatasetError) -> dict[str, str]:
    """Returns the files of a COPY. `known`: folders of the container. Raises `refused` if a place is not clear."""
    context = folder.resolve() / "environment"
    folders = {"/", *known, *(str(above) for name in known for above in PurePosixPath(name).parents)}
    try:
        *sources, target = shlex.split(line)[1:]
    except ValueError as error:
        raise refused from error
    to = _joined(workdir, target)
    into = target.endswith(("/", "/.")) or len(sources) > 1 or to in folders
    copied: dict[str, str] = {}
    for source in sources:
        place = (context / source).resolve()
        if place.is_dir():
            tree = _tree(folder, "environment", place, refused)
            copied |= {_joined(to, name): tree[name] for name in tree if place != context or name != "Dockerfile"}
        else:
            name = _joined(to, place.name) if into else to
            same = PurePosixPath(name).suffix == place.suffix != "" or posixpath.basename(name) == place.name
            if not same and posixpath.dirname(name) not in folders:
                raise refused  # The image may have a folder of this name.
            copied[name] = _base64(folder, "environment", place, refused)
    if not sources or any(_is_hidden(name) or posixpath.dirname(name) == "/" for name in copied):
        raise refused
    return copied


def _command(folder: Path, workdir: str) -> tuple[list[str], bool]:
    """Returns what a test.sh runs, and whether that program writes the reward itself."""
    path, word, runs, skips = folder / "tests" / "test.sh", "", list[re.Match[str]](), False
    for number, line in _statements(folder, path):
        if skips and line != "fi":
            continue  # What happens in a wrong working folder.
        letter, match = next(
            ((letter, match) for letter, pattern in _LINES if (match := re.fullmatch(pattern, line))), ("", None)
        )
        if match is None or (line.startswith("cd ") and _joined(line[3:].strip()) != workdir):
            raise _unsupported(folder, path, number, line)
        skips = letter == "p"
        word += letter
        if "pytest" in match.re.groupindex:
            runs.append(match)
            file = match["pytest"] or match["python"]
            if file != _joined(file) or not (folder / file[1:]).is_file():
                raise _unsupported(folder, path, number, f"{file}, which does not exist")
    if not (shape := re.fullmatch(_WORDS, word)):
        raise _unsupported(folder, path, 0, "statements in an order that is not understood")
    parts = runs[0].groupdict()
    if parts["pytest"]:
        return ["-m pytest" if parts["module"] else "pytest", parts["pytest"]], shape["own"] is not None
    return ["python", parts["python"], *parts["arguments"].split()], shape["own"] is not None


def _statements(folder: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file with their numbers, without comments, with `then` at the end of its `if`."""
    begun, text = 0, ""
    for number, line in enumerate(_text(folder, path).splitlines(), 1):
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


def _joined(folder: str, path: str = "") -> str:
    """Returns the path without `..`, such as /app/data."""
    return "/" + posixpath.normpath(posixpath.join(folder, path)).lstrip("/")


def _is_hidden(path: str) -> bool:
    return path.split("/")[1] in {name.split("/")[1] for name in _HIDDEN}


def _tree(folder: Path, part: str, top: Path, refused: DatasetError) -> dict[str, str]:
    """Returns the files below `top` in base64, by their paths there."""
    paths = [path for path in sorted(top.rglob("*")) if path.is_symlink() or not path.is_dir()]
    return {path.relative_to(top).as_posix(): _base64(folder, part, path, refused) for path in paths}


def _base64(folder: Path, part: str, path: Path, refused: DatasetError) -> str:
    """Returns a file of a part of the task. Raises `refused` for a link to another folder, and if it is not a file."""
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve() / part):
        raise refused
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise DatasetError("harbor_task", f"{path} cannot be read: {error}", file=str(path)) from error


def _text(folder: Path, path: Path) -> str:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise _unsupported(folder, path, 0, "a link to another folder")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError("harbor_task", f"{path} cannot be read: {error}", file=str(path)) from error
