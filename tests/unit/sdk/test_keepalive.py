"""A request to a machine that vanished fails after `GONE_S`, not after its time-out."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from gristmill import keepalive

# Runs in a network namespace of its own, whose loopback interface it takes away while a request waits.
_VANISH = """
import fcntl, socket, struct, sys, threading
import httpx
from gristmill import keepalive

def loopback(up):
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", up))

def accept(listener):
    connection, _ = listener.accept()
    connection.recv(65536)
    loopback(0)
    threading.Event().wait()

loopback(1)
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=accept, args=(listener,), daemon=True).start()
with httpx.Client(transport=keepalive.transport(), timeout=600) as client:
    try:
        client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")
    except httpx.TransportError as error:
        print(type(error).__name__)
"""


@pytest.mark.long
def test_request_to_a_machine_that_vanished_fails_before_its_time_out() -> None:
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-c", _VANISH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "ReadTimeout"


def test_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keepalive.transport() is not None
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert keepalive.transport() is None
    assert keepalive.async_transport(httpx.Limits()) is None
