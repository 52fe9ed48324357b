"""A trainer that was replaced ends as fenced, whatever it noticed first; one that was not ends with its own error."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill import ApiError, ApiUnreachable, SyncClient
from gristmill_trainer.errors import FencedError, LeaseLostError, PublishError, TrainerError
from gristmill_trainer.fencing import noticing_replacement

NOTICED = [
    ApiError("fenced", 409, "incarnation 1 was replaced"),
    PublishError("POST /gristmill/publish was answered with 409", permanent=True),
    PublishError("weights/.1.5.partial cannot be written: its successor cleared it away"),
    LeaseLostError("its leases expired"),
]


class _Api:
    """Says which incarnation of the run is the newest, or raises."""

    def __init__(self, answer: int | Exception) -> None:
        self._answer = answer

    def get_run(self, run_id: str) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return type("Run", (), {"incarnation": self._answer})

    def __enter__(self) -> SyncClient:
        return self  # type: ignore[return-value]

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""


def _ended(error: Exception, answer: int | Exception) -> BaseException:
    with (
        pytest.raises(type(error) if not isinstance(answer, int) or answer == 1 else FencedError) as ended,
        noticing_replacement(lambda: _Api(answer), "run", 1),  # type: ignore[arg-type,return-value]
    ):
        raise error
    return ended.value


@pytest.mark.parametrize("noticed", NOTICED)
def test_a_replaced_trainer_ends_as_fenced(noticed: Exception) -> None:
    assert _ended(noticed, 2).__cause__ is noticed


@pytest.mark.parametrize("noticed", NOTICED)
@pytest.mark.parametrize("answer", [1, ApiUnreachable("away"), ApiError("run_missing", 404, "it was deleted")])
def test_another_error_stays_what_it_is(noticed: Exception, answer: int | Exception) -> None:
    assert _ended(noticed, answer) is noticed


def test_what_no_successor_causes_is_not_asked_about() -> None:
    error = TrainerError("steps in a row were not trained on")
    with (
        pytest.raises(TrainerError) as ended,
        noticing_replacement(lambda: _Api(2), "run", 1),  # type: ignore[arg-type,return-value]
    ):
        raise error
    assert ended.value is error
