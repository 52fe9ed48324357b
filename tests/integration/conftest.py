"""One vLLM for all tests that need a model server, because it takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.stack import MODELS_DIR, ApiServer, Output, Vllm, start_api, start_redis, start_vllm

from gristmill_cli.local.processes import LocalStack


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """The model service with `tiny`. Tests publish weights into it, so each test first publishes the weights that it
    needs."""
    output = Output()
    weights_dir: Path = tmp_path_factory.mktemp("weights")
    with LocalStack(output.add) as stack:
        port = free_port()
        start_vllm(stack, weights_dir, port)
        yield Vllm(f"http://127.0.0.1:{port}", weights_dir, MODELS_DIR, output)


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[ApiServer]:
    """A fresh trajectory API over a fresh Redis."""
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        yield ApiServer(f"http://127.0.0.1:{api_port}", output)
