"""A run that is deleted or suspended while it has a trainer.

A run that was deleted and created again is another run: its trainer settles nothing by checkpoints of the first run. A
run that was suspended is the same run when it is resumed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.groups import make_group
from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_api, start_redis

from gristmill import RunState, SyncClient
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack

STEPS, GROUPS = 4, 2
RUN = "again"
FLAGS = ["--training_steps", str(STEPS), "--batch_size", str(2 * GROUPS), "--publisher", "none"]


def _submit_steps(api: SyncClient, steps: int) -> None:
    sent = 0
    while sent < steps * GROUPS:
        grant = api.permits(RUN, "test", GROUPS, 60.0)
        for permit in grant.permits:
            assert grant.version is not None
            api.submit(make_group(permit.group_id, RUN, version=grant.version, seed=permit.row, env_id="test"), "test")
            sent += 1


@pytest.mark.long
def test_checkpoints_of_a_deleted_run_are_refused_unless_named_for_their_weights(vllm: Vllm, tmp_path: Path) -> None:
    output = Output()
    folder = tmp_path / "runs" / RUN
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        places = vllm.environ(api_url, tmp_path / "runs")
        command = [sys.executable, "-m", "gristmill_trainer", *FLAGS, "--checkpoint_interval", "1"]
        with SyncClient(api_url) as api:
            env = {"trainer": {}, "dataset": {"max_tokens": 64}}
            first = api.create_run(RUN, env, group_size=2)
            trainer = stack.start("first", command, places)
            _submit_steps(api, 2)
            stack.wait_until(trainer, lambda: len(api.audit(RUN).trained) == 2 * GROUPS, timeout=120)
            trainer.process.kill()
            trainer.process.wait()
            api.close_run(RUN)
            api.delete_run(RUN)
            second = api.create_run(RUN, env, group_size=2)
            assert second.creation != first.creation

            refused = stack.start("refused", command, places)
            stack.wait_until(refused, lambda: refused.exit_code is not None, timeout=120)
            assert refused.exit_code == 1
            named = str(folder / "checkpoints" / "step-000002")
            assert "[checkpoint_of_earlier_run]" in output.of("refused")
            assert f"--resume {named}" in output.of("refused"), "it says what to do"
            assert api.get_run(RUN).incarnation == second.incarnation, "it never took the run"

            resumed = stack.start("resumed", [*command, "--resume", named], places)
            _submit_steps(api, STEPS)
            stack.wait_until(resumed, lambda: resumed.exit_code is not None, timeout=120)
            assert resumed.exit_code == 0
            audit = api.audit(RUN)
    assert len(audit.trained) == STEPS * GROUPS, "every group of the new run was leased and trained"
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_trainer_of_a_suspended_run_ends_and_the_next_one_continues(vllm: Vllm, tmp_path: Path) -> None:
    output = Output()
    folder = tmp_path / "runs" / RUN
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        places = vllm.environ(api_url, tmp_path / "runs")
        # No checkpoint is due before the run is suspended.
        command = [sys.executable, "-m", "gristmill_trainer", *FLAGS, "--checkpoint_interval", str(STEPS)]
        with SyncClient(api_url) as api:
            env = {"trainer": {}, "dataset": {"max_tokens": 64}}
            api.create_run(RUN, env, group_size=2)
            trainer = stack.start("first", command, places)
            _submit_steps(api, 2)
            stack.wait_until(trainer, lambda: (api.get_run(RUN).version or "").endswith(".2"), timeout=120)
            api.create_run("other", env, group_size=2)
            stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=120)
            assert trainer.exit_code == 1, "a restart policy starts it again, for the other run"
            assert "[suspended]" in output.of("first")
            assert api.audit(RUN).trained == []
            assert (folder / "checkpoints" / "step-000002").is_dir(), "the finished steps are kept"

            api.create_run(RUN, env, group_size=2)
            assert api.get_run("other").state == RunState.SUSPENDED
            resumed = stack.start("resumed", command, places)
            _submit_steps(api, STEPS - 2)
            stack.wait_until(resumed, lambda: resumed.exit_code is not None, timeout=120)
            assert resumed.exit_code == 0
            audit = api.audit(RUN)
    assert len(audit.trained) == STEPS * GROUPS
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
