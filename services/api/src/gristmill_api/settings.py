"""Settings of the API service, read once from the environment."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from gristmill import ConfigError
from gristmill.deployment import RUN_ID
from gristmill.internal.archive_writer import MIN_FREE_BYTES
from gristmill.internal.settings import Settings as SettingsModel
from gristmill.internal.settings import parse
from gristmill.model_servers import split_urls
from gristmill_api.access import settings as access
from gristmill_api.access.settings import AccessSettings
from gristmill_api.redis_url import redis_options, shown_address

MIB = 1024 * 1024
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]

VIEW_DIRS, VIEW_SERVERS = "API_VIEW_DIRS", "API_VIEW_SERVERS"
ID_PATTERN = f"^{RUN_ID}$"
"""Of run ids, group ids, and names of environments."""

MAX_NUMBER = 2**53
"""Largest step or incarnation: what JSON, Lua and Prometheus hold exactly."""
REDIS_USER = "api"
"""Redis' user when there is a password and the URL names none."""


class Limits(SettingsModel):
    """Bounds of the API. Each field is set by the variable API_<FIELD IN CAPITALS>."""

    permit_ttl_s: Seconds = 30.0
    """Seconds. A permit that its holder has not renewed for this long is given to another environment."""
    lease_ttl_s: Seconds = 120.0
    """Seconds. A batch whose lease the trainer has not extended for this long returns to the queue."""
    max_attempts: Count = 100
    """Deliveries of a group without an ack before it becomes a dead letter. High, because a trainer that restarts is
    not the group's fault."""
    max_body_bytes: Count = 64 * MIB
    """Largest request body."""
    max_concurrent_body_bytes: Count = 256 * MIB
    """Bytes of request bodies over 64 KiB that are in memory at one time, with their inflated copies. A request beyond
    that waits for up to 10 seconds and is then refused with 503. The API needs several times as much memory."""
    request_timeout_s: Seconds = 30.0
    """Seconds within which the headers of a request arrive after the first byte, or after the connection. The body may
    fall behind 16 KiB per second by as many seconds."""
    max_stored_bytes: Count = 1024 * MIB
    """Payload bytes held for all runs. Submits beyond that receive 429. Keep it well below Redis' maxmemory."""
    max_run_bytes: Count = 1024 * MIB
    """Payload bytes held for one run. Submits to the run beyond that receive 429."""
    max_run_groups: Annotated[int, Field(gt=0, le=100_000)] = 100_000
    """Groups held for one run. Submits to the run beyond that receive 429. At most 100,000, because Redis moves all
    leased groups of a run in one call when a trainer takes the run."""
    env_ttl_s: Seconds = 60.0
    """Seconds. A registered environment that has sent no request for this long counts as dead: no share of the batches
    is kept for it."""
    run_retention_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30 * 86_400.0
    """Seconds. A finished run is deleted from the store this long after its end, once its groups are archived. Its
    folder stays. 0: finished runs stay until they are deleted by hand."""
    archive_max_bytes: Annotated[int, Field(ge=0)] = 10 * 1024 * MIB
    """Bytes of one run's archive of acked groups. Beyond that the archive removes its oldest groups. 0: no archive."""
    archive_min_free_bytes: Annotated[int, Field(ge=0)] = MIN_FREE_BYTES
    """Free space that the archive leaves on its disk, for Redis to append to and rewrite its file. Below that the
    archive removes a run's oldest segments, then lets groups go without archiving them. 0: no floor."""
    max_wait_s: Seconds = 60.0
    """Seconds. Longest long-poll; a request that asks for a longer wait gets this one."""


@dataclass(frozen=True)
class Settings:
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    """A server or the Sentinels of a server, as redis_url.py describes it."""
    redis_password: str | None = field(default=None, repr=False)
    """From REDIS_PASSWORD_FILE, for a URL that holds none."""
    atropos_run: str = "default"
    """Id of the run for Atropos' protocol, which the API serves at its root."""
    limits: Limits = field(default_factory=Limits)
    access: AccessSettings = field(default_factory=AccessSettings)
    runs_dir: Path | None = None
    """Acked groups are archived to <runs_dir>/<run id>/rollouts; None: nowhere."""

    view_dirs: tuple[Path, ...] = ()
    """Further folders with folders of runs, which the page reads: the trainer's and the environment's."""
    view_servers: tuple[str, ...] = ()
    """Model servers whose weights the page shows, such as dns+http://model:9001."""

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that the page reads."""
        return tuple(dict.fromkeys([*([self.runs_dir] if self.runs_dir else []), *self.view_dirs]))

    @property
    def archive_dir(self) -> Path | None:
        """Where to archive; None when archiving is off."""
        return self.runs_dir if self.limits.archive_max_bytes else None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """From `os.environ`: REDIS_URL, REDIS_PASSWORD_FILE, ATROPOS_RUN, GRISTMILL_RUNS_DIR, API_VIEW_DIRS and
        API_VIEW_SERVERS (with ':' and ',' between them), the API_* limits and access. An
        empty variable counts as unset.

        Raises ConfigError for a limit that is not positive, a URL that is not a Redis URL, and an invalid run id. Also
        for a variable whose name is close to a known name, and for values that AccessSettings.read rejects.
        """
        url = environ.get("REDIS_URL") or "redis://127.0.0.1:6379/0"
        _check_redis_url(url)
        names = {f"API_{limit.upper()}": limit for limit in Limits.model_fields}
        known_names = {*names, *access.NAMES, VIEW_DIRS, VIEW_SERVERS}
        for name in environ:
            near = difflib.get_close_matches(name, known_names, n=1, cutoff=0.85)
            if near and name not in known_names:
                raise ConfigError(
                    "variable_unknown",
                    f"environment variable {name} is not known; did you mean {near[0]}?",
                    variable=name,
                    nearest=near[0],
                )
        given = {limit: environ[name] for name, limit in names.items() if environ.get(name)}
        run = environ.get("ATROPOS_RUN") or cls.atropos_run
        if not re.fullmatch(ID_PATTERN, run):
            raise ConfigError(
                "variable_invalid",
                f"ATROPOS_RUN={run!r} is not a valid run id. Use 1 to 64 letters, digits, '.', '_' or '-', "
                "and start with a letter or digit.",
                variable="ATROPOS_RUN",
            )
        return cls(
            redis_url=url,
            redis_password=_password(environ.get("REDIS_PASSWORD_FILE")),
            atropos_run=run,
            limits=parse(Limits, given, "environment variables API_*"),
            access=AccessSettings.read(environ),
            runs_dir=Path(environ["GRISTMILL_RUNS_DIR"]) if environ.get("GRISTMILL_RUNS_DIR") else None,
            view_dirs=tuple(Path(name) for name in (environ.get(VIEW_DIRS) or "").split(os.pathsep) if name),
            view_servers=tuple(split_urls(environ.get(VIEW_SERVERS) or "")),
        )

    @property
    def redis_address(self) -> str:
        """Where Redis is, for a log line: host:port, the path of a socket, or Sentinels; without user and password."""
        return shown_address(self.redis_url)

    @property
    def redis_login(self) -> dict[str, str]:
        """User and password for Redis: the URL's user, else `api`, the one that `make secure` makes."""
        if self.redis_password is None:
            return {}
        return {"username": urlsplit(self.redis_url).username or REDIS_USER, "password": self.redis_password}


def _check_redis_url(url: str) -> None:
    remedy = (
        "Write it as redis://HOST:6379/0, rediss:// for TLS, unix:///PATH/OF/THE/SOCKET, or "
        "redis+sentinel://HOST:26379,HOST:26379/SERVICE (docs/clusters.md)."
    )
    try:
        parts, options = urlsplit(url), redis_options(url)
    except ValueError as error:
        # The text between scheme and @, and the query, may hold a password.
        without_password = url.rpartition("@")[2].partition("?")[0]
        raise ConfigError(
            "variable_invalid",
            f"REDIS_URL={without_password!r} is not a valid Redis URL: {error}. {remedy}",
            variable="REDIS_URL",
        ) from error
    if parts.scheme == "unix" and (parts.hostname or not options.get("path")):
        # redis-py ignores the host: it would connect to the rest of the path.
        without_password = f"unix://{parts.hostname or ''}{parts.path}"
        raise ConfigError(
            "variable_invalid",
            f"REDIS_URL={without_password!r} does not name a socket by its absolute path. {remedy}",
            variable="REDIS_URL",
        )


def _password(file: str | None) -> str | None:
    """Returns the word in the file. None: the file is not set or is empty, as in a stack without passwords."""
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip() or None
    except OSError as error:
        raise ConfigError(
            "secret_file_unreadable",
            f"REDIS_PASSWORD_FILE={file} cannot be read: {error.strerror}.",
            variable="REDIS_PASSWORD_FILE",
        ) from error
