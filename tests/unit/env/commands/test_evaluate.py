"""`evaluate`: its report to the API."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.env.conftest import FailingServer
from tests.unit.env.evaluation.made import judged, plan

from gristmill_env.commands import evaluate
from gristmill_env.evaluation.results import SOURCE_BY_HAND, Evaluated, summarise
from gristmill_env.run_settings import RunSettings


def run_at(url: str) -> RunSettings:
    """Returns the settings that the report reads."""
    config = SimpleNamespace(rollout_server_url=url)
    settings: Any = SimpleNamespace(run_id="sums", config=config, deployment=SimpleNamespace(api_token=None))
    return cast("RunSettings", settings)


def evaluated(creation: str | None) -> Evaluated:
    made, records = plan(creation=creation), [judged(0, 1.0, 0.0)]
    return Evaluated(made, summarise(made, records), Path(), started=1.0, ended=2.0, resumed=0)


async def test_report_names_the_creation_of_the_evaluated_training(failing_server: FailingServer) -> None:
    path = "/v1/runs/sums/metrics?creation=c1"
    failing_server.answers[path] = lambda: (200, {})
    await evaluate._tell(run_at(failing_server.url), evaluated("c1"))
    assert failing_server.asked == [path]
    assert [(body["source"], body["step"]) for body in failing_server.bodies] == [(SOURCE_BY_HAND, 20)]
    await evaluate._tell(run_at(failing_server.url), evaluated(None))
    assert len(failing_server.asked) == 1


async def test_report_that_the_api_refuses_does_not_end_the_command(
    failing_server: FailingServer, caplog: pytest.LogCaptureFixture
) -> None:
    error = {"error": {"code": "other_creation", "message": "the run was created again", "remedy": "start again"}}
    failing_server.answers["/v1/runs/sums/metrics?creation=c1"] = lambda: (409, error)
    with caplog.at_level(logging.WARNING):
        await evaluate._tell(run_at(failing_server.url), evaluated("c1"))
    assert "created again" in caplog.text
