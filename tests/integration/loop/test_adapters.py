"""A model server that loads LoRA adapters: it serves each new adapter, and a run trains with them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.support.ports import free_port
from tests.support.stack import MODELS_DIR, ROOT, Output, Vllm, start_api, start_redis, start_vllm
from transformers import AutoModelForCausalLM

from gristmill import Manifest, PolicyVersion
from gristmill.folders import RunFolder
from gristmill.internal.lines import read_jsonl
from gristmill.internal.receipts import RECEIPTS_FILE, read_receipts
from gristmill_cli.local.processes import LocalStack
from gristmill_trainer.doctor import after_run
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, claim_publishing
from gristmill_trainer.publish.servers import ModelServer

RANK = 4
NAME, COMMIT = "owner/tiny", "a" * 40
PROMPT = [40 + place % 20 for place in range(300)]
"""Longer than a block of the prefix cache (128 tokens on a CPU), so that the cache takes part."""
SAMPLING = {"max_tokens": 12, "temperature": 0.8, "logprobs": 0, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """The model service for adapters of `tiny` at a pinned revision of the hub. `vllm` has built the model.

    The served name is the hub's id without the revision, so a comparison with MODEL would never find the adapter.
    """
    output = Output()
    folder = tmp_path_factory.mktemp("lora")
    original = Manifest.read(MODELS_DIR).weights_path
    shutil.copytree(original, folder / "hub" / "models--owner--tiny" / "snapshots" / COMMIT)
    (folder / "weights").mkdir()
    models = folder / "models"
    with LocalStack(output.add) as stack:
        port = free_port()
        model = f"{NAME}@{COMMIT}"
        hub = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
        start_vllm(stack, folder / "weights", port, model, models, RANK, environ=hub)
        yield Vllm(f"http://127.0.0.1:{port}", folder / "weights", models, output)


def _source(server: Vllm) -> ModelSource:
    manifest = Manifest.read(server.models_dir)
    assert manifest.lora_rank == 8, "vLLM's next larger one"
    path = Path(manifest.serve_path)
    return ModelSource(manifest.weights_path, manifest.tokenizer_path, path, 512, manifest.lora_rank)


def _generated(server: Vllm) -> tuple[list[int], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Returns a completion's tokens and the server's log-probabilities of them, requested by the model's name."""
    body = {"model": NAME, "token_ids": PROMPT, "sampling_params": SAMPLING}
    choice = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=60).json()["choices"][0]
    return choice["token_ids"], np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])


def _generated_for_atropos(server: Vllm) -> tuple[list[int], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Returns the same by the endpoint that names no model."""
    body = {"prompt": {"prompt_token_ids": PROMPT}, **SAMPLING}
    entries = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["logprobs"][0]
    pairs = [pair for (entry,) in entries for pair in entry.items()]
    return [int(token) for token, _ in pairs], np.array([logprob for _, logprob in pairs])


def _computed(policy: Policy, completion: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    tokens = torch.tensor([PROMPT + completion])
    with torch.no_grad():
        logits = policy.model(input_ids=tokens).logits[0].double() / 0.8
    logprobs = torch.log_softmax(logits, dim=-1)
    values = [float(logprobs[len(PROMPT) + i - 1, token]) for i, token in enumerate(completion)]
    return np.array(values)


@pytest.mark.long
def test_server_applies_published_adapters_of_every_layer(server: Vllm) -> None:
    policy = Policy(_source(server), "cpu", lora=Lora(RANK, 8.0))
    completion, before = _generated(server)
    assert np.abs(_computed(policy, completion) - before).max() < 1e-4, "the first adapter changes something"

    target = ModelServers([ModelServer(server.url, claim_publishing(server.weights_dir), patience=30)])
    folder = server.weights_dir / "followed"
    publisher = FilesystemTransport(target, folder, policy.source.served_weights, policy.describe_adapters)
    torch.manual_seed(0)
    kinds = sorted({name.split(".lora_")[0].rpartition(".")[2] for name, _ in _adapters(policy)})
    assert len(kinds) == 7, kinds
    for step, kind in enumerate(kinds):
        with torch.no_grad():
            for name, parameter in _adapters(policy):
                if f".{kind}.lora_" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        completion, before = _generated(server)
        assert np.abs(_computed(policy, completion) - before).max() > 0.005, f"{kind}: too small a change to see"
        if step % 2:
            publisher.sleep()  # The server keeps the base model.
        publisher.publish(policy.served_tensors(), PolicyVersion(1, step))
        for ask in (_generated, _generated_for_atropos):
            completion, after = ask(server)
            difference = np.abs(_computed(policy, completion) - after).max()
            assert difference < 0.001, f"{kind}, {ask.__name__}: log-probabilities are {difference} apart"
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == "1.6"
    assert sorted(path.name for path in folder.iterdir()) == ["1.5", "1.6"]
    whole = sum(path.stat().st_size for path in Path(policy.source.weights).glob("*.safetensors"))
    assert sum(path.stat().st_size for path in (folder / "1.6").iterdir()) < whole / 10


@pytest.mark.long
def test_run_trains_adapters_and_exports_a_whole_model(server: Vllm, tmp_path: Path) -> None:
    """The environment is one step ahead, so adapters arrive while completions are under way."""
    settings = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    for key in ("dataset_path", "eval_dataset_path"):
        settings["dataset"][key] = str(ROOT / "configs" / settings["dataset"][key])
    lora = {"lora_rank": RANK, "lora_alpha": 16, "training_steps": 8, "max_staleness": 1, "checkpoint_interval": 4}
    settings["trainer"] |= lora
    (tmp_path / "adapters.yaml").write_text(yaml.safe_dump(settings))
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port, GRISTMILL_RUNS_DIR=str(tmp_path / "runs"))
        places = server.environ(f"http://127.0.0.1:{api_port}", tmp_path / "runs", tmp_path)
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer"], places)
        serve = [sys.executable, "-m", "gristmill_env", "serve", "--config", "adapters"]
        env = stack.start("env", serve, places)
        stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=180)
        stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
    rows = read_jsonl(tmp_path / "runs" / "adapters" / "metrics.jsonl")
    assert len(rows) == 8
    assert min(row["grad_norm"] for row in rows) > 0
    fresh = [row for row in rows if row["staleness_mean"] == 0]
    assert fresh
    assert max(row["rollout_logprob_diff_max"] for row in fresh) < 1e-3
    assert max(row["rollout_logprob_diff_max"] for row in rows) < 1.0
    receipts = read_receipts(tmp_path / "runs" / "adapters" / RECEIPTS_FILE)
    assert [one.version for one in receipts] == [f"1.{step}" for step in range(9)]
    for one in receipts:
        # The change of a step depends on the groups that arrive first. Only a change of about the bound is unproven.
        assert one.difference is not None
        assert one.difference <= one.bound
        small = one.wanted_change is not None and one.wanted_change <= one.bound + one.difference
        assert one.state == "ok" or (small and one.state == "unproven"), one
    assert max(one.change for one in receipts[1:] if one.change is not None) > 2 * receipts[0].bound
    (last,) = (server.weights_dir / "adapters").glob("1.8")
    assert load_file(last / "adapter_model.safetensors").keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "adapters" / "model")
    assert not [name for name in model.state_dict() if "lora" in name]
    checks = after_run(RunFolder.open(tmp_path / "runs" / "adapters"), "adapters", places)
    # A version is checked if it sampled a whole group alone. On a slow machine version 1.4 may have sampled none.
    found = {check.name: check.state for check in checks}
    assert found in ({"weights 1.0": "ok"}, {"weights 1.0": "ok", "weights 1.4": "ok"})


def _adapters(policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in policy.model.named_parameters() if ".lora_" in name]
