"""How a symbolic check ends without an outcome."""

from __future__ import annotations

from gristmill_env.errors import RewardError


class CheckError(RewardError):
    """A symbolic check came to no result. Says nothing of the answer: never a 0."""


class CheckOverran(CheckError):
    """It took longer than a check may; its process was killed."""


class CheckDied(CheckError):
    """Its process died under it, of too much memory for example."""


class CheckerUnavailable(CheckError):
    """No process could be started to check with."""


class TooManyChecks(CheckError):
    """More checks wait than the pool holds."""
