"""Observers that fail do not affect the training, and their errors are counted."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.rollouts import Said, rollout_of, scored_group

from gristmill import ConfigError, Permit, RunRecord, RunState, SamplingParams, TrajectoryGroup
from gristmill_env.data import Item, user
from gristmill_env.errors import DropReason
from gristmill_env.inference import Completion
from gristmill_env.progress import Tally
from gristmill_env.rewards import Score
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.rollouts.prompts import Prompt
from gristmill_env.saved import Attempt, DroppedSaver, GroupSaver, read_groups
from gristmill_env.settings.run import EnvConfig
from gristmill_env.tracking import Observers

pytestmark = pytest.mark.slow

GROUP: TrajectoryGroup = make_group("g00000000", "sums", lengths=[(3, 4)] * 2, rewards=[0.0, 1.0], version="1.0")


class Fails:
    """A tracker that raises at every call."""

    def __getattr__(self, name: str) -> Any:
        def fails(*arguments: object) -> None:
            raise RuntimeError(f"no {name} today")

        return fails


def saver(path: Path) -> Callable[[], GroupSaver]:
    return lambda: GroupSaver(path, run="sums", model="tiny", config=EnvConfig())


def rollout_group() -> RolloutGroup:
    reply = Said(Completion([1], [-0.1], "stop", []), "text")
    rollout = rollout_of(Prompt("?", (100, 101, 102), (user("?"),)), reply)
    item = Item(row=0, index=0, prompt="?", answer=None)
    return RolloutGroup(item, SamplingParams(temperature=1.0, max_tokens=4), [rollout], [Score(1.0, {})], seconds=1.0)


def test_every_call_of_a_tracker_that_raises_is_counted_and_the_first_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker: Any = Fails
    observers = Observers(tracker)

    async def train() -> None:
        for _ in range(2):
            observers.scored(scored_group([]), 0)
        await observers.submitted(GROUP, ["?"], Tally(), rollout_group())
        observers.evaluation({"pass@1": 1.0}, 0)

    asyncio.run(train())
    assert observers.errors.counts == {"W&B": 4}
    observers.close()
    assert observers.errors.counts == {"W&B": 5}
    assert "RuntimeError: no scored today" in caplog.text


def test_a_full_disk_is_counted_and_the_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    observers = Observers(saver=saver(Path("/dev/full")))
    for _ in range(3):
        asyncio.run(observers.submitted(GROUP, ["?"], Tally(), rollout_group()))
    assert observers.errors.counts == {"saved groups": 3}
    assert "No space left on device" in caplog.text
    observers.close()


def test_group_that_the_api_has_is_saved_although_its_worker_is_cancelled(tmp_path: Path) -> None:
    observers = Observers(saver=saver(tmp_path / "groups.jsonl"))

    async def stop() -> None:
        tasks = [asyncio.ensure_future(observers.submitted(GROUP, ["?"], Tally(), rollout_group())) for _ in range(50)]
        await asyncio.sleep(0)  # each has begun to save
        for task in tasks:
            task.cancel()
        assert [type(found) for found in await asyncio.gather(*tasks, return_exceptions=True)] == [CancelledError] * 50
        observers.close()

    asyncio.run(stop())
    assert len(list(read_groups(tmp_path / "groups.jsonl"))) == 50


def test_dropped_group_that_cannot_be_saved_is_counted_and_the_training_continues() -> None:
    record = RunRecord(run_id="sums", state=RunState.OPEN, digest="", group_size=2, env={}, created_at=1.0)
    observers = Observers(dropped=DroppedSaver(Path("/dev/full"), record, "env-1", model="tiny", config=EnvConfig()))
    asyncio.run(observers.dropping(Permit(group_id="g00000000", row=0), DropReason.TIMEOUT, "", Attempt(0)))
    assert observers.errors.counts == {"dropped groups": 1}


def test_unwritable_folder_disables_the_saver() -> None:
    observers = Observers(saver=saver(Path("/proc/gristmill/groups.jsonl")))
    asyncio.run(observers.submitted(GROUP, ["?"], Tally(), rollout_group()))
    assert observers.errors.counts == {"saved groups": 1}
    observers.close()


def test_a_wrong_setting_of_an_observer_is_an_error_at_the_start() -> None:
    def misconfigured() -> NoReturn:
        raise ConfigError("secret_file_unreadable", "the key file does not exist")

    with raises(ConfigError, "secret_file_unreadable"):
        Observers(misconfigured)
