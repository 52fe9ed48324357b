"""The start of a trainer whose run changes while the model is loaded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

import pytest
from tests.support.errors import raises

from gristmill import ApiError, ConfigError, RunRecord, RunState
from gristmill.leases import LeaseSession
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.startup import _MainStart, start

RUN = RunRecord(run_id="r", state=RunState.OPEN, digest="0", group_size=2, env={}, created_at=0.0, creation="c1")


class Session:
    """A session whose `take` the API answers as a test prescribes."""

    def __init__(self, run: RunRecord, refusal: ApiError | None) -> None:
        self.run = run
        self._refusal = refusal

    def __enter__(self) -> Session:
        if self._refusal is not None:
            raise self._refusal
        return self

    def __exit__(self, *_: object) -> None:
        pass


def take(refusal: ApiError | None) -> bool:
    with ExitStack() as stack:
        starting = _MainStart([], {}, 1, stack)
        starting._run = RUN
        return starting._take_as_planned(cast("LeaseSession", Session(RUN, refusal)))


@pytest.mark.parametrize(("status", "code"), [(409, "suspended"), (409, "other_creation"), (404, "run_missing")])
def test_trainer_looks_for_a_run_again_if_its_run_was_replaced_meanwhile(status: int, code: str) -> None:
    assert not take(ApiError(code, status, "refused"))


def test_trainer_takes_its_run_and_ends_with_other_refusals() -> None:
    assert take(None)
    with raises(ApiError, "config_differs"):
        take(ApiError("config_differs", 409, "refused"))


def test_trainer_checks_its_flags_before_it_looks_for_a_run() -> None:
    with raises(ConfigError, "unknown_flag"), start(["--training_stpes", "3"], {}, DistContext()):
        pass
