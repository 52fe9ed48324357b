"""The console script `gristmill` on the files of a recorded run, without an API."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from tests.support.ports import free_port
from tests.unit.view.recorded import rows, write_run

import gristmill_view
from gristmill.folders import RunFolder
from gristmill_cli import commands
from gristmill_cli.local.options import read_options
from gristmill_cli.main import main
from gristmill_env.commands import COMMANDS
from gristmill_view import app
from gristmill_view.facts import read_files
from gristmill_view.queries import conditions
from gristmill_view.source import RolloutQuery


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished run; no API answers."""
    for name in ("API_URL", "RUNS_DIR", "API_TOKEN_FILE", "MODEL_URL", "MODELS_DIR"):
        monkeypatch.delenv(f"GRISTMILL_{name}", raising=False)
    monkeypatch.setenv("GRISTMILL_API_URL", f"http://127.0.0.1:{free_port()}")
    (write_run(tmp_path / "runs" / "quickstart", rows()) / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_run_that_cannot_be_read_does_not_hide_the_others(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(runs / "odd", rows())

    def read(run_id: str, roots: Any) -> Any:
        if run_id == "odd":
            raise ValueError("odd files")
        return read_files(run_id, roots)

    monkeypatch.setattr(commands, "read_files", read)
    assert main(["runs", "--json"]) == 0
    output = capsys.readouterr()
    assert {line["run"]: line["state"] for line in json.loads(output.out)} == {
        "quickstart": "finished", "odd": "unreadable"
    }  # fmt: skip
    assert "odd files" in output.err


def test_help_lists_each_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    for name in ("run", "status", "runs", "sql", "pack", "slurm", *commands.ENVIRONMENT, *commands.TRAIN_AGAIN):
        assert sum(re.search(rf"^\s+{name} |gristmill {name}", line) is not None for line in lines) == 1


def test_commands_of_the_environment_are_those_of_its_package() -> None:
    assert {*commands.ENVIRONMENT} == {*COMMANDS} - {"serve", "proxy"}


def test_command_of_the_environment_gets_the_arguments_and_the_api(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def run_command(arguments: list[str], environ: dict[str, str], prog: str, *around: object) -> int:
        found.extend([arguments, environ["GRISTMILL_API_URL"], environ["GRISTMILL_RUNS_DIR"], prog])
        return 7

    monkeypatch.setattr("gristmill_env.cli.run_command", run_command)
    arguments = ["check", "quickstart", "--set", "group_size=4", "--help"]
    assert main(["--api", "http://a:1", "--runs", "r", *arguments]) == 7
    assert found == [arguments, "http://a:1", "r", "gristmill"]


def test_status_of_a_finished_run_is_its_summary(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    output = capsys.readouterr().out
    assert "run quickstart is finished: 8 steps" in output
    assert "0.225 → 0.520" in output


def test_status_reads_the_folder_or_the_pack_of_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--out", "q.gristmill.zip"]) == 0
    for run in ("runs/quickstart", str(runs / "quickstart"), "q.gristmill.zip"):
        capsys.readouterr()
        assert main(["--runs", "elsewhere", "status", run, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["run"], found["step"], found["live"]) == ("quickstart", 8, False)


def test_status_names_an_api_that_does_not_answer(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--api", "http://127.0.0.1:1", "status"]) == 0
    assert "no API answers at http://127.0.0.1:1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api", "http://a:1", "run", "quickstart"],
        ["--runs", "a", "--runs", "b", "run", "quickstart"],
        ["--runs", "a", "model", "status"],
        ["rollouts", "--outcome", "traned"],
    ],
)
def test_flag_without_an_effect_is_refused(runs: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_run_writes_to_the_folder_of_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def start(arguments: list[str]) -> int:
        found.append(read_options(arguments, "gristmill run").runs_dir)
        return 0

    monkeypatch.setattr("gristmill_cli.local.launcher.main", start)
    assert main(["--runs", "mine", "run", "quickstart"]) == 0
    monkeypatch.setenv("GRISTMILL_RUNS_DIR", "theirs")
    assert main(["run", "quickstart"]) == 0
    assert main(["run", "quickstart", "--runs_dir", "named"]) == 0
    assert found == ["mine", "theirs", "named"]


def test_flags_of_run_are_checked_with_the_ports_of_the_env_file(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_PORT", "COMPOSE_DISABLE_ENV_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and the end of the test removes what read_dotenv sets
    Path(".env").write_text("MODEL_PORT=29020\n")
    start = Mock(return_value=0)
    monkeypatch.setattr("gristmill_cli.local.launcher.main", start)
    assert main(["run", "quickstart", "--api_port", "9001"]) == 0
    start.assert_called_once_with(["quickstart", "--api_port", "9001"])


def test_status_as_json_has_the_keys_of_the_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "quickstart", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"], found["step"], found["live"]) == ("quickstart", "finished", 8, False)


def test_watch_of_a_finished_run_ends_with_its_summary(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("quickstart  step 8/60  reward 0.520")
    assert "is finished" in output


def test_watch_of_a_finished_run_as_json_ends_after_one_object(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_cli.status.time.sleep", Mock(side_effect=AssertionError))
    assert main(["status", "--watch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_runs_lists_folders(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run == {"run": "quickstart", "state": "finished", "step": 8, "steps": 60, "reward": 0.5203, "live": False}
    assert main(["runs"]) == 0
    assert "quickstart\tfinished\t8/60\t0.5203\tFalse" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status", "other"], "run_folder_missing"),
        (["--runs", "elsewhere", "status"], "no_run"),
        (["--runs", "elsewhere", "sql", "SELECT 1"], "no_run"),
        (["tail"], "api_unreachable"),
        (["tail", "runs/quickstart"], "invalid_flag"),
        *(
            ([*command, ""], "run_folder_missing")
            for command in (["status"], ["rollouts"], ["sql", "SELECT 1", "--run"])
        ),
        (["rollouts", "--step", "60-50"], "invalid_flag"),
        *((["--api", url, "status"], "api_url_invalid") for url in ("foo", "http://", "localhost:1", "http://a:99999")),
    ],
)
def test_error_is_one_line_with_its_code(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str
) -> None:
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error [{code}]: ")


class Table:
    """An answer of `rollouts.sql`."""

    asked: tuple[Any, str] = (None, "")

    def to_pylist(self) -> list[dict[str, Any]]:
        parts, lists = [("accuracy", 1.0)], [([1], "a")]
        row = {"step": 1, "completion": "a\tb\x1b", "reward": 0.123456, "advantage": float("nan")}
        return [{**row, "parts": parts, "lists": lists}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunFolder, str]]:
    """The queries that were asked, instead of the tables of rollouts."""
    found: list[tuple[RunFolder, str]] = []

    def sql(run: RunFolder, query: str) -> Table:
        found.append((run, query))
        return Table()

    monkeypatch.setattr(gristmill_view, "sql", sql)
    return found


def test_sql_prints_columns_with_tabs_for_other_programs(
    runs: Path, asked: list[tuple[RunFolder, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sql", "SELECT 1", "--run", "runs/quickstart"]) == 0
    assert asked == [(RunFolder("quickstart", (runs,)), "SELECT 1")]
    assert capsys.readouterr().out == (
        "step\tcompletion\treward\tadvantage\tparts\tlists\n"
        "1\ta\\tb\\x1b\t0.1235\tnan\t{'accuracy': 1.0}\t[([1], 'a')]\n"
    )
    assert main(["sql", "SELECT 1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["advantage"], row["parts"], row["lists"]) == (None, {"accuracy": 1.0}, [[[1], "a"]])


def test_folder_or_file_that_is_not_a_run_does_not_hide_the_run_of_its_name(
    runs: Path, asked: list[tuple[RunFolder, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(runs / "gsm8k", rows())
    for make in (Path.mkdir, Path.rmdir, Path.touch):
        make(Path("gsm8k"))
        assert main(["rollouts", "gsm8k"]) == 0
        assert main(["status", "gsm8k", "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 8
    assert {run.folders[0] for run, _ in asked} == {runs / "gsm8k"}
    assert main(["rollouts", str(runs.parent)]) == 1
    assert "error [run_folder_missing]: " in capsys.readouterr().err


def test_folder_of_a_run_in_the_working_directory_is_the_run_of_its_name(
    runs: Path, asked: list[tuple[RunFolder, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Path("here"), rows())
    assert main(["rollouts", "here"]) == main(["status", "here", "--json"]) == 0
    assert asked[0][0].folders == [runs.parent / "here"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["run"] == "here"


def test_rollouts_asks_for_what_the_filters_select(runs: Path, asked: list[tuple[RunFolder, str]]) -> None:
    filters = ["--step", "3-5", "--reward-max", "0.5", "--text", "it's", "--part", "accuracy=0", "--order", "reward"]
    assert main(["rollouts", "quickstart", *filters, "--limit", "7"]) == 0
    ((_, query),) = asked
    page = conditions(RolloutQuery(step_from=3, step_to=5, reward_max=0.5, text="it's"))
    part = conditions(RolloutQuery(part="accuracy", part_min=0.0, part_max=0.0))
    assert query.endswith(f"WHERE {page} AND {part} ORDER BY reward DESC NULLS LAST, group_id, sequence LIMIT 8")
    assert main(["rollouts", "--order", "reward", "--ascending"]) == 0
    assert "WHERE true ORDER BY reward ASC " in asked[1][1]


def test_rollouts_says_that_it_left_out_rows(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_query", lambda folder, query: [{"step": 1}, {"step": 2}])
    for limit, count, said in (("1", 1, True), ("2", 2, False)):
        assert main(["rollouts", "quickstart", "--json", "--limit", limit]) == 0
        shown = capsys.readouterr()
        assert (len(shown.out.splitlines()), "--limit" in shown.err) == (count, said)


class Source:
    """The source of the page."""

    def __init__(self, roots: Any) -> None:
        self.roots = [Path(root) for root in roots]
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of `view` and `report`, instead of the page and its server."""
    calls: list[Any] = []

    async def write_report(source: Source, run: str, path: Path) -> None:
        if not path.parent.exists():
            raise FileNotFoundError(2, "No such file or directory")
        calls.append((source, run, path))

    class Server:
        def __init__(self, source: Source) -> None:
            self.source = source

        def run(self, sockets: list[socket.socket]) -> None:
            calls.append((self.source, sockets[0].getsockname()))
            raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn, "Config", lambda source, **settings: source)
    monkeypatch.setattr(uvicorn, "Server", Server)
    monkeypatch.setattr(app, "create_app", lambda source: source)
    monkeypatch.setattr(commands, "RunSource", Source)
    monkeypatch.setattr("gristmill_cli.page.RunSource", Source)
    monkeypatch.setattr(commands, "write_report", write_report)
    return calls


@pytest.mark.parametrize(
    ("arguments", "path"),
    [([], "/view"), (["quickstart"], "/view/quickstart"), (["runs/quickstart"], "/view/quickstart")],
)
def test_view_serves_the_folders_of_the_runs(
    runs: Path, page: list[Any], capsys: pytest.CaptureFixture[str], arguments: list[str], path: str
) -> None:
    port = free_port()
    assert main(["view", *arguments, "--port", str(port)]) == 0
    ((source, address),) = page
    assert [root.resolve() for root in source.roots] == [runs]
    assert (address, source.closed) == (("127.0.0.1", port), True)
    assert f"http://127.0.0.1:{port}{path} " in capsys.readouterr().out


@pytest.mark.parametrize("other", ["quickstart", "other"])
def test_view_refuses_runs_whose_files_it_would_mix(
    runs: Path, page: list[Any], capsys: pytest.CaptureFixture[str], other: str
) -> None:
    for name in ("quickstart", "other"):
        write_run(runs.parent / "copies" / name, rows(1))
    assert main(["view", f"copies/{other}", "runs/quickstart", "--port", str(free_port())]) == 1
    assert capsys.readouterr().err.startswith("error [run_ambiguous]: ")
    assert not page
    assert main(["view", "quickstart", "runs/quickstart", "--port", str(free_port())]) == 0


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", 0), ("localhost", 0), ("0.0.0.0", 1), ("", 1), ("::", 1)])
def test_view_warns_if_other_machines_can_read_the_page(
    runs: Path, page: list[Any], capsys: pytest.CaptureFixture[str], host: str, warns: int
) -> None:
    assert main(["view", "--host", host, "--port", str(free_port())]) == 0
    assert capsys.readouterr().out.count("OPEN TO THE NETWORK") == warns


@pytest.mark.parametrize("port", ["taken", "70000"])
def test_view_on_an_address_that_cannot_be_used_names_it(
    runs: Path, page: list[Any], capsys: pytest.CaptureFixture[str], port: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1]) if port == "taken" else port
        assert main(["view", "--port", port]) == 1
    assert f"error [address_unusable]: cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err
    assert not page


def test_report_is_written_into_the_folder_of_the_run(
    runs: Path, page: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report"]) == 0
    ((source, run, path),) = page
    assert ([root.resolve() for root in source.roots], source.closed, run) == ([runs], True, "quickstart")
    assert path.resolve() == runs / "quickstart" / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert main(["report", "quickstart", "--out", "nowhere/r.html"]) == 1
    assert "error [report_not_written]: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["rollouts", "--order", "1; DROP"], ["rollouts", "--limit", "x"], ["look"]])
def test_wrong_command_line_has_exit_code_2(runs: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "package"), [(["sql", "SELECT 1"], "duckdb"), (["rollouts"], "duckdb"), (["view"], "uvicorn")]
)
def test_missing_package_of_the_extra_is_named(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "gristmill_view.rollouts", raising=False)
    monkeypatch.delattr(gristmill_view, "rollouts", raising=False)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error [extra_missing]: ")
    assert package in error


@pytest.mark.slow
def test_python_m_gristmill_cli_is_the_same_program(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill_cli", "status"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "run quickstart is finished" in done.stdout


@pytest.mark.slow
def test_ctrl_c_while_the_packages_load_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-m", "gristmill_cli", "--help"], env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "loading\n"
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate()
    assert (program.returncode, errors) == (-signal.SIGINT, "")
