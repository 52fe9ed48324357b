"""Settings of the API service, read once from the environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from redis.asyncio.connection import parse_url

from gristmill import ConfigError
from gristmill.settings import Settings as SettingsModel
from gristmill.settings import parse

MIB = 1024 * 1024
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


class Limits(SettingsModel):
    """What the API bounds. Each field is set by the variable API_<FIELD IN CAPITALS>."""

    permit_ttl_s: Seconds = 30.0
    """A permit that its holder does not renew for so long goes to another."""
    lease_ttl_s: Seconds = 120.0
    """A batch that its trainer does not extend for so long goes back to the queue."""
    max_attempts: Count = 100
    """Deliveries of a group without an ack before it is set aside as dead. High: a restart is no fault of the group."""
    max_body_bytes: Count = 64 * MIB
    """Largest request body."""
    max_stored_bytes: Count = 1024 * MIB
    """Payload bytes held for all runs; beyond, submits hear 429. Keep it well below Redis' maxmemory."""
    max_run_bytes: Count = 1024 * MIB
    """Payload bytes held for one run; beyond, its submits hear 429."""
    max_run_groups: Count = 100_000
    """Groups held for one run; beyond, its submits hear 429."""
    env_ttl_s: Seconds = 60.0
    """A registered environment that was not heard from for so long counts as dead: no share is kept for it."""
    max_wait_s: Seconds = 60.0
    """Longest long-poll; a request that asks for more gets this."""


@dataclass(frozen=True)
class Settings:
    redis_url: str = "redis://127.0.0.1:6379/0"
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """From `os.environ`: REDIS_URL and the API_* limits. An empty variable counts as unset.

        Raises ConfigError for a limit that is no positive number, a URL that is not Redis', and a
        variable whose name is nearly that of a limit.
        """
        url = environ.get("REDIS_URL") or cls.redis_url
        try:
            parse_url(url)
        except ValueError as error:
            raise ConfigError(f"REDIS_URL={url!r}: {error} Write it as redis://host:6379/0.") from error
        names = {f"API_{limit.upper()}": limit for limit in Limits.model_fields}
        for name in environ:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
            if near and name not in names:
                raise ConfigError(f"environment variable {name} is not known; did you mean {near[0]}?")
        given = {limit: environ[name] for name, limit in names.items() if environ.get(name)}
        return cls(redis_url=url, limits=parse(Limits, given, "environment variables API_*"))
