"""The trainer's errors."""

from __future__ import annotations

from gristmill import GristmillError


class TrainerError(GristmillError):
    """Base of the trainer's errors."""


class ModelError(TrainerError):
    """The model cannot be loaded, or differs from the server's model."""


class WeightsError(TrainerError):
    """The weights in training are not numbers any more. Neither a server nor a checkpoint gets them."""


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


class FencedError(TrainerError):
    """Another trainer has taken the run. This trainer ends and must not be restarted for the run."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be read or written."""


class RankLostError(TrainerError):
    """Another process of the same training is lost."""


class OutOfMemoryError(TrainerError):
    """One sequence alone, the model or the optimizer's state does not fit in memory."""


class AbandonedError(TrainerError):
    """A step was abandoned before its end, on request.

    `untouched`: the step has not changed the weights.
    """

    def __init__(self, code: str, message: str, /, *, untouched: bool, **values: object) -> None:
        super().__init__(code, message, **values)
        self.untouched = untouched
