"""The trainer's errors."""

from __future__ import annotations

from gristmill import GristmillError


class TrainerError(GristmillError):
    """Base of the trainer's errors."""


class ModelError(TrainerError):
    """The model cannot be loaded, or is not the one that the server runs."""


class OptimizerError(TrainerError):
    """The optimizer that is asked for cannot be had here."""


class PublishError(TrainerError):
    """The model server did not take the new weights.

    `permanent`: trying again cannot help (a wrong token, a model of another shape).
    """

    def __init__(self, code: str, message: str, /, *, permanent: bool = False, **values: object) -> None:
        super().__init__(code, message, **values)
        self.permanent = permanent

    def given_up(self, seconds: float) -> PublishError:
        """The permanent error of a trainer that tried for `seconds` and always got this error."""
        message = f"{self} (tried for {seconds:.0f} s)"
        return PublishError(self.code, message, permanent=True, **{**self.values, "tried_for": seconds})


class LeaseLostError(TrainerError):
    """The leases of groups in training expired, and the groups went back to the queue."""


class FencedError(TrainerError):
    """Another trainer has taken the run. This one ends and is not to be started again for it."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be read."""


class RankLostError(TrainerError):
    """Another process of the same training is gone."""


class AbandonedError(TrainerError):
    """A step was given up before its end, on request.

    `untouched`: the weights are still those from before it.
    """

    def __init__(self, code: str, message: str, /, *, untouched: bool, **values: object) -> None:
        super().__init__(code, message, **values)
        self.untouched = untouched


def of_thread(what: str, error: Exception) -> GristmillError:
    """What a thread ended with, for its owner to raise: an error of ours as it is, any other as the cause of a
    TrainerError that says what failed."""
    if isinstance(error, GristmillError):
        return error
    failure = TrainerError(
        "unexpected_error",
        f"{what} failed: {type(error).__name__}: {error}",
        what=what,
        error=type(error).__name__,
    )
    failure.__cause__ = error
    return failure
