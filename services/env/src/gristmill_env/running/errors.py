"""Errors of calls and of jobs that gave no result."""

from __future__ import annotations

from gristmill_env.errors import EnvError, RewardError


class CallError(EnvError):
    """A call gave no result: it exceeded its limits, its event loop was blocked, or nobody waits for it."""


class JobError(RewardError):
    """A job came to no result. Says nothing of the completion: never a 0."""


class JobOverran(JobError):
    """It took longer than a job may; its process was killed."""


class JobDied(JobError):
    """Its process died under it, of too much memory for example."""


class JobFailed(JobError):
    """It raised."""


class NoProcess(JobError):
    """No process could be started for it."""


class TooManyJobs(JobError):
    """More jobs wait than the pool holds."""
