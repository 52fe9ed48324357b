"""Weights of every kind reach the running server: trainer and vLLM agree after each is changed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.errors import raises
from tests.support.stack import Vllm

from gristmill import Manifest, PolicyVersion
from gristmill.internal.device_memory import BUFFER
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, claim_publishing
from gristmill_trainer.publish.sender import WeightSender
from gristmill_trainer.publish.servers import ModelServer, ServerList

CPU = torch.device("cpu")
IN_MEMORY = partial(DeviceMemoryTransport, device=CPU)


def _in_network(servers: ModelServers, folder: Path, served: Path) -> DeviceMemoryTransport:
    return DeviceMemoryTransport(servers, folder, served, device=CPU, sender=WeightSender(("127.0.0.1", 9), CPU))


PROMPT = [40 + place % 20 for place in range(300)]
"""Longer than a block of the prefix cache (128 tokens on a CPU), so that the cache takes part."""


def _kinds(policy: Policy) -> list[str]:
    """The parameters' names without layer numbers, one of each kind."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name, _ in policy.model.named_parameters()})


@pytest.fixture
def policy(vllm: Vllm) -> Policy:
    manifest = Manifest.read(vllm.models_dir)
    return Policy(ModelSource(manifest.weights_path, manifest.tokenizer_path, None, 512), "cpu")


@pytest.fixture
def publisher(vllm: Vllm, request: pytest.FixtureRequest) -> Iterator[FilesystemTransport]:
    server = ModelServer(vllm.url, claim_publishing(vllm.weights_dir), patience=30)
    manifest = Manifest.read(vllm.models_dir)
    kind: Callable[..., FilesystemTransport] = getattr(request, "param", FilesystemTransport)
    transport = kind(ModelServers([server]), vllm.weights_dir / "perturbed", Path(manifest.serve_path))
    yield transport
    transport.close()


def _served(vllm: Vllm) -> tuple[list[int], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    name = httpx.get(f"{vllm.url}/v1/models").json()["data"][0]["id"]
    sampling = {"max_tokens": 12, "temperature": 0.8, "logprobs": 0, "seed": 1, "ignore_eos": True}
    body = {"model": name, "token_ids": PROMPT, "sampling_params": sampling}
    choice = httpx.post(f"{vllm.url}/inference/v1/generate", json=body, timeout=60).json()["choices"][0]
    return choice["token_ids"], np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])


def _computed(policy: Policy, completion: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    tokens = torch.tensor([PROMPT + completion])
    with torch.no_grad():
        logits = policy.model(input_ids=tokens).logits[0].double() / 0.8
    logprobs = torch.log_softmax(logits, dim=-1)
    start = len(PROMPT)
    values: list[float] = [float(logprobs[start + i - 1, token]) for i, token in enumerate(completion)]
    return np.array(values)


@pytest.mark.parametrize(
    "publisher", [FilesystemTransport, IN_MEMORY, _in_network], indirect=True, ids=["filesystem", "ipc", "nccl"]
)
def test_server_applies_published_weights_of_every_kind(
    vllm: Vllm, policy: Policy, publisher: FilesystemTransport
) -> None:
    publisher.publish(policy.served_tensors(), PolicyVersion(1, 0))
    torch.manual_seed(0)
    step = 0
    kinds = _kinds(policy)
    assert len(kinds) >= 12, kinds
    for kind in kinds:
        completion, before = _served(vllm)
        pattern = re.compile(re.escape(kind).replace(r"\.\*\.", r"\.\d+\."))
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if pattern.fullmatch(name):
                    parameter.add_(0.05 * torch.randn_like(parameter))
        moved = np.abs(_computed(policy, completion) - before).max()
        assert moved > 0.005, f"{kind}: the change is too small to see ({moved})"
        step += 1
        publisher.publish(policy.served_tensors(), PolicyVersion(1, step))
        completion, after = _served(vllm)
        difference = np.abs(_computed(policy, completion) - after).max()
        assert difference < 0.001, f"{kind}: the server did not follow; log-probabilities are {difference} apart"
    assert httpx.get(f"{vllm.url}/weight_info").json()["weight_version"] == f"1.{step}"
    kept = [path.name for path in (vllm.weights_dir / "perturbed").iterdir() if path.name != BUFFER]
    assert sorted(kept) == [f"1.{step - 1}", f"1.{step}"]


def test_server_loads_weights_published_in_bfloat16(vllm: Vllm, policy: Policy, publisher: FilesystemTransport) -> None:
    """Publishes the weights in bfloat16, as for a server on CUDA. This server computes in float32."""
    policy.source = dataclasses.replace(policy.source, served_dtype="bfloat16")
    publisher.publish(policy.served_tensors(), PolicyVersion(1, 0))
    file = vllm.weights_dir / "perturbed" / "1.0" / "model.safetensors"
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.bfloat16())
    completion, served = _served(vllm)
    assert np.abs(_computed(policy, completion) - served).max() < 1e-4


def test_weights_with_another_shape_are_refused_before_they_reach_the_server(
    vllm: Vllm, policy: Policy, publisher: FilesystemTransport
) -> None:
    policy.model.resize_token_embeddings(policy.model.config.vocab_size + 8)
    with raises(PublishError, "shape_mismatch", tensor="lm_head.weight") as raised:
        publisher.publish(policy.served_tensors(), PolicyVersion(3, 0))
    assert raised.value.values["here"][0] == raised.value.values["served"][0] + 8
    assert httpx.get(f"{vllm.url}/health").status_code == 200


def test_developer_endpoints_need_the_publishers_token(vllm: Vllm) -> None:
    stranger = ModelServer(vllm.url, "wrong", patience=5)
    with raises(PublishError, "model_server_refused", url=vllm.url, request="POST /pause", status=401):
        stranger.call("POST", "/pause")
    assert httpx.get(f"{vllm.url}/is_paused").json() == {"is_paused": False}


def test_unreachable_server_is_named_with_the_time_it_was_tried() -> None:
    url = "http://127.0.0.1:9"
    with raises(PublishError, "model_server_unreachable", url=url, request="GET /v1/models") as raised:
        ServerList([url], patience=1).served()
    assert 1 <= raised.value.values["tried_for"] < 10
