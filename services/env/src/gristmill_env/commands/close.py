"""`close`: ends a run by hand, so that the stack is free for another run."""

from __future__ import annotations

from rich.console import Console

from gristmill import Client
from gristmill_env.commands.options import CloseOptions
from gristmill_env.commands.show import plain
from gristmill_env.launch import Launch

_PATIENCE = 20.0


async def close(launch: Launch, options: CloseOptions, console: Console) -> None:
    """Closes the run at the stack's API. Its environments and its trainer stop at their next request.

    Raises ApiError when the run does not exist, or when the API asks for the administrator's token
    (GRISTMILL_API_TOKEN_FILE must name its file).
    """
    patience = launch.config.startup_patience or _PATIENCE
    async with Client(launch.config.rollout_server_url, patience=patience, token=launch.deployment.api_token) as api:
        record = await api.close_run(options.run)
    console.print(plain(f"run {record.run_id} is closed at version {record.version or 'none'}"), soft_wrap=True)
