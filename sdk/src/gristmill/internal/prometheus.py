"""A row of the services' tables of metrics, and the page /metrics of environment and trainer.

Environment and trainer have no HTTP server. The API serves its own /metrics. The page here has its own port and its own
threads. A scrape only reads values that the process keeps anyway, so the work of the process never waits for a scrape.
If the port cannot be opened, the process logs the error and works without the page.

Needs the package prometheus-client, which the services install and the SDK does not.
"""

from __future__ import annotations

import logging
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from gristmill.errors import ConfigError
from gristmill.internal.hosts import REMEDY, AllowedHosts, message
from gristmill.internal.metrics import Kind

_LOG = logging.getLogger(__name__)
PATH: Final = "/metrics"
LOOPBACK: Final = "127.0.0.1"
_IDLE_S: Final = 30.0
"""Seconds after which a connection that sends nothing is closed."""

_KINDS: Final[Mapping[Kind, tuple[Any, Any]]] = {
    Kind.GAUGE: (Gauge, GaugeMetricFamily),
    Kind.COUNTER: (Counter, CounterMetricFamily),
    Kind.HISTOGRAM: (Histogram, HistogramMetricFamily),
}

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Exported(NamedTuple):
    """A metric for Prometheus. docs/metrics.md has a row for each."""

    name: str
    """Without the `_total` that Prometheus adds to a counter."""
    meaning: str
    kind: Kind = Kind.GAUGE
    labels: tuple[str, ...] = ()

    def create(self, registry: CollectorRegistry, **options: Any) -> Any:
        """Registers the metric and returns it. `options`: of prometheus_client's class, such as `buckets`."""
        return _KINDS[self.kind][0](self.name, self._help, self.labels, registry=registry, **options)

    def family(self, samples: Iterable[tuple[Iterable[str], Any]]) -> Any:
        """Returns the metric for a collector. `samples`: labels and value; buckets and sum of a histogram."""
        family = _KINDS[self.kind][1](self.name, self._help, labels=self.labels)
        for labels, value in samples:
            family.add_metric([*labels], *value if self.kind is Kind.HISTOGRAM else (value,))
        return family

    @property
    def _help(self) -> str:
        return self.meaning[:1].upper() + self.meaning[1:]


@contextmanager
def metrics_endpoint(address: str | None, environ: Mapping[str, str]) -> Iterator[CollectorRegistry | None]:
    """Serves /metrics inside the block. Yields the registry of its metrics, with the metrics of the process.

    `address`: PORT, which binds loopback, or HOST:PORT; None serves nothing. `environ`: API_ALLOWED_HOSTS adds names
    that requests may use. Yields None if nothing is served, also because the port is taken.

    Raises ConfigError for an address that is not valid.
    """
    server = None
    registry = CollectorRegistry()
    if address is not None:
        host, port = parse_address(address)
        try:
            server = _Server(host, port, _page(registry, AllowedHosts.read(environ)))
        except OSError as error:
            _LOG.error("no metrics for Prometheus: %s cannot be opened (%s); the work continues", address, error)
    if server is None:
        yield None
        return
    ProcessCollector(registry=registry)
    # The interval in seconds is the longest time that the shutdown takes.
    threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True).start()
    _LOG.info("metrics for Prometheus: http://%s:%d%s", _in_url(host), server.server_port, PATH)
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()


def parse_address(text: str) -> tuple[str, int]:
    """Returns host and port of "9102", "0.0.0.0:9102" or "[::1]:9102". Raises ConfigError."""
    match = re.fullmatch(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):)?(?P<port>\d{1,5})", text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            "metrics_address",
            f"metrics_address {text!r} is not an address: write a port (9102), which only this machine reaches, or "
            "HOST:PORT (0.0.0.0:9102)",
            address=text,
        )
    return (match["host"] or LOOPBACK).strip("[]"), int(match["port"])


def _page(registry: CollectorRegistry, hosts: AllowedHosts) -> WsgiApp:
    metrics: WsgiApp = make_wsgi_app(registry)

    def page(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        named = environ.get("HTTP_HOST")
        host = None if named is None else hosts.refused([(b"host", named.encode("latin-1"))])
        if host is not None:  # against DNS rebinding, as at the API
            return _refuse(start_response, "421 Misdirected Request", f"{message(host)} {REMEDY}")
        if environ["PATH_INFO"] != PATH:
            return _refuse(start_response, "404 Not Found", f"the metrics are at {PATH}")
        return metrics(environ, start_response)

    return page


def _refuse(start_response: Callable[..., Any], status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  the base class has this name
        """Logs nothing: Prometheus asks every few seconds."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """One thread per connection. The threads end with the process."""

    daemon_threads = True

    def __init__(self, host: str, port: int, page: WsgiApp) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.set_app(page)

    def server_bind(self) -> None:
        """Binds without the base class' look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a failed request. The base class prints a traceback, also for a client that hung up."""
        _LOG.debug("a request for metrics failed", exc_info=True)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
