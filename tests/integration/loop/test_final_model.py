"""A finished run's folder is an ordinary model to a vLLM server."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_vllm

from gristmill import Manifest
from gristmill_cli.local.processes import LocalStack
from gristmill_trainer.export import RunFacts, export_model
from gristmill_trainer.policy import Lora, ModelSource, Policy

PROMPT = "What is 3 + 4?"


@pytest.mark.long
def test_vllm_serves_the_exported_model_with_the_trained_weights(vllm: Vllm, tmp_path: Path) -> None:
    """Trained with adapters, which are merged into the weights. Checks name, chat template and log-probabilities."""
    manifest = Manifest.read(vllm.models_dir)
    source = ModelSource(manifest.weights_path, manifest.tokenizer_path, Path(manifest.serve_path), 512)
    torch.manual_seed(0)
    policy = Policy(source, "cpu", lora=Lora(4, 16.0))
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    facts = RunFacts(
        run_id="sums",
        base_model="tiny",
        dataset="sums",
        rewards=["accuracy"],
        objective="dapo",
        steps=1,
        policy_version="1.1",
        final_reward=1.0,
        command="python -m gristmill_trainer",
        versions={},
    )
    folder = tmp_path / "model"
    export_model(folder, policy.save_whole, source.tokenizer, facts)
    with LocalStack(Output().add) as stack:
        port = free_port()
        (tmp_path / "weights").mkdir()
        start_vllm(stack, tmp_path / "weights", port, model=str(folder), models_dir=tmp_path / "models")
        (served,) = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        asked = {
            "model": served["id"],
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 8,
            "temperature": 1.0,
            "logprobs": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, timeout=60).json()
    prompt, completion = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    said = np.array([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])
    with torch.no_grad():
        logprobs = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(dim=-1)
    known = [float(logprobs[len(prompt) + place - 1, token]) for place, token in enumerate(completion)]
    assert np.abs(said - known).max() < 1e-3
