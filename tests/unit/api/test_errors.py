"""Error messages name the differences, and failures of Redis are distinguished from defects."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisDown
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisSlow

from gristmill_api import errors


def test_config_differs_lists_every_leaf_old_to_new() -> None:
    old = {"dataset": {"name": "gsm8k", "split": "train"}, "group_size": 4, "seed": 1}
    new = {"dataset": {"name": "gsm8k", "split": "test"}, "group_size": 8}
    problem = errors.config_differs("a", "environment", old, new)
    message = problem.message
    assert "RUN_ID" in problem.remedy
    assert "--run_id" in problem.remedy
    assert "dataset.split: 'train' -> 'test'; group_size: 4 -> 8; seed: 1 -> unset" in message
    assert "name" not in message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RedisDown("refused"), "store_unavailable"),
        (RedisSlow("slow"), "store_unavailable"),
        (ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), "store_unavailable"),
        (OutOfMemoryError("OOM"), "store_full"),
        (ResponseError("ERR wrong number of arguments"), None),
    ],
)
def test_redis_failures_become_problems_or_defects(error: RedisError, code: str | None) -> None:
    refused = errors.from_redis(error)
    assert (refused.code if refused else None) == code


def test_error_message_is_clipped() -> None:
    refused = errors.bad_group("g1", "x" * 10_000_000)
    assert len(refused.message) < 1100
    assert refused.code == "bad_group"
    assert all(value in refused.message for value in ("'g1'", "xxx"))
