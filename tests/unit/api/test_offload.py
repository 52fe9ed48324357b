"""Work on large bodies leaves the event loop's thread, work on small ones does not."""

from __future__ import annotations

import threading

from gristmill_api.offload import IN_LOOP, offload


async def test_only_large_work_is_done_on_another_thread() -> None:
    here = threading.get_ident()
    assert await offload(IN_LOOP, threading.get_ident) == here
    assert await offload(IN_LOOP + 1, threading.get_ident) != here
