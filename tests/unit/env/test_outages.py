"""Errors of rewards and environments that may pass are waited for, and the others are not."""

from __future__ import annotations

import email.message
import json
import socket
import urllib.error
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.support.errors import raises

from gristmill_env.errors import EpisodeError, RewardError
from gristmill_env.outages import may_pass
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward

pytestmark = pytest.mark.slow

REQUEST = httpx.Request("POST", "http://judge")


def refused(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("refused", request=REQUEST, response=httpx.Response(status, request=REQUEST))


def of_another_client(**fields: Any) -> Exception:
    """An error as of requests, aiohttp or OpenAI's client, which hold the status in different places."""
    error = Exception("refused")
    error.__dict__.update(fields)
    return error


def caused(error: Exception, cause: Exception, *, plainly: bool = True) -> Exception:
    if plainly:
        error.__cause__ = cause
    else:
        error.__context__ = cause
    return error


PASSES = {
    "503": refused(503), "500": refused(500), "429": refused(429), "408": refused(408),
    "connect": httpx.ConnectError("refused"), "read": httpx.ReadTimeout("slow"),
    "broken": httpx.RemoteProtocolError(""), "openai": of_another_client(status_code=429),
    "requests": of_another_client(response=SimpleNamespace(status_code=503)),
    "aiohttp": of_another_client(status=502),
    "urllib": urllib.error.HTTPError("http://judge", 503, "", email.message.Message(), None),
    "urllib connect": urllib.error.URLError(ConnectionRefusedError()),
    "refused": ConnectionRefusedError(), "reset": ConnectionResetError(), "time-out": TimeoutError(),
    "name": socket.gaierror(-3, "Temporary failure in name resolution"), "files": OSError(24, "Too many open files"),
    "disk": OSError(28, "No space left on device"), "requests connect": OSError("Max retries exceeded"),
    "wrapped": caused(RuntimeError("no verdict"), refused(503)),
    "in a handler": caused(RuntimeError("no verdict"), TimeoutError(), plainly=False),
    "group": ExceptionGroup("both", [KeyError(), refused(503)]),
    "of an environment": caused(EpisodeError("environment_raised", "Game.step"), httpx.ConnectError("refused")),
}  # fmt: skip
STAYS = {
    "400": refused(400), "401": refused(401), "404": refused(404), "422": refused(422),
    "requests": of_another_client(response=SimpleNamespace(status_code=404)),
    "address": httpx.UnsupportedProtocol("htp"),
    "urllib": urllib.error.HTTPError("http://judge", 404, "", email.message.Message(), None),
    "key": KeyError("answer"), "value": ValueError(), "no file": FileNotFoundError(),
    "no right": PermissionError(13, "Permission denied"),
    "no file here": FileNotFoundError(2, "No such file"),
    "long path": OSError(36, "File name too long"), "long list": OSError(7, "Argument list too long"),
    "no such host": socket.gaierror(-2, "Name or service not known"),
    "judge's JSON": json.JSONDecodeError("no", "", 0), "of a row": EpisodeError("environment_value", "Game.step"),
    "exit": SystemExit(503), "code": of_another_client(code="503"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "passes"),
    [*((error, True) for error in PASSES.values()), *((error, False) for error in STAYS.values())],
    ids=[*PASSES, *STAYS],
)
def test_errors_of_services_may_pass_and_mistakes_do_not(error: BaseException, passes: bool) -> None:
    assert may_pass(error) == passes


SAMPLES = [Sample("good"), Sample("bad")]


@pytest.mark.slow
@pytest.mark.parametrize("group_level", [False, True])
async def test_judge_that_answers_again_in_time_scores_every_completion(group_level: bool) -> None:
    calls: list[str] = []

    def judge(completion: str) -> float:
        calls.append(completion)
        if len(calls) < 4:
            raise refused(503)
        return 1.0

    def judge_all(completions: list[str]) -> list[float]:
        return [judge(completion) for completion in completions]

    made = create_reward(judge_all if group_level else judge)
    async with Scorer([WeightedReward(made, 1.0)], has_answer=False, patience=60) as scorer:
        scores = await scorer.score(SAMPLES)
    assert [(score.total, score.error) for score in scores] == [(1.0, None)] * 2
    assert scorer.errors == {}


async def test_judge_that_stays_away_ends_the_run_after_the_patience() -> None:
    async def judge(completion: str) -> float:
        raise refused(503)

    async with Scorer([WeightedReward(create_reward(judge), 1.0)], has_answer=False, patience=0.3) as scorer:
        with raises(RewardError, "service_unavailable", name="judge") as raised:
            await scorer.score(SAMPLES)
    assert raised.value.values["seconds"] >= 0.3


async def test_failure_of_one_completion_is_of_that_completion_if_the_judge_answers_others() -> None:
    def judge(completion: str) -> float:
        if completion == "bad":
            raise refused(500)
        return 1.0

    async with Scorer([WeightedReward(create_reward(judge), 1.0)], has_answer=False, patience=0.3) as scorer:
        assert (await scorer.score(SAMPLES[:1]))[0].total == 1.0
        good, bad = await scorer.score(SAMPLES)
    assert good.total == 1.0
    assert (bad.total, bad.failed["judge"].code) == (None, "reward_raised")


@pytest.mark.parametrize(("weight", "error"), [(0.0, refused(503)), (1.0, KeyError("answer"))])
async def test_metrics_and_mistakes_are_not_repeated(weight: float, error: Exception) -> None:
    calls: list[str] = []

    def judge(completion: str) -> float:
        calls.append(completion)
        raise error

    rewards = [WeightedReward(create_reward(judge), weight), WeightedReward(create_reward("length"), 1.0)]
    async with Scorer(rewards, has_answer=False, patience=60) as scorer:
        await scorer.score(SAMPLES)
    assert sorted(calls) == ["bad", "good"]


async def test_error_in_a_process_may_pass_as_well(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def judge(completion):\n    raise ConnectionRefusedError('no judge')\n")
    made = create_reward({"type": "judge.py:judge", "process": True}, folder=tmp_path)
    async with Scorer([WeightedReward(made, 1.0)], has_answer=False, patience=0.1) as scorer:
        with raises(RewardError, "service_unavailable", name="judge"):
            await scorer.score(SAMPLES[:1])
