"""Errors of calls and of jobs that gave no result."""

from __future__ import annotations

from gristmill_env.errors import EnvError, RewardError


class CallError(EnvError):
    """A call gave no result: it exceeded its limits, its event loop was blocked, or its result is not needed."""


class JobError(RewardError):
    """A job gave no result. The completion is therefore unscored; its score is never 0."""


class JobOverran(JobError):
    """The job exceeded a limit, and its process was killed."""


class JobDied(JobError):
    """The job's process exited during the job, for example because it used too much memory."""


class JobFailed(JobError):
    """The job raised an error."""


class NoProcess(JobError):
    """No process could be started for the job."""


class TooManyJobs(JobError):
    """The pool's queue of waiting jobs is full."""
