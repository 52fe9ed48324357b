"""`close`: ends a run by hand, so that the stack is free for another run."""

from __future__ import annotations

from rich.console import Console

from gristmill_env.commands import CloseOptions
from gristmill_env.console import say
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import connect_api

_PATIENCE = 20.0


async def close(run: RunSettings, options: CloseOptions, console: Console) -> None:
    """Closes the run at the stack's API. Its environments and its trainer stop at their next request.

    Raises ApiError when the run does not exist, or when the API asks for the administrator's token
    (GRISTMILL_API_TOKEN_FILE must name its file).
    """
    async with connect_api(run, run.config.startup_patience or _PATIENCE) as api:
        record = await api.close_run(options.run)
    say(console, f"run {record.run_id} is closed at version {record.version or 'none'}")
