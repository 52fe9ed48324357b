"""Two real model servers, or two ways to one server, of which one fails."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.integration.env.conftest import RUN, Environments, HandTrainer
from tests.support.fault_proxy import Fault, FaultProxy, Way
from tests.support.ports import free_port
from tests.support.stack import MODELS_DIR, Output, Vllm, start_vllm

from gristmill import SamplingParams
from gristmill.internal.logs import line
from gristmill_cli.local.processes import LocalStack, Service
from gristmill_env.inference import GenerationRequest, ModelServers
from gristmill_env.settings.servers import ServerConfig

_COUNT = 16


@dataclass(frozen=True)
class Second:
    """Starts another server of the same model, for one test, which may kill it."""

    vllm: Vllm
    service: Service

    def kill(self) -> None:
        os.killpg(self.service.process.pid, signal.SIGKILL)
        self.service.process.wait()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Second]:
    output = Output()
    weights_dir = tmp_path / "second"
    weights_dir.mkdir()
    with LocalStack(output.add) as stack:
        port = free_port()
        service = start_vllm(stack, weights_dir, port)
        yield Second(Vllm(f"http://127.0.0.1:{port}", weights_dir, MODELS_DIR, output), service)


@pytest.mark.long
async def test_server_that_dies_during_generation_loses_no_completion(vllm: Vllm, second: Second) -> None:
    configs = [ServerConfig(base_url=vllm.url), ServerConfig(base_url=second.vllm.url)]
    # vLLM's highest temperature, and many at once: some of each request's completions are long.
    long = SamplingParams(temperature=2.0, max_tokens=400)
    request = GenerationRequest(token_ids=[1, 2, 3], sampling=long, count=_COUNT)
    async with ModelServers(configs, patience=60) as servers:
        await servers.connect(patience=60)
        asked = [asyncio.create_task(servers.generate(request)) for _ in range(8)]
        await _until_running(second.vllm.url, 4)
        second.kill()
        groups = await asyncio.gather(*asked)
    assert [[c.finish_reason in {"stop", "length"} for c in group] for group in groups] == [[True] * _COUNT] * 8


def test_no_row_of_a_run_is_lost_with_a_server_and_it_gets_work_when_it_is_back(
    environments: Environments, trainer: HandTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with FaultProxy(int(trainer.vllm.url.rpartition(":")[2])) as proxy:
        failing = f"http://127.0.0.1:{proxy.port}"
        # First in the list, so it is asked if two servers have equally little to do.
        both = f"server_configs: [{{base_url: '{failing}'}}, {{base_url: '{trainer.vllm.url}'}}]\n"
        (environments.folder / "sums.yaml").write_text(RUN + both)
        trainer.trainer["training_steps"] = 1000
        env = environments.here(trainer.url)
        trainer.take()
        groups = trainer.train(until=1)
        assert proxy.passed("answer") > 0
        with proxy.under(Fault(answer=Way(reset_after=0))):  # the server is killed while it generates
            while not proxy.resets:  # a quick answer may have passed before the fault
                assert trainer.step < 50, "it was never asked again"
                groups += trainer.train(until=trainer.step + 1)
        with proxy.under(Fault(refuse=True)):
            groups += trainer.train(until=trainer.step + 1)
        assert caplog.text.count(line("model server", state="away", url=failing)) == 1
        while line("model server", state="up", url=failing) not in caplog.text:
            assert trainer.step < 200, "it was never asked again"
            groups += trainer.train(until=trainer.step + 1)
        trainer.api.finish("sums", trainer.incarnation)
        env.join()
    assert sorted(group.row for group in groups) == list(range(len(groups)))
    status = trainer.api.status("sums")
    assert (status.trained, status.dropped, status.outstanding) == (len(groups), {}, 0)


async def _until_running(url: str, number: int) -> None:
    """Waits until the server itself counts this many running sequences."""
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            if _metric((await client.get(f"{url}/metrics")).text, "vllm:num_requests_running") >= number:
                return
            await asyncio.sleep(0.05)


def _metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))
