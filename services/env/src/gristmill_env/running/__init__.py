"""Runs third-party code (rewards and environments) within limits, and never on the caller's event loop.

Plain functions run on threads. `async def` functions run on a thread with an event loop. Jobs that must be killed when
they overrun run in processes. None of these threads and processes delays the exit of this process.
"""

from gristmill_env.running.calls import Batch, Call, Limits
from gristmill_env.running.runner import Runner

__all__ = ["Batch", "Call", "Limits", "Runner"]
