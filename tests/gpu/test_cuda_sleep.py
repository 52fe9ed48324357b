"""A vLLM that sleeps on a CUDA card: it frees its memory, and serves the published weights afterwards."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from tests.support.ports import free_port
from tests.support.stack import VLLM_PYTHON, Output, start_vllm

from gristmill import Manifest, PolicyVersion
from gristmill_cli.local.processes import LocalStack
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, claim_publishing
from gristmill_trainer.publish.servers import ModelServer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card here"),
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason=f"no vLLM here ({VLLM_PYTHON})"),
]
SHARE = 0.2
"""Of the card's memory, for vLLM."""


def _free() -> float:
    """Returns the share of the card's memory that no process has."""
    free, whole = torch.cuda.mem_get_info()
    return free / whole


def _scores(url: str) -> list[float]:
    """Returns the log-probabilities of a prompt's tokens."""
    sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    body = {"model": "tiny", "token_ids": list(range(40, 60)), "sampling_params": sampling}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60).json()
    return [next(iter(one.values()))["logprob"] for one in answer["prompt_logprobs"][1:]]


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_server_gives_its_memory_back_during_a_sleep(tmp_path: Path, lora_rank: int) -> None:
    (tmp_path / "weights").mkdir()
    memory = {"DEVICE": "cuda", "MODEL_SLEEP": "1", "GPU_MEMORY_UTILIZATION": str(SHARE), "MODEL_CUDA_GRAPHS": "0"}
    with LocalStack(Output().add) as stack:
        port = free_port()
        start_vllm(stack, tmp_path / "weights", port, "tiny", tmp_path / "models", lora_rank, environ=memory)
        manifest, url = Manifest.read(tmp_path / "models"), f"http://127.0.0.1:{port}"
        source = ModelSource(
            manifest.weights_path, manifest.tokenizer_path, Path(manifest.serve_path), 512, manifest.lora_rank
        )
        policy = Policy(source, "cpu", lora=Lora(lora_rank, 16.0) if lora_rank else None)
        servers = ModelServers([ModelServer(url, claim_publishing(tmp_path / "weights"), patience=60)])
        describe = policy.describe_adapters if lora_rank else None
        publisher = FilesystemTransport(servers, tmp_path / "weights" / "run", None, describe)
        publisher.publish(policy.served_tensors(), PolicyVersion(1, 0))
        awake, before = _free(), _scores(url)
        for step in range(1, 4):
            publisher.sleep()
            assert _free() > awake + 0.75 * SHARE
            publisher.publish(policy.served_tensors(), PolicyVersion(1, step))
            assert abs(_free() - awake) < 0.1 * SHARE
            assert _scores(url) == before
        servers.close()
