"""The command: one clear line and a non-zero exit code for each mistake."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gristmill_env.cli import run_command

from .conftest import FailingServer

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    sums = (
        "dataset: {dataset_path: rows.jsonl, prompt_field: question, answer_field: answer, "
        "reward_functions: [accuracy]}"
    )
    (tmp_path / "sums.yaml").write_text(sums)
    (tmp_path / "odd.yaml").write_text(sums.replace("prompt_field", "promt_field"))
    return tmp_path


def environ(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GRISTMILL_")}
    return kept | {"GRISTMILL_CONFIG_DIR": str(folder), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}


def process(folder: Path, *arguments: str, module: str = "gristmill_env") -> tuple[int, list[str]]:
    """Runs a command as a user does. Returns its exit code and the lines on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=folder, env=environ(folder),
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs a command in this process, because another one imports for two seconds."""
    monkeypatch.chdir(folder)
    root, hangup = logging.getLogger(), signal.getsignal(signal.SIGHUP)
    handlers, level = [*root.handlers], root.level
    root.handlers = []  # The command closes the handlers that it finds.

    def command(*arguments: str) -> tuple[int, list[str]]:
        try:
            code = run_command(arguments, environ(folder))
        finally:
            signal.signal(signal.SIGHUP, hangup)
        return code, capsys.readouterr().err.splitlines()

    yield command
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--config", "sum"], "config_missing", ["'sum'", "sums"]),
        (["--config", "odd"], "unknown_key", ["odd.yaml", "'dataset.promt_field'", "'prompt_field'"]),
        (["--config", "sums", "--group_sise", "4"], "unknown_flag", ["'--group_sise'"]),
        (["--config", "sums", "--reward_functions", "acuracy"], "unknown_reward", ["'acuracy'", "accuracy", "length"]),
        (
            ["--config", "sums", "--prompt_field", "questoin"],
            "field_missing",
            ["'questoin'", "question", "answer"],
        ),
        (["--config", "sums", "--dataset_path", "gone.jsonl"], "dataset_missing", ["'gone.jsonl'"]),
        (
            ["serve", "--config", "sums", "--startup_patience", "0.2", "--base_url", "http://127.0.0.1:1"],
            "model_server_unreachable",
            ["http://127.0.0.1:1"],
        ),
        (["chek"], "unknown_command", ["'chek'", "'check'", "serve, try, "]),
        (["replay"], "invalid_settings", ["'saved'"]),
        (["replay", "gone.jsonl", "--reward_functions", "accuracy"], "saved_groups_unreadable", ["gone.jsonl"]),
        (["sft", "gone.jsonl"], "invalid_settings", ["'out'"]),
        (["sft", "rows.jsonl", "--out", "x.jsonl"], "not_a_saved_group", ["line 1 of rows.jsonl"]),
        (["dpo", "rows.jsonl", "--out", "x.jsonl", "--min_diference", "1"], "unknown_flag", ["'min_difference'"]),
        (["process", "sums", "rows.jsonl"], "unknown_argument", ["'rows.jsonl'"]),
        (["check", "--config", "sums", "--dataset_path", "half.jsonl"], "check_failed", [" 1 "]),
    ],
)
def test_command_with_a_mistake_prints_one_line_and_exits_with_1(
    folder: Path, run: Command, arguments: list[str], code: str, named: list[str]
) -> None:
    (folder / "half.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?"}\n')
    status, lines = run(*arguments)
    errors = [line for line in lines if " ERROR " in line]
    assert status == 1
    assert len(errors) == 1
    assert f"[{code}] " in errors[0]
    assert [part for part in named if part not in errors[0]] == []
    assert not any("Traceback" in line for line in lines)


@pytest.mark.long
def test_process_without_a_network_names_the_data_set(folder: Path) -> None:
    code, lines = process(folder, "--dataset_name", "nobody/nothing", "--reward_functions", "length")
    assert code == 1
    (error,) = [line for line in lines if " ERROR " in line]
    assert "[dataset_unavailable] " in error
    assert "nobody/nothing" in error


def test_process_with_two_mistakes_prints_two_lines(folder: Path) -> None:
    code, lines = process(folder, "--config", "sums", "--group_size", "0", "--max_tokens", "many")
    assert code == 1
    errors = [line for line in lines if " ERROR " in line]
    assert "[invalid_settings] " in errors[0]
    assert ["group_size" in line for line in errors] == [True, False]
    assert "max_tokens" in errors[1]


def test_command_names_the_correction_if_the_server_has_another_model(
    run: Command, failing_server: FailingServer
) -> None:
    code, lines = run("--config", "sums", "--base_url", failing_server.url, "--model_name", "smollm2")
    assert code == 1
    assert "[model_not_served] " in lines[-1]
    assert "MODEL=smollm2" in lines[-1]


@pytest.mark.parametrize("module", ["gristmill_env", "gristmill_env.local_server"])
def test_try_reports_an_unreachable_server_and_needs_no_api(folder: Path, run: Command, module: str) -> None:
    flags = ["--config", "sums", "--base_url", "http://127.0.0.1:1", "--startup_patience", "0.2"]
    code, lines = run("try", *flags) if module == "gristmill_env" else process(folder, *flags, module=module)
    assert code == 1
    assert "[model_server_unreachable] " in lines[-1]
    assert "http://127.0.0.1:1" in lines[-1]


def test_slurm_outside_slurm_reports_the_used_servers(run: Command) -> None:
    _, lines = run("--config", "sums", "--slurm", "--startup_patience", "0.2", "--base_url", "http://127.0.0.1:1")
    assert any("--slurm" in line and "http://127.0.0.1:1" in line for line in lines)


def test_help_lists_the_commands(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill_env", "--help"],
        capture_output=True, text=True, timeout=120, check=True, cwd=folder,
    )  # fmt: skip
    for command in ("serve", "try", "check", "process", "replay", "sft", "dpo"):
        assert f"\n  {command:<10}" in done.stdout


def test_importing_the_cli_loads_no_heavy_packages() -> None:
    heavy = "{'transformers', 'datasets', 'sympy', 'wandb'}"
    script = f"import sys, gristmill_env.cli; print(sorted({heavy} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_check_needs_neither_model_nor_api(run: Command) -> None:
    assert run("check", "--config", "sums", "--base_url", "http://127.0.0.1:1")[0] == 0
