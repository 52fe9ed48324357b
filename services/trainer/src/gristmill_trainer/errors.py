"""The trainer's errors."""

from __future__ import annotations

from gristmill import GristmillError


class TrainerError(GristmillError):
    """Base of the trainer's errors."""


class ModelError(TrainerError):
    """The model cannot be loaded, or differs from the server's model."""


class OptimizerError(TrainerError):
    """The requested optimizer is not available."""


class PublishError(TrainerError):
    """The model server did not load the new weights.

    `permanent`: a retry cannot help (a wrong token, a model of another shape).
    """

    def __init__(self, code: str, message: str, /, *, permanent: bool = False, **values: object) -> None:
        super().__init__(code, message, **values)
        self.permanent = permanent

    def given_up(self, seconds: float) -> PublishError:
        """Returns the permanent error of a trainer that always got this error for `seconds`."""
        message = f"{self} (tried for {seconds:.0f} s)"
        return PublishError(self.code, message, permanent=True, **{**self.values, "tried_for": seconds})


class LeaseLostError(TrainerError):
    """The leases of groups in training expired, and the groups went back to the queue."""


class FencedError(TrainerError):
    """Another trainer has taken the run. This trainer ends and must not be restarted for the run."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be read or written."""


class RankLostError(TrainerError):
    """Another process of the same training is lost."""


class AbandonedError(TrainerError):
    """A step was abandoned before its end, on request.

    `untouched`: the step has not changed the weights.
    """

    def __init__(self, code: str, message: str, /, *, untouched: bool, **values: object) -> None:
        super().__init__(code, message, **values)
        self.untouched = untouched


def of_thread(what: str, error: Exception) -> GristmillError:
    """Returns the error of a thread for its owner to raise.

    A GristmillError is returned unchanged. Any other error becomes the cause of a TrainerError that names `what`.
    """
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
