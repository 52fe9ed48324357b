"""Fixtures that more than one service's tests use."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import redis
from tests.support.redis_server import RedisServer

# Tiny models gain nothing from several threads, and the threads of OpenMP and of BLAS spin while they wait for one
# another. The processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every machine, including CI, gets the same examples. Examples have no deadline, because machines may be busy.
hypothesis.settings.register_profile("gristmill", derandomize=True, deadline=None, max_examples=25)
# `make test-long` draws other examples each time.
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=200)
hypothesis.settings.load_profile("gristmill")


def pytest_configure() -> None:
    """Handles signals as in a terminal, because a program that starts in the background or by nohup ignores some."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replaces half characters in the captured output, because xdist cannot send them and would end the session."""
    report = yield
    report.sections = [(name, text.encode(errors="replace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """The redis-server of the APIs that outlive a test. A test that stops or kills Redis starts another server."""
    with RedisServer() as server:
        yield server
        # The client library and a check at the start try these commands, and work without them.
        dispensable = {"client|setinfo", "config|get"}
        assert server.refused() <= dispensable, "the API needs what gristmill_cli.local.redis_acl does not allow it"


@pytest.fixture(scope="session")
def lone_redis() -> Iterator[RedisServer]:
    """The redis-server of the tests that start their own APIs. An API of another test would take groups to archive."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty Redis: of `shared_redis` if the test or one of its fixtures uses it, and else of `lone_redis`."""
    name = "shared_redis" if "shared_redis" in request.fixturenames else "lone_redis"
    server: RedisServer = request.getfixturevalue(name)
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url
