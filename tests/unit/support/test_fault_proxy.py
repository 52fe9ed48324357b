"""The proxy causes the configured faults. Tests that rely on the proxy would not notice if it did nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.support.fault_proxy import Fault, FaultProxy, Way
from tests.support.ports import free_port


class Echo:
    """Sends back the bytes that it gets, and keeps them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.heard = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with end:
            try:
                while data := end.recv(65536):
                    self.heard += data
                    end.sendall(data)
            except OSError:
                return  # the reset that a test asked for

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept() that waits in its thread
        self._listener.close()

    def has_heard(self, data: bytes) -> bool:
        deadline = time.monotonic() + 5
        while self.heard != data and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.heard == data


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.port) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def receive(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = end.recv(count - len(data))
        if not piece:
            break
        data += piece
    return data


def test_proxy_without_a_fault_passes_bytes(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as end:
        end.sendall(b"x" * 300_000)
        assert receive(end, 300_000) == b"x" * 300_000
        assert proxy.passed("request") == proxy.passed("answer") == 300_000


@pytest.mark.parametrize("after", [0, 1, 5])
def test_proxy_resets_a_request_after_n_bytes(proxy: FaultProxy, echo: Echo, after: int) -> None:
    with connect(proxy) as end, proxy.under(Fault(request=Way(reset_after=after))):
        end.sendall(b"0123456789")
        with pytest.raises(ConnectionResetError):
            receive(end, 10)
    assert echo.has_heard(b"0123456789"[:after])


@pytest.mark.parametrize("after", [0, 1, 5])
def test_proxy_resets_an_answer_after_n_bytes(proxy: FaultProxy, echo: Echo, after: int) -> None:
    with connect(proxy) as end, proxy.under(Fault(answer=Way(reset_after=after))):
        end.sendall(b"0123456789")
        if after:
            assert receive(end, after) == b"0123456789"[:after]
        with pytest.raises(ConnectionResetError):
            receive(end, 1)
    assert echo.has_heard(b"0123456789"), "the request had come through"


def test_proxy_counts_resets_and_ends_them(proxy: FaultProxy) -> None:
    proxy.set(Fault(answer=Way(reset_after=1), times=2))
    for _ in range(2):
        with connect(proxy) as end:
            end.sendall(b"abc")
            with pytest.raises(ConnectionResetError):
                receive(end, 3)
    assert proxy.resets == 2
    with connect(proxy) as end:
        end.sendall(b"abc")
        assert receive(end, 3) == b"abc"


def test_proxy_sends_a_request_in_slices(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as end, proxy.under(Fault(request=Way(slice=2, delay_s=0.2))):
        started = time.monotonic()
        end.sendall(b"0123456789")
        assert receive(end, 10) == b"0123456789"
        assert time.monotonic() - started > 0.9


def test_proxy_delays_request_and_answer(proxy: FaultProxy) -> None:
    with connect(proxy) as end, proxy.under(Fault(request=Way(delay_s=0.1), answer=Way(delay_s=0.1))):
        started = time.monotonic()
        end.sendall(b"abc")
        assert receive(end, 3) == b"abc"
        assert time.monotonic() - started > 0.19


def test_proxy_swallows_bytes_and_resets_the_connection_when_healed(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as end:
        with proxy.under(Fault(request=Way(swallow=True))):
            end.sendall(b"abc")
            end.settimeout(0.2)
            with pytest.raises(TimeoutError):
                end.recv(1)
            while not any(link.swallowed for link in proxy._links):
                time.sleep(0.01)
        end.settimeout(30)
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    assert echo.heard == b""


def test_proxy_delivers_held_bytes_after_the_sender_has_left(proxy: FaultProxy, echo: Echo) -> None:
    with proxy.under(Fault(request=Way(hold=True))):
        with connect(proxy) as end:
            end.sendall(b"abc")
            time.sleep(0.1)
        assert echo.heard == b""
    assert echo.has_heard(b"abc")


def test_proxy_refuses_connections_until_it_is_healed(proxy: FaultProxy) -> None:
    with connect(proxy) as open_before:
        open_before.sendall(b"a")
        assert receive(open_before, 1) == b"a"
        with proxy.under(Fault(refuse=True)):
            with pytest.raises(ConnectionResetError):
                receive(open_before, 1)
            with pytest.raises(ConnectionRefusedError):
                connect(proxy)
    with connect(proxy) as end:
        end.sendall(b"a")
        assert receive(end, 1) == b"a"


def test_proxy_resets_the_client_if_the_server_is_away() -> None:
    with FaultProxy(free_port()) as proxy, pytest.raises(ConnectionResetError), connect(proxy) as end:
        receive(end, 1)
