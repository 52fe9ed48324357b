"""The command as a process: one clear line and a non-zero exit code for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import FailingServer

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    sums = (
        "dataset: {dataset_path: rows.jsonl, prompt_field: question, answer_field: answer, "
        "reward_functions: [accuracy]}"
    )
    (tmp_path / "sums.yaml").write_text(sums)
    (tmp_path / "odd.yaml").write_text(sums.replace("prompt_field", "promt_field"))
    return tmp_path


def run(folder: Path, *arguments: str, module: str = "gristmill_env") -> tuple[int, list[str]]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GRISTMILL_")}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=folder,
        env=kept | {"GRISTMILL_CONFIG_DIR": str(folder), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)},
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--config", "sum"], "config_missing", ["'sum'", "sums"]),
        pytest.param(
            ["--config", "odd"],
            "unknown_key",
            ["odd.yaml", "'dataset.promt_field'", "'prompt_field'"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--config", "sums", "--group_sise", "4"], "unknown_flag", ["'--group_sise'"], marks=pytest.mark.long
        ),
        (["--config", "sums", "--reward_functions", "acuracy"], "unknown_reward", ["'acuracy'", "accuracy", "length"]),
        pytest.param(
            ["--config", "sums", "--prompt_field", "questoin"],
            "field_missing",
            ["'questoin'", "question", "answer"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--config", "sums", "--dataset_path", "gone.jsonl"],
            "dataset_missing",
            ["'gone.jsonl'"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--dataset_name", "nobody/nothing", "--reward_functions", "length"],
            "dataset_unavailable",
            ["nobody/nothing"],
            marks=pytest.mark.long,
        ),
        (
            ["serve", "--config", "sums", "--startup_patience", "0.2", "--base_url", "http://127.0.0.1:1"],
            "model_server_unreachable",
            ["http://127.0.0.1:1"],
        ),
    ],
)
def test_command_with_a_mistake_prints_one_line_and_exits_with_1(
    folder: Path, arguments: list[str], code: str, named: list[str]
) -> None:
    status, lines = run(folder, *arguments)
    errors = [line for line in lines if " ERROR " in line]
    assert status == 1
    assert len(errors) == 1
    assert f"[{code}] " in errors[0]
    assert [part for part in named if part not in errors[0]] == []
    assert not any("Traceback" in line for line in lines)


def test_command_with_two_mistakes_prints_two_lines(folder: Path) -> None:
    code, lines = run(folder, "--config", "sums", "--group_size", "0", "--max_tokens", "many")
    assert code == 1
    errors = [line for line in lines if " ERROR " in line]
    assert "[invalid_settings] " in errors[0]
    assert ["group_size" in line for line in errors] == [True, False]
    assert "max_tokens" in errors[1]


def test_command_names_the_correction_if_the_server_has_another_model(
    folder: Path, failing_server: FailingServer
) -> None:
    code, lines = run(folder, "--config", "sums", "--base_url", failing_server.url, "--model_name", "smollm2")
    assert code == 1
    assert "[model_not_served] " in lines[-1]
    assert "MODEL=smollm2" in lines[-1]


@pytest.mark.parametrize("module", ["gristmill_env", "gristmill_env.local_server"])
def test_try_reports_an_unreachable_server_and_needs_no_api(folder: Path, module: str) -> None:
    command = ["try"] if module == "gristmill_env" else []
    code, lines = run(folder, *command, "--config", "sums", "--base_url", "http://127.0.0.1:1",
                      "--startup_patience", "0.2", module=module)  # fmt: skip
    assert code == 1
    assert "[model_server_unreachable] " in lines[-1]
    assert "http://127.0.0.1:1" in lines[-1]


def test_slurm_outside_slurm_reports_the_used_servers(folder: Path) -> None:
    _, lines = run(
        folder, "--config", "sums", "--slurm", "--startup_patience", "0.2", "--base_url", "http://127.0.0.1:1"
    )
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


@pytest.mark.parametrize(
    ("arguments", "code", "quoted"),
    [
        (["chek"], "unknown_command", ["'chek'", "'check'", "serve, try, "]),
        (["replay"], "invalid_settings", ["'saved'"]),
        (["replay", "gone.jsonl", "--reward_functions", "accuracy"], "saved_groups_unreadable", ["gone.jsonl"]),
        (["sft", "gone.jsonl"], "invalid_settings", ["'out'"]),
        (["sft", "rows.jsonl", "--out", "x.jsonl"], "not_a_saved_group", ["line 1 of rows.jsonl"]),
        (["dpo", "rows.jsonl", "--out", "x.jsonl", "--min_diference", "1"], "unknown_flag", ["'min_difference'"]),
        (["process", "rows.jsonl"], "unknown_argument", ["'rows.jsonl'"]),
        (["check", "--config", "sums", "--dataset_path", "half.jsonl"], "check_failed", [" 1 "]),
    ],
)
def test_mistake_in_a_command_is_one_line_and_exit_1(
    folder: Path, arguments: list[str], code: str, quoted: list[str]
) -> None:
    (folder / "half.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?"}\n')
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text() + "\n")
    status, lines = run(folder, *arguments)
    errors = [line for line in lines if " ERROR " in line]
    assert status == 1
    assert len(errors) == 1
    assert f"[{code}] " in errors[0]
    assert [part for part in quoted if part not in errors[0]] == []
    assert not any("Traceback" in line for line in lines)


def test_check_needs_neither_model_nor_api(folder: Path) -> None:
    assert run(folder, "check", "--config", "sums", "--base_url", "http://127.0.0.1:1")[0] == 0
