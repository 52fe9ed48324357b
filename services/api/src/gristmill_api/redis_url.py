"""Reads REDIS_URL: one server over TCP, TLS or a Unix socket, or the master that Sentinels name.

    redis://HOST:6379/0                                     TCP
    rediss://HOST:6379/0?ssl_ca_certs=/etc/ca.pem           TLS
    unix:///run/redis.sock                                  a Unix socket
    redis+sentinel://HOST:26379,HOST:26379/SERVICE?db=0     the master of SERVICE; rediss+sentinel:// for TLS

The query may hold options of redis-py's connections, and `wait_replicas`: the number of replicas that must receive a
write before the API answers.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio.connection import SSLConnection, parse_url

WAIT_REPLICAS: Final = "wait_replicas"
_SENTINEL = "+sentinel"
_SENTINEL_PORT = 26379


def redis_options(url: str) -> dict[str, Any]:
    """Returns the options of a connection. Of Sentinels: `sentinels` (host and port of each) and `service`, instead of
    host and port. Raises ValueError for text that is not such a URL."""
    parts = urlsplit(url)
    plain = parts.scheme.removesuffix(_SENTINEL)
    if plain == parts.scheme:
        options: dict[str, Any] = {**parse_url(url)}
    else:
        login, _, hosts = parts.netloc.rpartition("@")
        service = parts.path.strip("/")
        if not service or "/" in service:
            raise ValueError("the path must be the name of the service that the Sentinels watch, such as /mymaster")
        options = {**parse_url(f"{plain}://{login}{'@' if login else ''}service/?{parts.query}")}
        del options["host"]
        options |= {"sentinels": tuple(map(_address, hosts.split(","))), "service": service}
    if WAIT_REPLICAS in options:
        options[WAIT_REPLICAS] = int(options[WAIT_REPLICAS])
    return options


def shown_address(url: str) -> str:
    """Returns where Redis is, for a log line: without user, password and options."""
    options = redis_options(url)
    if "sentinels" in options:
        hosts = ",".join(f"{host}:{port}" for host, port in options["sentinels"])
        return f"{options['service']} of Sentinels {hosts}"
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def uses_tls(url: str) -> bool:
    return issubclass(redis_options(url).get("connection_class", object), SSLConnection)


def _address(given: str) -> tuple[str, int]:
    parts = urlsplit(f"//{given}")
    if not parts.hostname:
        raise ValueError(f"{given!r} does not name a Sentinel as HOST:PORT")
    return parts.hostname, parts.port or _SENTINEL_PORT
