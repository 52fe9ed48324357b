"""A client retries until its patience ends, which may happen during an attempt."""

from __future__ import annotations

import threading

from tests.support.errors import raises

from gristmill import ApiUnreachable, SyncClient


def test_call_ends_when_the_patience_of_its_client_ends() -> None:
    ended = threading.Event()
    with SyncClient("http://127.0.0.1:9", patience=lambda: 0.0 if ended.is_set() else 600.0) as client:
        threading.Timer(0.3, ended.set).start()
        with raises(ApiUnreachable, "api_unreachable", request="GET /v1/runs/run"):
            client.get_run("run")
    assert ended.is_set()
