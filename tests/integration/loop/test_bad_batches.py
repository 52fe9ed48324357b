"""The real trainer gets batches that cannot be trained on: each is counted, and the run continues to its end."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.groups import make_group
from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_api, start_redis

from gristmill import SyncClient, TrajectoryGroup
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack
from gristmill_trainer.quarantine import read_quarantine

STEPS = 4
GROUPS = 2


def _as_it_is(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


def _unknown_token(group: TrajectoryGroup) -> TrajectoryGroup:
    tokens = group.tokens.copy()
    tokens[0] = 10**6
    return dataclasses.replace(group, tokens=tokens)


def _all_unknown(group: TrajectoryGroup) -> TrajectoryGroup:
    return dataclasses.replace(group, tokens=group.tokens + 10**6)


def _without_end(group: TrajectoryGroup) -> TrajectoryGroup:
    """Finite, as the checks require, and beyond float32 after multiplication."""
    return dataclasses.replace(group, advantages=np.full(len(group.tokens), 3e38, np.float32))


WHAT: list[Callable[[TrajectoryGroup], TrajectoryGroup]] = [_unknown_token, _without_end, _all_unknown, _as_it_is]


@pytest.mark.long
def test_bad_batches_are_counted_and_kept(vllm: Vllm, tmp_path: Path) -> None:
    output = Output()
    run_dir = tmp_path / "runs" / "bad"
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        with SyncClient(api_url) as api:
            api.create_run("bad", {"trainer": {}, "dataset": {"max_tokens": 64}}, group_size=2)
            places = vllm.environ(api_url, tmp_path / "runs")
            flags = ["--training_steps", str(STEPS), "--batch_size", str(2 * GROUPS), "--publisher", "none"]
            command = [sys.executable, "-m", "gristmill_trainer", *flags, "--learning_rate", "1e-4"]
            trainer = stack.start("trainer", command, places)
            for spoil in WHAT:
                sent = 0
                while sent < GROUPS:
                    grant = api.permits("bad", "test", GROUPS - sent, 60.0)
                    for permit in grant.permits:
                        assert grant.version is not None
                        group = make_group(
                            permit.group_id, "bad", version=grant.version, seed=permit.row, env_id="test"
                        )
                        api.submit(spoil(group), "test")
                        sent += 1
            stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=120)
            audit = api.audit("bad")

    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["rejected"] == {"outside_vocabulary": GROUPS}
    assert "skipped" not in rows[0]
    assert "the loss is" in rows[1]["skipped"] or "the gradient norm is" in rows[1]["skipped"]
    assert rows[2]["rejected"] == {"outside_vocabulary": 2 * GROUPS}
    assert rows[2]["skipped"] == "nothing is left of its groups to train on"
    assert "skipped" not in rows[3]
    assert np.isfinite(rows[3]["loss"])
    files = sorted((run_dir / "aside").glob("*.groups"))
    assert [file.name for file in files] == ["step-000002.1.groups", "step-000003.1.groups"]
    groups, reason = read_quarantine(files[0])
    assert len(groups) == GROUPS
    assert reason.step == 2
    assert len(audit.trained) == STEPS * GROUPS, "a dropped batch counts as used"
    assert "Traceback" not in output.of("trainer")
