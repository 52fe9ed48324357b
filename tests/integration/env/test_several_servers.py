"""Two real model servers, one of which dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from tests.integration.env.conftest import RUN, Environments, HandTrainer
from tests.support.stack import MODELS_DIR, Output, Vllm, start_vllm

from gristmill import SamplingParams
from gristmill_env.inference import GenerationRequest, ModelServers
from gristmill_env.settings import ServerConfig
from local_processes import LocalStack, Service, free_port


@dataclass(frozen=True)
class Second:
    """Another server of the same model, for one test: it may be killed."""

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


async def test_a_server_that_dies_in_the_middle_costs_no_completion(vllm: Vllm, second: Second) -> None:
    configs = [ServerConfig(base_url=vllm.url), ServerConfig(base_url=second.vllm.url)]
    long = SamplingParams(temperature=1.0, max_tokens=400)
    request = GenerationRequest(token_ids=[1, 2, 3], sampling=long, count=2, min_tokens=400)
    async with ModelServers(configs, patience=60) as servers:
        await servers.connect(patience=60)
        asked = [asyncio.create_task(servers.generate(request)) for _ in range(8)]
        await _until_running(second.vllm.url, 8)
        second.kill()
        groups = await asyncio.gather(*asked)
    assert [[c.length for c in group] for group in groups] == [[400, 400]] * 8


def test_no_row_of_a_run_is_lost_with_a_server(
    environments: Environments, trainer: HandTrainer, second: Second, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    both = f"server_configs: [{{base_url: '{trainer.vllm.url}'}}, {{base_url: '{second.vllm.url}'}}]\n"
    (environments.folder / "sums.yaml").write_text(RUN + both)
    other = replace(trainer, vllm=second.vllm)
    other.label("1.0")
    env = environments.here(trainer.url)
    trainer.take()
    groups = trainer.lease()
    assert _metric(httpx.get(f"{second.vllm.url}/metrics").text, "vllm:prompt_tokens_total") > 0, "it got no work"
    trainer.api.ack("sums", trainer.incarnation, ["b1.1"])
    second.kill()
    trainer.publish(1)
    groups += trainer.train(until=4)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    assert sorted(group.row for group in groups) == list(range(8))
    status = trainer.api.status("sums")
    assert (status.trained, status.dropped, status.outstanding) == (8, {}, 0)
    assert f"model server at {second.vllm.url}: " in caplog.text
    assert Counter(span.version for g in groups for spans in g.versions for span in spans).keys() == {
        "1.0", "1.1", "1.2", "1.3"
    }  # fmt: skip


async def _until_running(url: str, number: int) -> None:
    """Until the server itself counts so many sequences in its works."""
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            if _metric((await client.get(f"{url}/metrics")).text, "vllm:num_requests_running") >= number:
                return
            await asyncio.sleep(0.05)


def _metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))
