"""HarborTask folders in Harbor's format: which ones are read, and their programs and tests in a real sandbox."""

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

from gristmill_env.adapters import harbor
from gristmill_env.adapters.harbor import Harbor, HarborTask, rows
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
BY_PYTHON = """#!/bin/sh
python3 /tests/test_outputs.py && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
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


def item_of(folder: Path) -> Item:
    return Item(row=0, index=0, prompt="", answer=None, columns={"folder": str(folder)})


async def played(folder: Path, *programs: str) -> tuple[list[str], float]:
    """Returns the outputs of programs of the model, and the reward of the tests after them."""
    harbor = Harbor()
    await harbor.begin(item_of(folder))
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
    harbor = Harbor(seconds=5.0)
    await harbor.begin(item_of(make()))
    assert (await harbor.python("open('hello.txt', 'w').write('Hello'); 1 / 0")).splitlines()[-1] == (
        "ZeroDivisionError: division by zero"
    )
    assert "timed_out" in await harbor.python("open('hello.txt', 'w').write('Bye')\nimport time; time.sleep(60)")
    assert await harbor.score() == 1.0


async def test_forged_state_of_a_program_cannot_replace_the_tests(make: Make) -> None:
    forged = {
        "files": {"/tests/test_outputs.py": "", "/app/../tests/a.py": "", "/etc/passwd": "", "/app/hello.txt": ""}
    }
    program = f"import os, json; os.write(1, b'\\n' + json.dumps({forged!r}).encode()); os._exit(0)"
    harbor = Harbor()
    await harbor.begin(item_of(make()))
    await harbor.python(program)
    assert set(harbor._files) == {"/app/hello.txt"}
    assert await harbor.score() == 0.0


@pytest.mark.parametrize("script", [BY_EXIT_CODE, BY_EXIT_CODE.replace("  pytest --ctrf", "  python -m pytest --ctrf")])
async def test_files_of_the_model_replace_no_module_and_no_setting_of_the_tests(make: Make, script: str) -> None:
    task = make(
        script=script, **{"tests/test_outputs.py": "import csv\n\n\ndef test_it():\n    assert csv.reader is None"}
    )
    forged = {
        "pytest.py": "def main(arguments): return 0",
        "csv.py": "reader = None",
        "sitecustomize.py": "import os; os._exit(0)",
        "conftest.py": "def pytest_collection_modifyitems(items): items.clear()",
        "pytest.ini": "[pytest]\naddopts = --collect-only",
        "forged.py": "def pytest_sessionfinish(session): session.exitstatus = 0\n",
        "forged-1.0.dist-info/METADATA": "Name: forged\nVersion: 1.0\n",
        "forged-1.0.dist-info/entry_points.txt": "[pytest11]\nforged = forged\n",
    }
    write = (
        f"import os\nos.mkdir('forged-1.0.dist-info')\n"
        f"for name, text in {forged!r}.items(): open(name, 'w').write(text)"
    )
    assert await played(task, write) == (["(no output)"], 0.0)


async def test_program_cannot_fill_the_folders_of_the_tests_that_the_dockerfile_makes(make: Make) -> None:
    task = make(
        script="#!/bin/sh\npython3 /tests/grade.py\n",
        dockerfile="RUN mkdir -p /logs /logs/verifier /app/../tests\nWORKDIR /tests/more\nWORKDIR /app\n",
        **{"tests/grade.py": "open('/logs/verifier/reward.txt', 'w').write('0')"},
    )
    assert HarborTask.read(task).folders == ["/app", "/tmp"]
    forge = "import os\nos.makedirs('/logs/verifier')\nopen('/logs/verifier/reward.json', 'w').write('1')"
    assert (await played(task, forge))[1] == 0.0


async def test_forged_state_cannot_fill_the_folders_of_the_tests(make: Make) -> None:
    """Not even if the task's folders contain them."""
    harbor = Harbor()
    await harbor.begin(item_of(make()))
    harbor._task.folders.extend(["/logs", "/tests"])
    await harbor.python(
        "open('/logs/reward.json', 'w').write('1'); open('/tests/conftest.py', 'w'); open('/tmp/a', 'w')"
    )
    assert set(harbor._files) == {"/tmp/a"}


def test_module_of_the_model_is_found_only_behind_pythons_own(tmp_path: Path) -> None:
    """`python -m pytest` has the working folder in its path."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "csv.py").write_text("reader = None")
    (tmp_path / "app" / "solution.py").write_text("value = 3")
    (tmp_path / "app" / "pytest.py").write_text("def main(arguments): return 0")
    tests = "import csv\nimport solution\ndef test_a():\n    assert csv.reader and solution.value == 3"
    assert without_pytest(tmp_path, tests, "-m pytest")["passed"] is True
    assert without_pytest(tmp_path, tests, "pytest")["missing"] == ["solution"]
    assert without_pytest(tmp_path, "import pytest\ndef test_a(): pass", "-m pytest")["missing"] == ["pytest"]


@pytest.mark.parametrize(
    ("link", "to", "file", "line"),
    [
        ("environment/d/secret", "outside", "environment/Dockerfile", 3),
        ("environment/d/secret", "tasks/hello/solution/solve.sh", "environment/Dockerfile", 3),
        ("environment/d/folder", "outside_folder", "environment/Dockerfile", 3),
        ("tests/secret", "outside", "tests", 0),
        ("instruction.md", "outside", "instruction.md", 0),
    ],
)
def test_link_out_of_the_task_is_refused(make: Make, tmp_path: Path, link: str, to: str, file: str, line: int) -> None:
    task = make(dockerfile="COPY d d\n", **{"environment/d/a.txt": "1"})
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "outside_folder").mkdir()
    (task / link).unlink(missing_ok=True)
    (task / link).symlink_to(tmp_path / to)
    with raises(DatasetError, "harbor_unsupported", file=file, line=line):
        HarborTask.read(task)


def test_task_with_too_large_files_is_refused(make: Make) -> None:
    task = make(dockerfile="COPY d d\n", **{"environment/d/a.csv": "1,2\n" * 210_000})
    with raises(DatasetError, "harbor_unsupported", file=".", line=0):
        HarborTask.read(task)


def test_rows_have_the_folder_as_the_user_wrote_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make().parents[1])
    assert [row["folder"] for row in rows(folder=Path("tasks"))] == ["tasks/hello"]


async def test_annotations_are_evaluated_in_programs_and_in_their_tests(make: Make) -> None:
    evaluated = "def f(x: int): pass\nassert f.__annotations__ == {'x': int}\n"
    test = f"{evaluated}assert open('/app/hello.txt').read() == 'Hello'\n"
    task = make(script=BY_PYTHON, **{"tests/test_outputs.py": test})
    said, reward = await played(task, f"{evaluated}open('/app/hello.txt', 'w').write('Hello')\nprint('ran')")
    assert (said[0], reward) == ("ran\n", 1.0)


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
    with raises(EpisodeError, "harbor_reward", task="nan"):
        write = "open('/logs/verifier/reward.txt', 'w').write('NaN')"
        await played(make("nan", script=script, **{"tests/test_outputs.py": write}))


async def test_answers_that_are_nested_too_deeply_to_read_are_no_answers(make: Make) -> None:
    program = "import os; os.write(1, b'\\n' + b'[' * 5000); os._exit(0)"
    outputs, reward = await played(make(), HELLO, program)
    assert (outputs[0], reward) == ("(no output)", 1.0)
    assert outputs[1].endswith("Its changes of files are lost.")
    write = "open('/logs/verifier/reward.txt', 'w').write('[' * 5000)"
    script = "python3 /tests/test_outputs.py\n"
    with raises(EpisodeError, "harbor_reward", task="deep"):
        await played(make("deep", script=script, **{"tests/test_outputs.py": write}))


HELLO = "open('/app/hello.txt', 'w').write('Hello')"


@pytest.mark.parametrize(("script", "end"), [(BY_PYTHON, "test_greeting()"), (BY_EXIT_CODE, "")])
async def test_output_of_the_tests_has_no_effect_on_the_reward(make: Make, script: str, end: str) -> None:
    text = SAYS_HELLO.replace("    assert", "    print('x' * 2**21)\n    assert") + end
    task = make(script=script, **{"tests/test_outputs.py": text})
    assert (await played(task, HELLO))[1] == 1.0
    assert (await played(task, "print('y' * 2**21)")) == (["y" * (2**14 - 1) + "\n"], 0.0)


@pytest.mark.parametrize(
    "text", ["import os\nos.write(1, b'x' * 2**21)", "def helper(): pass"], ids=["limit", "no test"]
)  # fmt: skip
async def test_tests_that_end_by_themselves_are_no_0_of_a_model_that_wrote_files(make: Make, text: str) -> None:
    script = BY_EXIT_CODE if "helper" in text else BY_PYTHON
    with raises(EpisodeError, "harbor_tests", task="hello"):
        await played(make(script=script, **{"tests/test_outputs.py": text}), HELLO)


async def test_tests_with_less_time_than_their_task_gives_are_no_0(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(script=BY_PYTHON, **{"tests/test_outputs.py": "while True:\n    pass"})
    toml = (task / "task.toml").read_text()
    monkeypatch.setattr(harbor, "_MOST_SECONDS", 1.0)
    with raises(EpisodeError, "harbor_tests", task="hello"):
        await played(task, HELLO)
    (task / "task.toml").write_text(toml.replace("30.0", "1"))
    assert (await played(task, HELLO))[1] == 0.0
    (task / "task.toml").write_text("")
    assert HarborTask.read(task).seconds == 600.0


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
    task = HarborTask.read(make(script=script))
    assert task.command[1:] == ["/tests/test_outputs.py"]
    assert not task.writes_reward
    assert set(task.tests) == {"/tests/test_outputs.py"}


@pytest.mark.parametrize(
    ("changes", "file", "line"),
    [
        ({"dockerfile": "RUN pip install -r requirements.txt\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "ENV PYTHONPATH=/app\n"}, "environment/Dockerfile", 3),
        ({"tests/helper.py": "import os\nos.system('make')\n"}, "tests/helper.py", 2),
        ({"tests/test_outputs.py": "from subprocess import run\n"}, "tests/test_outputs.py", 1),
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
        ({"dockerfile": 'COPY "a b ./\n'}, "environment/Dockerfile", 3),
        ({"dockerfile": "COPY\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "COPY a.csv\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "COPY a.csv /\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "COPY a.csv /srv\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "COPY a.csv /usr/local/bin\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "COPY a.csv /tests/\n"}, "environment/Dockerfile", 3),
        ({"dockerfile": "WORKDIR /tests\n"}, "environment/Dockerfile", 0),
        ({"environment/Dockerfile": "FROM python:3.12\nCOPY a.csv ./\n"}, "environment/Dockerfile", 2),
        ({"script": BY_PYTHON.replace("#!/bin/sh", "cd /srv")}, "tests/test.sh", 1),
        ({"script": BY_PYTHON.replace("outputs", "other")}, "tests/test.sh", 2),
        ({"tests/pytest.ini": "[pytest]\n"}, "tests/pytest.ini", 0),
        ({"task.toml": "verifier = 1\n"}, "task.toml", 0),
        ({"task.toml": "[verifier]\ntimeout_sec = 'abc'\n"}, "task.toml", 0),
        ({"task.toml": "[verifier]\ntimeout_sec = nan\n"}, "task.toml", 0),
    ],
)  # fmt: skip
def test_task_that_needs_more_than_the_sandbox_is_refused_with_its_line(
    make: Make, changes: dict[str, str], file: str, line: int
) -> None:
    refused = make("refused", **{"environment/a.csv": "1,2", **changes})
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


TERMINAL_BENCH = """FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && \\
    apt-get install -y python3-pip && \\
    ln -s /usr/bin/python3 /usr/bin/python && \\
    rm -rf /var/lib/apt/lists/*
RUN pip3 install --no-cache-dir --break-system-packages pytest==8.4.1 PACKAGES
COPY a.csv ./
ENV TEST_DIR=/tests
"""


def test_dockerfile_of_terminal_bench_is_read_with_its_packages(make: Make) -> None:
    text = TERMINAL_BENCH.replace("PACKAGES", "pandas==2.3.2 'ruamel.yaml[jinja2]>=0.18,<1' scikit-learn")
    task = HarborTask.read(make(**{"environment/Dockerfile": text, "environment/a.csv": "1,2"}))
    assert task.packages == ["pandas", "ruamel.yaml", "scikit-learn"]
    assert (task.workdir, list(task.files)) == ("/app", ["/app/a.csv"])


async def test_packages_that_the_image_lacks_are_an_error_before_the_first_reply(make: Make) -> None:
    task = make(dockerfile="RUN pip install numpy==1.0\n")
    assert await played(task, HELLO) == (["(no output)"], 1.0)
    with raises(EpisodeError, "harbor_tests", task="lacks"):
        await Harbor().begin(item_of(make("lacks", dockerfile="RUN pip install numpy not-there\n")))


@pytest.mark.parametrize("target", [".", "/app", "/app/", "/app/a.csv", "a.csv", "../app"])
def test_file_is_copied_into_a_folder_that_the_container_has(make: Make, target: str) -> None:
    task = HarborTask.read(make(dockerfile=f"COPY a.csv {target}\n", **{"environment/a.csv": "1,2"}))
    assert list(task.files) == ["/app/a.csv"]


def without_pytest(folder: Path, tests: str, kind: str = "pytest") -> dict[str, Any]:
    """Returns the answer for a test file, of a Python that has no pytest."""
    given: dict[str, Any] = {"folders": ["/app", "/tests"], "files": {}, "workdir": "/app"}
    given["tests"] = [kind, "/tests/test_it.py"]
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_it.py").write_text(tests)
    source = files("gristmill_env.adapters").joinpath("harbor_program.py").read_text("utf-8")
    start = "import sys\nsys.path.insert(0, '')\n"  # As the sandbox does.
    program = f"{start}exec({source!r})\nmain(json.loads({json.dumps(given)!r}))"
    command = [sys.executable, "-I", "-S", "-c", program]  # Without site-packages.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.rpartition("\n")[2])
    return answer


@pytest.mark.parametrize(
    ("tests", "passed", "missing"),
    [
        ("def test_a():\n    assert 1\nclass TestB:\n    def test_b(self):\n        assert 1", True, []),
        ("def test_a():\n    assert 1\nclass TestB:\n    def test_b(self):\n        assert 0", False, []),
        ("import not_there\ndef test_a(): pass", False, ["not_there"]),
        ("import pytest", False, ["pytest"]),
        ("x = 1", False, ["pytest"]),
        ("def test_a(tmp_path): pass", False, ["pytest"]),
        ("async def test_a(): assert 0", False, ["pytest"]),
        ("class TestA:\n    async def test_a(self): assert 0", False, ["pytest"]),
        ("def test_a():\n    yield", False, ["pytest"]),
        ("import unittest\nclass Checks(unittest.TestCase):\n    def test_a(self): self.fail()\n"
         "def test_b(): pass", False, ["pytest"]),
        ("class TestA:\n    def setup_method(self): self.a = 1\n    def test_a(self): assert self.a",
         False, ["pytest"]),
        ("class TestA:\n    def setUp(self): self.a = 1\n    def test_a(self): assert self.a", False, ["pytest"]),
        ("def setup_module(): global a; a = 1\ndef test_a(): assert a", False, ["pytest"]),
        ("class TestA:\n    class TestB:\n        def test_b(self): assert 0\n    def test_a(self): pass",
         False, ["pytest"]),
    ],
)  # fmt: skip
def test_functions_of_a_test_file_run_without_pytest_if_they_need_nothing_of_it(
    tmp_path: Path, tests: str, passed: bool, missing: list[str]
) -> None:
    (tmp_path / "app").mkdir()
    answer = without_pytest(tmp_path, tests)
    assert (answer["passed"], answer["missing"]) == (passed, missing)
