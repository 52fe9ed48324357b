"""`docker compose up` trains, and a control that cannot learn does not improve."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from tests.support.compose import ComposeStack
from tests.support.gsm8k_stack import gsm8k_stack, train_gsm8k
from tests.support.held_out import exact_match

from gristmill import SyncClient, read_rollouts
from gristmill.archive.run_file import read_run_file
from gristmill.internal.lines import read_jsonl

GROUPS = 16
"""Groups per step of configs/quickstart.yaml."""
OVERRIDE = Path(__file__).with_name("learning_rate_zero.yaml")


def healthy(stack: ComposeStack, service: str) -> bool:
    """Returns whether Docker has found the container healthy. A run that has ended by then was healthy."""
    state = stack.inspect(service)["State"]
    return bool(state["Status"] == "exited" or state["Health"]["Status"] == "healthy")


@dataclass(frozen=True)
class Trained:
    """The stack after the end of the quickstart, with its servers still running."""

    stack: ComposeStack
    before: float
    """Greedy exact match on the held-out questions at version 0."""
    metrics: list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("quickstart")
    with ComposeStack(folder, "gristmill-quickstart", {}) as stack:
        # Nothing has trained up to here, because the environment opens the run. So this is the untrained model.
        stack.compose("up", "--detach", "--wait", "redis", "api", "model")
        before = exact_match(stack.model_url)
        stack.compose("up", "--detach")
        for service in ("trainer", "env"):
            stack.wait_until(functools.partial(healthy, stack, service), 300, f"{service} healthy")
        stack.wait_for_end(timeout=900)
        yield Trained(stack, before, stack.metrics("quickstart", folder))


def test_quickstart_reward_rises(trained: Trained) -> None:
    rewards = [row["reward_mean"] for row in trained.metrics]
    assert len(rewards) >= 20
    assert fmean(rewards[:5]) <= 0.45, rewards
    assert fmean(rewards[-5:]) >= 0.80, rewards


def test_the_served_model_answers_held_out_questions(trained: Trained) -> None:
    assert trained.before <= 0.35
    assert exact_match(trained.stack.model_url) >= 0.80


def test_trainer_and_server_agree_at_every_step(trained: Trained) -> None:
    for row in trained.metrics:
        assert row["staleness_mean"] == 0, row
        assert row["rollout_logprob_diff_mean"] <= 0.001, row
        assert row["rollout_logprob_diff_max"] <= 0.01, row


def test_server_reports_the_last_published_version(trained: Trained) -> None:
    info = httpx.get(f"{trained.stack.model_url}/weight_info").json()
    assert info["weight_version"] == trained.metrics[-1]["policy_version"]
    assert [row["step"] for row in trained.metrics] == list(range(1, len(trained.metrics) + 1))


def test_logs_show_submits_completions_and_scores(trained: Trained) -> None:
    env, api = trained.stack.logs("env"), trained.stack.logs("api")
    assert "submit run=quickstart group=g00000000 env=" in api
    assert "completion prompt=g00000000" in env
    assert "tokens=" in env
    assert "score prompt=g00000000" in env
    assert "total=" in env


def test_files_of_all_services_are_copied_out_into_one_run_folder(trained: Trained, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    written = "report run=quickstart file="
    trained.stack.wait_until(lambda: written in trained.stack.logs("api"), 120, "the report of the run")
    for service in ("trainer", "api", "env"):
        trained.stack.copy(f"{service}:/runs/.", runs)
    run = runs / "quickstart"
    files = {"metrics.jsonl", "checkpoints", "model", "trained", "rollouts", "evaluations", "run.json", "report.html"}
    files |= {"digests.jsonl", "probes.json", "receipts.jsonl"}
    assert {path.name for path in run.iterdir()} - {"drops.jsonl"} == files
    assert read_run_file(run / "run.json").state == "finished"
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [row["step"] for row in trained.metrics]
    assert sum(1 for _ in read_rollouts(run)) == GROUPS * len(trained.metrics)


@pytest.mark.long
def test_model_service_takes_the_final_model_of_a_run(trained: Trained) -> None:
    output = trained.stack.compose("run", "--rm", "-T", "--no-deps", "model", "build", "/runs/quickstart/model")
    assert "resolved model=/runs/quickstart/model" in output


def test_restarted_finished_run_reports_that_it_is_finished(trained: Trained) -> None:
    said = trained.stack.compose("run", "--rm", "--no-deps", "env", "--config", "quickstart")
    assert "finished" in said
    assert "RUN_ID" in said


def test_close_ends_the_run_and_frees_the_stack(trained: Trained) -> None:
    close = ("run", "--rm", "-T", "--no-deps", "env", "close")
    with SyncClient(trained.stack.api_url, patience=10) as api:
        api.create_run("abandoned", {}, 2)
        trained.stack.compose(*close, "abandoned")
        assert api.get_run("abandoned").state == "finished"
        assert api.create_run("next", {}, 2).state == "open"
        api.close_run("next")
    with pytest.raises(AssertionError, match=r"exit 1\n(?s:.*)\[run_missing\](?s:.*)no-such-run"):
        trained.stack.compose(*close, "no-such-run")


def test_one_command_trains_another_configuration_on_the_servers_that_run(trained: Trained, tmp_path: Path) -> None:
    stack = gsm8k_stack(tmp_path, trained.stack.project, trained.stack.ports)
    stack.compose("up", "--detach", "--no-recreate", "redis", "api", "model")
    train_gsm8k(stack, tmp_path)


@pytest.mark.long
def test_control_with_learning_rate_zero_does_not_learn(trained: Trained, tmp_path: Path) -> None:
    """At learning rate 0 the first and the last steps differ only by noise: less than 4 standard errors."""
    control = ComposeStack(tmp_path, trained.stack.project, {**trained.stack.ports, "RUN_ID": "control"}, [OVERRIDE])
    control.compose("up", "--detach", "--no-recreate", "redis", "api", "model")
    control.compose("up", "--detach", "trainer", "env")
    control.wait_for_end(timeout=900)
    metrics = control.metrics("control", tmp_path)
    rewards = [row["reward_mean"] for row in metrics]
    first, last = rewards[: len(rewards) // 2], rewards[len(rewards) // 2 :]
    error = math.sqrt(_variance(first) / len(first) + _variance(last) / len(last))
    assert abs(fmean(last) - fmean(first)) <= 4 * error, rewards
    assert fmean(last) <= 0.45, rewards


def _variance(values: list[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
