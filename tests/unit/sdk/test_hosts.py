"""Which values of `Host` are allowed: never a name that an attacker can point at this machine."""

from __future__ import annotations

import socket

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill.internal.hosts import AllowedHosts

MACHINE = socket.gethostname()
HOSTS = AllowedHosts.read({"API_ALLOWED_HOSTS": " GPU-box.lan , *.example.com,, rig"})


def refused(hosts: AllowedHosts, *values: str) -> str | None:
    return hosts.refused([(b"accept", b"*/*"), *((b"host", value.encode("latin-1")) for value in values)])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost:1", "localhost.", "a.localhost", "a.b.localhost:80"),
        *("127.0.0.1", "127.0.0.1:8000", "192.168.1.7:9001", "[::1]", "[::1]:8000", "[fe80::1%25eth0]:1", "0.0.0.0"),
        *("api:8000", "model:9001", MACHINE, f"{MACHINE.upper()}:8000"),
        *("gpu-box.lan:8000", "GPU-BOX.lan.", "rig", "a.example.com", "a.b.example.com:1"),
    ],
)
def test_loopback_addresses_services_and_named_hosts_are_allowed(host: str) -> None:
    assert refused(HOSTS, host) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "rebind.attacker.net", "localhost.evil.example", "evillocalhost"),
        *("127.0.0.1.evil.example", "127.0.0.1.nip.io:8000", "api.evil.example", "example.com", "evil-example.com"),
        *("", ":8000", "localhost:80x", "evil.example:80:80", "[::1].evil.example", "[evil.example]", "::1"),
        *("localhost@evil.example", "evil.example#localhost", "*", "*.localhost.evil", "gpu-box.lan.evil.example"),
        *("localhost\xe9", "0x7f.1"),
    ],
)
def test_unknown_host_names_are_refused(host: str) -> None:
    assert refused(HOSTS, host) == host


def test_every_one_of_several_host_headers_is_checked() -> None:
    assert refused(HOSTS, "localhost", "evil.example") == "evil.example"
    assert refused(HOSTS, "evil.example", "localhost") == "evil.example"


def test_request_without_host_is_allowed() -> None:
    assert refused(HOSTS) is None


def test_star_allows_every_host_and_has_a_warning() -> None:
    every = AllowedHosts.read({"API_ALLOWED_HOSTS": "rig,*"})
    assert refused(every, "evil.example") is None
    assert every.warning() is not None
    assert HOSTS.warning() is None


def test_empty_variable_counts_as_unset() -> None:
    assert AllowedHosts.read({"API_ALLOWED_HOSTS": ""}) == AllowedHosts.read({}) == AllowedHosts()


@pytest.mark.parametrize("entry", ["http://rig", "rig:8000", "a.*.b", "*rig", "rig/", "a b", "*."])
def test_entry_that_is_not_a_host_name_is_refused(entry: str) -> None:
    with raises(ConfigError, "host_name", variable="API_ALLOWED_HOSTS"):
        AllowedHosts.read({"API_ALLOWED_HOSTS": entry})
