"""A replaced trainer ends as fenced, whichever error it noticed first. Any other trainer ends with its own error."""

from __future__ import annotations

import pytest

from gristmill import ApiError, ApiUnreachable, LeaseLostError, RunRecord, RunState, SyncClient
from gristmill_trainer.errors import CheckpointError, FencedError, PublishError, TrainerError
from gristmill_trainer.run import noticing_replacement

NOTICED = [
    ApiError("fenced", 409, "incarnation 1 was replaced"),
    PublishError("model_server_refused", "POST /gristmill/publish was answered with 409", permanent=True),
    PublishError("write_failed", "weights/.1.5.partial cannot be written: its successor cleared it away"),
    LeaseLostError("lease_lost", "its leases expired"),
    CheckpointError("write_failed", "checkpoints/.step-000002.1.2.partial: its successor cleared it away"),
]


class _Api:
    """An API that returns which trainer took the run last, or raises."""

    def __init__(self, answer: str | Exception) -> None:
        self._answer = answer

    def get_run(self, run_id: str) -> RunRecord:
        if isinstance(self._answer, Exception):
            raise self._answer
        return _record(self._answer, 2)

    def __enter__(self) -> SyncClient:
        return self  # type: ignore[return-value]

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""


def _record(taker: str, incarnation: int) -> RunRecord:
    return RunRecord(
        run_id="run",
        state=RunState.OPEN,
        digest="",
        group_size=1,
        env={},
        created_at=0.0,
        taker=taker,
        incarnation=incarnation,
    )


def _ended(error: Exception, answer: str | Exception) -> BaseException:
    with (
        pytest.raises((FencedError, type(error))) as ended,
        noticing_replacement(lambda: _Api(answer), _record("me", 1)),  # type: ignore[arg-type,return-value]
    ):
        raise error
    return ended.value


@pytest.mark.parametrize("noticed", NOTICED)
def test_a_replaced_trainer_ends_as_fenced(noticed: Exception) -> None:
    ended = _ended(noticed, "another")
    assert isinstance(ended, FencedError)
    assert (ended.code, ended.values) == ("fenced", {"run": "run", "incarnation": 2})
    assert ended.__cause__ is noticed


@pytest.mark.parametrize("noticed", NOTICED)
@pytest.mark.parametrize(
    "answer",
    ["me", "", ApiUnreachable("api_unreachable", "away"), ApiError("run_missing", 404, "it was deleted")],
    ids=["opened again", "replaced by a run that no trainer took", "away", "deleted"],
)
def test_error_of_a_trainer_that_was_not_replaced_is_unchanged(noticed: Exception, answer: str | Exception) -> None:
    """The error ends the trainer with a failure, so that a restart policy starts the next trainer."""
    assert _ended(noticed, answer) is noticed


def test_error_that_no_successor_causes_is_not_checked_with_the_api() -> None:
    error = TrainerError("too_many_skipped_steps", "steps in a row were not trained on")
    assert _ended(error, "another") is error
