"""Each service is killed during the run, by an external signal and by Compose. No group is lost or trained twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.compose import ComposeStack

from gristmill import ApiError, PolicyVersion, SyncClient

SERVICES = ("env", "trainer", "api", "redis", "model")
RUN = "kills"


def _kill(stack: ComposeStack, service: str, way: str) -> None:
    if way == "sigkill":
        os.kill(stack.pid(service), signal.SIGKILL)  # The restart policy brings it back.
    else:
        stack.compose("kill", service)
        stack.up()


def _version(stack: ComposeStack) -> PolicyVersion:
    """Returns the run's policy version, or 0.0 before the run exists. Waits while the API does not answer."""
    with SyncClient(stack.api_url) as api:
        try:
            return PolicyVersion.parse(api.get_run(RUN).version or "0.0")
        except ApiError as error:
            if error.code != "run_missing":
                raise
            return PolicyVersion(0, 0)


@pytest.mark.long
@pytest.mark.parametrize("way", ["sigkill", "compose-kill"])
def test_the_run_survives_a_kill_of_each_service(way: str, tmp_path: Path) -> None:
    override = tmp_path / "longer.yaml"
    override.write_text('services: {trainer: {command: ["--training_steps", "60", "--checkpoint_interval", "4"]}}\n')
    with ComposeStack(tmp_path, f"gristmill-{way}", {"RUN_ID": RUN}, [override]) as stack:
        stack.up("redis", "api", "model", wait=True)
        stack.up()
        seen = [PolicyVersion(0, 0)]
        for service in SERVICES:
            reached = seen[-1]
            stack.wait_until(
                lambda reached=reached: _version(stack).step >= min(reached.step + 3, 57),  # type: ignore[misc]
                timeout=300,
                what=f"progress before the kill of {service}",
            )
            seen.append(_version(stack))
            _kill(stack, service, way)
        stack.wait_for_end(timeout=600)
        seen.append(_version(stack))
        assert seen == sorted(seen), f"versions went backwards: {seen}"
        assert seen[-1].step == 60

        with SyncClient(stack.api_url) as api:
            audit, status = api.audit(RUN), api.status(RUN)
        places = Counter([*audit.trained, *audit.ready, *audit.leased, *audit.dead, *audit.dropped])
        twice = {group: count for group, count in places.items() if count > 1}
        assert not twice
        assert audit.dead == []
        record_groups = 60 * 16
        assert len(audit.trained) == record_groups
        assert audit.ready == audit.leased == []
        # Every row that was ever handed out reached a final state.
        assert len(places) + len(audit.outstanding) == status.rows_issued

        metrics = stack.metrics(RUN, tmp_path)
        assert [row["step"] for row in metrics] == list(range(1, 61))
        assert max(row["rollout_logprob_diff_max"] for row in metrics) <= 0.01


def test_environment_of_compose_run_is_not_started_again_after_a_kill(tmp_path: Path) -> None:
    """docs/operations.md says so, and names `docker compose up` for runs that must survive a kill."""
    with ComposeStack(tmp_path, "gristmill-run-env", {}) as stack, environment_of_compose_run(stack) as name:
        _docker("kill", "--signal", "KILL", name)
        assert _docker("wait", name).strip() == "137"
        shown = json.loads(_docker("inspect", name))[0]
        assert (shown["State"]["Status"], shown["RestartCount"]) == ("exited", 0)
        assert shown["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_environment_of_compose_run_stops_in_order_when_its_terminal_closes(tmp_path: Path) -> None:
    with ComposeStack(tmp_path, "gristmill-run-env", {}) as stack, environment_of_compose_run(stack) as name:
        _docker("kill", "--signal", "HUP", name)
        assert _docker("wait", name).strip() == "143"


@contextlib.contextmanager
def environment_of_compose_run(stack: ComposeStack) -> Iterator[str]:
    """Starts `docker compose run env` without the other services, which the environment waits for. Yields its name."""
    name = f"{stack.project}-env"
    stack.compose("run", "--detach", "--no-deps", "--name", name, "env", "--config", "quickstart")
    try:
        stack.wait_until(lambda: "env " in _docker("logs", name), 120, "the environment's first line")
        yield name
    finally:
        _docker("rm", "--force", name)


def _docker(*arguments: str) -> str:
    """Returns the output, in which the errors come last."""
    done = subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr
