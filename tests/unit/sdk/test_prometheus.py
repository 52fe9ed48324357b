"""The page /metrics of a process: its address, its answers, and failures that do not end the process."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import Counter
from tests.support.errors import raises
from tests.support.ports import free_port

from gristmill import ConfigError
from gristmill.internal.prometheus import metrics_endpoint, parse_address


def get(url: str, **headers: str) -> tuple[int, str]:
    """Returns status and body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9102", ("127.0.0.1", 9102)),
        ("0.0.0.0:9102", ("0.0.0.0", 9102)),
        ("gpu-box.lan:1", ("gpu-box.lan", 1)),
        ("[::1]:9102", ("::1", 9102)),
        ("0", ("127.0.0.1", 0)),
    ],
)
def test_metrics_address_without_a_host_is_on_loopback(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "http://127.0.0.1:9102", "127.0.0.1:", "65536", "::1:9102", "a b:1"])
def test_wrong_address_is_an_error(text: str) -> None:
    with raises(ConfigError, "metrics_address", address=text), metrics_endpoint(text, {}):
        pass


def test_page_has_the_metrics_of_the_registry_and_of_the_process() -> None:
    port = free_port()
    with metrics_endpoint(str(port), {}) as registry:
        assert registry is not None
        Counter("gristmill_env_things", "Things", registry=registry).inc(3)
        status, page = get(f"http://127.0.0.1:{port}/metrics")
        assert status == 200
        assert "\ngristmill_env_things_total 3.0\n" in page
        assert "\nprocess_resident_memory_bytes " in page
        assert get(f"http://127.0.0.1:{port}/")[0] == 404
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the port is closed with the block"


def test_page_listens_on_the_named_address_only() -> None:
    port = free_port()
    with metrics_endpoint(str(port), {}), socket.socket() as other:
        # Any other address of the loopback network is free, so the page has not bound all of them.
        assert other.connect_ex(("127.0.0.2", port)) != 0


def test_page_refuses_a_host_that_it_does_not_know() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with metrics_endpoint(str(port), {"API_ALLOWED_HOSTS": "metrics.lan"}):
        assert get(url, Host="rebound.example")[0] == 421
        assert get(url, Host="rebound.example:9102")[0] == 421
        for known in ("localhost:9102", "env:9102", "trainer:9102", "172.18.0.5:9102", "metrics.lan"):
            assert get(url, Host=known)[0] == 200, known


def test_metrics_page_refuses_post() -> None:
    port = free_port()
    with metrics_endpoint(str(port), {}):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", data=b"x", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 405


def test_no_metrics_are_served_without_an_address() -> None:
    with metrics_endpoint(None, {}) as registry:
        assert registry is None


def test_port_that_is_taken_is_logged_and_the_work_continues(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with metrics_endpoint(address, {}) as registry:
            assert registry is None
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert address in record.getMessage()


def test_client_that_sends_nothing_delays_no_other_client() -> None:
    port = free_port()
    with metrics_endpoint(str(port), {}), socket.create_connection(("127.0.0.1", port)):
        assert get(f"http://127.0.0.1:{port}/metrics")[0] == 200
