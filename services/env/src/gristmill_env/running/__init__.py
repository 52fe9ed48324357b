"""Runs code that is not ours, rewards and environments, within limits and never on the caller's event loop.

Plain functions run on threads, `async def` on a thread with an event loop, and what must be killed when it overruns in
processes. None of them holds up the end of this process.
"""

from gristmill_env.running.calls import Batch, Call, Limits
from gristmill_env.running.runner import Runner

__all__ = ["Batch", "Call", "Limits", "Runner"]
