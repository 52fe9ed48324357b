"""Task folders in Harbor's format: which ones are read, and their programs and tests in a real sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.unit.env.environments.conftest import Roll
from tests.unit.env.environments.test_tools import call, results
from tests.unit.env.gateway.conftest import ScriptedModel

from gristmill_env.adapters.harbor import Harbor, Task, rows
from gristmill_env.data import Item
from gristmill_env.environments import create_environment
from gristmill_env.errors import DatasetError, EpisodeError

pytestmark = pytest.mark.slow

Make = Callable[..., Path]
BY_EXIT_CODE = """#!/bin/bash

# The setup that Harbor's template begins with.
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then
    echo "Error: no WORKDIR"
    exit 1
fi
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
SAYS_HELLO = """
from pathlib import Path


def test_greeting():
    assert Path("/app/hello.txt").read_text() == "Hello"
"""
WRITES_REWARD = """
import json
import os
import sys

from points import points

right = points(open("/app/answer.txt").read()) if os.path.exists("/app/answer.txt") else 0
with open("/logs/verifier/" + sys.argv[1], "w") as file:
    file.write(REWARD)
"""
IMPORTS = """
import sys

sys.path.insert(0, "/app")
from solution import double


def test_double():
    assert double(2) == 4
"""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Returns a function that writes a task folder."""

    def write(
        name: str = "hello", toml: str = "", dockerfile: str = "", script: str = BY_EXIT_CODE, **more: str
    ) -> Path:
        folder = tmp_path / "tasks" / name
        content = {
            "instruction.md": "Write Hello to /app/hello.txt.",
            "task.toml": f'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 30.0\n{toml}',
            "environment/Dockerfile": f"FROM python:3.12-slim\nWORKDIR /app\n{dockerfile}",
            "solution/solve.sh": "echo -n Hello > /app/hello.txt",
            "tests/test.sh": script,
            "tests/test_outputs.py": SAYS_HELLO,
            **more,
        }
        for path, text in content.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return write


async def played(folder: Path, *programs: str) -> tuple[list[str], float]:
    """Returns the outputs of programs of the model, and the reward of the tests after them."""
    harbor = Harbor()
    await harbor.begin(Item(row=0, index=0, prompt="", answer=None, columns={"folder": str(folder)}))
    return [await harbor.python(program) for program in programs], await harbor.score()


def test_rows_are_the_tasks_by_name_without_their_tests(make: Make) -> None:
    first, second = make("a"), make("b")
    found = list(rows(folder=first.parent))
    assert [(row["name"], row["folder"]) for row in found] == [("a", str(first)), ("b", str(second))]
    assert found[0] == {"prompt": "Write Hello to /app/hello.txt.", "name": "a", "folder": str(first)}


async def test_model_plays_a_task_with_its_tool_and_the_tests_decide(
    roll: Roll, model: ScriptedModel, make: Make
) -> None:
    program = "open('hello.txt', 'w').write('Hello'); import os; print(os.getcwd(), os.listdir('/app'))"
    model.says = [call("python", code=program), call("python", code="print(open('/app/hello.txt').read())"), "Done."]
    harbor = create_environment("harbor", {"max_turns": 4})
    rollout = await roll(harbor, tools=True, columns={"folder": str(make())}, max_length=8192)
    assert results(rollout) == ["/app ['hello.txt']\n", "Hello\n"]
    assert rollout.reward == 1.0


async def test_task_that_nobody_solved_scores_0(make: Make) -> None:
    assert await played(make()) == ([], 0.0)
    assert await played(make(), "open('/app/hello.txt', 'w').write('Bye')") == (["(no output)"], 0.0)


async def test_program_has_the_files_of_the_dockerfile_and_never_the_tests(make: Make) -> None:
    task = make(
        dockerfile="COPY data.csv .\nCOPY more /srv/more/\nRUN mkdir -p out /data\n",
        **{"environment/data.csv": "1,2", "environment/more/deep/a.txt": "deep"},
    )
    look = """
import os
from pathlib import Path
print(sorted(str(path) for top in ("/app", "/srv", "/data") for path in Path(top).rglob("*") if path.is_file()))
print(Path("data.csv").read_text(), Path("/srv/more/deep/a.txt").read_text(), Path("/data").is_dir())
"""
    hidden = (
        "print([__import__('os').path.exists(p) for p in ('/tests', '/tests/test_outputs.py', '/logs', '/solution')])"
    )
    outputs, _ = await played(task, look, hidden)
    assert outputs[0] == "['/app/data.csv', '/srv/more/deep/a.txt']\n1,2 deep True\n"
    assert outputs[1] == "[False, False, False, False]\n"


async def test_program_that_fails_says_why_and_one_that_does_not_end_keeps_the_files(make: Make) -> None:
    harbor = Harbor(seconds=1.0)
    await harbor.begin(Item(row=0, index=0, prompt="", answer=None, columns={"folder": str(make())}))
    assert (await harbor.python("open('hello.txt', 'w').write('Hello'); 1 / 0")).splitlines()[-1] == (
        "ZeroDivisionError: division by zero"
    )
    assert "timed_out" in await harbor.python("open('hello.txt', 'w').write('Bye')\nwhile True: pass")
    assert await harbor.score() == 1.0


async def test_forged_state_of_a_program_cannot_replace_the_tests(make: Make) -> None:
    forged = {
        "files": {"/tests/test_outputs.py": "", "/app/../tests/a.py": "", "/etc/passwd": "", "/app/hello.txt": ""}
    }
    program = f"import os, json; os.write(1, b'\\n' + json.dumps({forged!r}).encode()); os._exit(0)"
    harbor = Harbor()
    await harbor.begin(Item(row=0, index=0, prompt="", answer=None, columns={"folder": str(make())}))
    await harbor.python(program)
    assert set(harbor._files) == {"/app/hello.txt"}
    assert await harbor.score() == 0.0


async def test_tests_may_import_what_the_model_wrote(make: Make) -> None:
    task = make(**{"tests/test_outputs.py": IMPORTS})
    write = "open('/app/solution.py', 'w').write({!r})".format
    assert (await played(task, write("def double(x): return x + x")))[1] == 1.0
    assert (await played(task, write("def double(x): return 5")))[1] == 0.0
    assert (await played(task, write("import os\nos._exit(0)")))[1] == 0.0
    assert (await played(task))[1] == 0.0


@pytest.mark.parametrize(
    ("name", "reward", "expected"),
    [("reward.txt", "str(right / 4)", 0.75), ("reward.json", 'json.dumps({"reward": right / 4, "other": 9})', 0.75),
     ("reward.json", 'json.dumps({"accuracy": 0.5})', 0.5)],
)  # fmt: skip
async def test_tests_may_write_the_reward(make: Make, name: str, reward: str, expected: float) -> None:
    task = make(
        script=f"#!/bin/sh\nset -eu\nmkdir -p /logs/verifier\npython3 /tests/grade.py {name}\n",
        **{
            "tests/grade.py": WRITES_REWARD.replace("REWARD", reward),
            "tests/points.py": "def points(text):\n    return len(text)",
        },
    )
    assert (await played(task, "open('answer.txt', 'w').write('abc')"))[1] == expected


async def test_tests_without_a_reward_are_an_error_and_no_0(make: Make) -> None:
    script = "python3 /tests/test_outputs.py\n"
    with raises(EpisodeError, "harbor_reward", task="hello"):
        await played(make(script=script))
    with raises(EpisodeError, "harbor_tests", task="fails"):
        await played(make("fails", script=script, **{"tests/test_outputs.py": "import os\nos._exit(0)"}))


@pytest.mark.parametrize(
    "script",
    [
        "if python3 /tests/test_outputs.py; then\n  echo 1.0 > /logs/verifier/reward.txt\nelse\n"
        '  echo "0.0" > "/logs/verifier/reward.txt"\nfi\nexit 0\n',
        "pytest /tests/test_outputs.py -v\nCODE=$?\nif [ $CODE -eq 0 ]\nthen\necho 1 > /logs/verifier/reward.txt\n"
        "else\necho 0 > /logs/verifier/reward.txt\nfi\ncat /logs/verifier/reward.txt\n",
        "cd /app\npython3 /tests/test_outputs.py 2>&1 | tee /logs/verifier/log.txt\ncode=${PIPESTATUS[0]}\n"
        'if [ "$code" -eq 0 ]; then\necho 1 > /logs/verifier/reward.txt\nelse\n'
        "echo 0 > /logs/verifier/reward.txt\nfi\n",
        "python -m pytest /tests/test_outputs.py && echo 1 > /logs/verifier/reward.txt || "
        "echo 0 > /logs/verifier/reward.txt\n",
    ],
)  # fmt: skip
def test_usual_forms_of_a_test_script_are_read(make: Make, script: str) -> None:
    task = Task.read(make(script=script))
    assert task.command[1:] == ["/tests/test_outputs.py"]
    assert not task.writes_reward
    assert set(task.tests) == {"/tests/test_outputs.py"}


@pytest.mark.parametrize(
    ("changes", "file", "line"),
    [
        ({"dockerfile": "RUN pip install numpy\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "RUN apt-get update && \\\n apt-get install -y gcc\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "COPY ../secret .\n"}, "environment/Dockerfile", 3),
        ({"environment/Dockerfile": "FROM nvidia/cuda:12\n"}, "environment/Dockerfile", 1),
        ({"environment/docker-compose.yaml": "services: {}"}, "environment/docker-compose.yaml", 0),
        ({"toml": '[environment]\ndocker_image = "org/image"\n'}, "task.toml", 0),
        ({"toml": '[[steps]]\nname = "one"\n'}, "task.toml", 0),
        ({"script": "#!/bin/bash\nnode /tests/a.js\n"}, "tests/test.sh", 2),
        ({"script": BY_EXIT_CODE.replace("-w pytest==8.4.1", "-w numpy")}, "tests/test.sh", 12),
        ({"script": BY_EXIT_CODE.replace("echo 1", "echo 2")}, "tests/test.sh", 19),
        ({"script": BY_EXIT_CODE.replace("echo 1", "echo 9").replace("echo 0", "echo 1").replace("echo 9", "echo 0")},
         "tests/test.sh", 0),
    ],
)  # fmt: skip
def test_task_that_needs_more_than_the_sandbox_is_refused_with_its_line(
    make: Make, changes: dict[str, str], file: str, line: int
) -> None:
    refused = make("refused", **changes)
    with raises(DatasetError, "harbor_unsupported", task="refused", file=file, line=line):
        list(rows(folder=refused.parent))
    with raises(DatasetError, "harbor_no_task", tasks=1):
        list(rows(folder=refused.parent, skip_unsupported=True))
    make("simple")
    assert [row["name"] for row in rows(folder=refused.parent, skip_unsupported=True)] == ["simple"]


def test_broken_task_is_an_error_even_if_unsupported_ones_are_skipped(make: Make) -> None:
    task = make(toml="= 3")
    with raises(DatasetError, "harbor_task", file=str(task / "task.toml")):
        list(rows(folder=task.parent, skip_unsupported=True))


@pytest.mark.parametrize(
    ("tests", "passed", "missing"),
    [
        ("def test_a():\n    assert 1\nclass TestB:\n    def test_b(self):\n        assert 1", True, []),
        ("def test_a():\n    assert 1\nclass TestB:\n    def test_b(self):\n        assert 0", False, []),
        ("import pytest", False, ["pytest"]),
    ],
)
def test_functions_of_a_test_file_run_without_pytest(
    tmp_path: Path, tests: str, passed: bool, missing: list[str]
) -> None:
    given: dict[str, Any] = {"folders": ["/app", "/tests"], "files": {}, "workdir": "/app"}
    given["tests"] = ["pytest", "/tests/test_it.py"]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(tests)
    source = files("gristmill_env.adapters").joinpath("harbor_program.py").read_text("utf-8")
    program = f"{source}\nmain(json.loads({json.dumps(given)!r}))"
    command = [sys.executable, "-I", "-S", "-c", program]  # Without site-packages.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.rpartition("\n")[2])
    assert (answer["passed"], answer["missing"]) == (passed, missing)
