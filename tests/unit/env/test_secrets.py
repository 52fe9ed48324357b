"""A secret in a configuration is in no written output: record, saved groups, evaluation, W&B, log, errors."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.wandb_file import read_wandb
from tests.unit.env.conftest import FailingServer
from tests.unit.env.inference.conftest import CHAT, answers, said

from gristmill_env.commands import EvaluateOptions, ProcessOptions, ReplayOptions
from gristmill_env.commands.evaluate import run_evaluate
from gristmill_env.commands.process import process
from gristmill_env.commands.replay import replay
from gristmill_env.environments import create_environment
from gristmill_env.errors import EpisodeError, InferenceError, RewardError
from gristmill_env.inference import ModelServers
from gristmill_env.rewards import correctness_reward, create_reward
from gristmill_env.run_settings import RunSettings
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.servers import ServerConfig
from gristmill_env.tracking import WandbTracker

pytestmark = pytest.mark.slow

KEY, FILLED, IN_URL = "sk-by-name-5f21", "sk-filled-in-7a03", "sk-in-address-c94e"
SECRETS = (KEY, FILLED, IN_URL)

CODE = f'''
from gristmill_env.environments import Environment, StepResult

class Game(Environment):
    def __init__(self, *, judge: dict, hint: str):
        assert judge["api_key"] == "{KEY}"
        assert hint == "{FILLED}"

    async def reset(self, item):
        return item.messages

    async def step(self, reply):
        return StepResult.end(1.0)


def judged(completion: str, *, api_key: str, note: str) -> float:
    raise RuntimeError(f"401: {{api_key}} and {{note}} are refused")
'''


def launch(folder: Path, *flags: str) -> RunSettings:
    (folder / "code.py").write_text(CODE)
    (folder / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    judged = {"type": "code.py:judged", "weight": 0, "params": {"api_key": KEY, "note": "${NOTE_SECRET}"}}
    run = {
        "group_size": 1,
        "environment": {"type": "code.py:Game", "params": {"judge": {"api_key": KEY}, "hint": "${NOTE_SECRET}"}},
        "dataset": {
            "dataset_path": "rows.jsonl", "prompt_field": "question", "answer_field": "answer",
            "system_prompt": f"Ask http://me:{IN_URL}@judge, or ${{NOTE_SECRET}}.",
            "reward_functions": ["accuracy", judged],
        },
        "server_configs": [{"api_key": KEY}],
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(run))
    environ = {
        "GRISTMILL_MODELS_DIR": "/nowhere", "GRISTMILL_RUNS_DIR": str(folder / "runs"), "NOTE_SECRET": FILLED
    }  # fmt: skip
    return RunSettings.read(["--config", str(folder / "run.yaml"), *flags], environ, "test")


def leaks(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def settings_in(path: Path) -> str:
    """Returns the settings of each saved group. (The prompt itself is sent to the model unchanged.)"""
    return " ".join(json.dumps(json.loads(line)["settings"]) for line in path.read_text().splitlines())


def test_record_holds_no_secret_and_does_not_change_with_one(tmp_path: Path) -> None:
    config = launch(tmp_path).config
    recorded = config.recorded("tiny")
    assert leaks(json.dumps(recorded)) == []
    assert recorded["environment"] == {"type": "code.py:Game", "params": {"judge": {}, "hint": "***"}}
    assert recorded["dataset"]["system_prompt"] == "Ask http://***@judge, or ***."
    assert recorded["dataset"]["reward_functions"][1]["params"] == {"note": "***"}


async def test_saved_groups_pages_evaluations_and_logs_hold_no_secret(
    tmp_path: Path, failing_server: FailingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failing_server.takes_tokens = False
    failing_server.answers[CHAT] = lambda: answers(said("2"))
    asked = launch(tmp_path, "--base_url", failing_server.url)
    shown = (tmp_path / "shown.txt").open("w+")
    console = Console(file=shown, width=200)
    groups = tmp_path / "groups.jsonl"
    await process(asked, ProcessOptions(groups=1, out=groups), console)
    assert leaks(settings_in(groups)) == []
    assert leaks(groups.read_text().replace(f"me:{IN_URL}@judge, or {FILLED}", "")) == [], "the prompt has them"
    again = tmp_path / "again.jsonl"
    await replay(asked, ReplayOptions(saved=groups, out=again), console)
    assert leaks(settings_in(again)) == []
    await run_evaluate(asked, EvaluateOptions(out=tmp_path / "evaluated"), console)
    for path in (tmp_path / "evaluated").iterdir():
        text = path.read_text()
        if path.name == "groups.jsonl":
            completion = json.loads(text)["completions"][0]
            assert "RuntimeError: 401: *** and *** are refused" in completion["errors"]["judged"]
            assert leaks(settings_in(path)) == []
        if path.name in ("groups.jsonl", "report.html"):
            text = text.replace(f"me:{IN_URL}@judge, or {FILLED}", "")  # they have the prompt
        assert leaks(text) == [], path.name
    shown.seek(0)
    assert leaks(shown.read()) == []
    shown.close()


async def test_replay_treats_redacted_options_of_saved_groups_as_unset(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def judged(completion: str, *, api_key: str = 'none') -> float:\n"
                                      "    return float(api_key == 'none')\n")  # fmt: skip
    spec = {"type": f"{tmp_path}/code.py:judged", "weight": 1.0, "params": {"api_key": "***"}}
    group: dict[str, Any] = {
        "format": 1, "run": "r", "prompt": "p", "completions": [{"text": "x", "total": 0.5}],
        "settings": {"dataset": {"reward_functions": [spec]}},
    }  # fmt: skip
    (tmp_path / "groups.jsonl").write_text(json.dumps(group) + "\n")
    out = tmp_path / "out.jsonl"
    asked = RunSettings.read([], {"GRISTMILL_MODELS_DIR": "/nowhere"}, "test")
    await replay(asked, ReplayOptions(saved=tmp_path / "groups.jsonl", out=out), Console(file=None, quiet=True))
    assert json.loads(out.read_text())["completions"][0]["total"] == 1.0


def test_wandb_run_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prog", "--api_key", KEY, f"--hub-token={FILLED}"])
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    recorded = {"judge": {"api_key": KEY}, "url": f"http://me:{IN_URL}@judge"}
    correctness = correctness_reward([create_reward("accuracy")])
    environ = {"NETRC": str(tmp_path / "netrc")}
    tracker = WandbTracker("sums", EnvConfig(), recorded, tmp_path, environ, correctness={None: correctness})
    tracker.close()
    run = read_wandb(tmp_path / "sums")
    assert {name: run.config[name] for name in recorded} == {"judge": {"api_key": "***"}, "url": "http://***@judge"}
    for path in (tmp_path / "sums").rglob("*"):
        if path.is_file():
            assert leaks(path.read_bytes().decode(errors="replace")) == [], path.name
    assert sys.argv[2] == KEY


async def test_password_in_a_servers_address_is_used_and_not_shown(
    failing_server: FailingServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = failing_server.url.replace("http://", f"http://me:{IN_URL}@")
    failing_server.answers["/inference/v1/generate"] = lambda: (400, {"error": "no"})
    async with ModelServers([ServerConfig(base_url=address)], patience=0.2) as servers:
        await servers.connect(patience=5)
        assert leaks(servers.description) == []
    nobody = ServerConfig(base_url=f"http://me:{IN_URL}@127.0.0.1:1")
    async with ModelServers([nobody], patience=0.2) as servers:
        with pytest.raises(InferenceError) as error:
            await servers.connect(patience=0.2)
    assert "127.0.0.1:1" in str(error.value)
    assert leaks(repr((error.value, error.value.values)) + caplog.text) == []


def test_errors_about_options_hold_no_secret() -> None:
    with pytest.raises(RewardError) as error:
        create_reward({"type": "cosine_scaled", "params": {"api_key": [KEY], "base_url": "http://h"}})
    assert "api_key" in str(error.value)
    assert leaks(repr((error.value, error.value.values))) == []
    with pytest.raises(EpisodeError) as episode:
        create_environment("guess", {"tries": f"http://me:{IN_URL}@judge"})
    assert leaks(repr((episode.value, episode.value.values))) == []
