"""The trained model, as the server sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.errors import raises
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.policy.source import config_without_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
MODELS: dict[str, Callable[[], Any]] = {
    "moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    ),
    "own_head": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
}


def assert_each_is_visited(policy: Policy) -> dict[str, torch.Tensor]:
    """Returns the served tensors. A receipt has the sums of the visited tensors, which must be the same."""
    visited: dict[str, torch.Tensor] = {}
    served = policy.served_tensors(visit=visited.__setitem__)
    assert visited.keys() == served.keys()
    assert all(torch.equal(tensor, visited[name]) for name, tensor in served.items())
    return served


def test_served_tensors_include_a_tied_head(policy: Policy) -> None:
    assert policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
    tensors = assert_each_is_visited(policy)
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert tensors["lm_head.weight"].data_ptr() != tensors["model.embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("lora", [None, Lora(2, 8.0)], ids=["whole", "merged"])
def test_served_tensors_have_the_servers_dtype_and_the_policys_values(model_dir: Path, lora: Lora | None) -> None:
    source = ModelSource(str(model_dir), str(model_dir), None, 512)
    policy = Policy(source, "cpu", lora=lora)
    whole = policy.served_tensors()
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    policy.source = dataclasses.replace(source, served_dtype="bfloat16")
    served = assert_each_is_visited(policy)
    assert {tensor.dtype for tensor in served.values()} == {torch.bfloat16}
    assert served.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in served.items())
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["moe", "own_head"])
def test_served_tensors_match_names_and_shapes_of_the_models_files(name: str, tmp_path: Path) -> None:
    """Experts are joined in memory; not every head is called lm_head."""
    folder = tmp_path / name
    MODELS[name]().save_pretrained(folder)
    policy = Policy(ModelSource.of(str(folder)), "cpu", packing=False)
    served = assert_each_is_visited(policy)
    files = load_file(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in served.items()} == {
        name: tensor.shape for name, tensor in files.items()
    }
    assert all(torch.equal(tensor, files[name]) for name, tensor in served.items())


def test_policy_on_a_missing_device_names_the_device(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ModelError, "no_gpu"):
        Policy(ModelSource.of(str(model_dir)), "cuda")


def test_cuda_build_that_sees_no_gpu_is_named(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for build in (None, "13.0"):
        monkeypatch.setattr(torch.version, "cuda", build)
        caplog.clear()
        assert Policy(ModelSource.of(str(model_dir)), "auto").device.type == "cpu"
        assert any(record.levelname == "WARNING" for record in caplog.records) == (build is not None)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("named", ["owner/repository", "owner/repository@main:kernel", "eager"])
def test_model_does_not_choose_the_code_of_its_attention(model_dir: Path, tmp_path: Path, key: str, named: str) -> None:
    """transformers asks the hub for the code of an attention with the name of a repository."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: named}))
    policy = Policy(ModelSource.of(str(folder)), "cpu")
    assert policy.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "named", [{"text_config": "owner/repository"}, {"": "eager", "vision_config": "owner/repository"}]
)
def test_parts_of_a_model_do_not_choose_the_code_of_their_attention(tmp_path: Path, named: dict[str, str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "attn_implementation": named}))
    config = config_without_attention(str(tmp_path))
    chosen = [one._attn_implementation for one in (config, config.text_config, config.vision_config)]
    assert chosen == [None] * 3


def _without(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file, {"format": "pt"})


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no mlp": (lambda folder: _without(folder, "model.layers.1.mlp.up_proj.weight"), "model_incomplete"),
    "no head": (lambda folder: _config(folder, tie_word_embeddings=False), "model_incomplete"),
    "quantized": (lambda folder: _config(folder, quantization_config={"quant_method": "awq"}), "model_quantized"),
    "adapters": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "model_has_adapters"),
    "another vocabulary": (lambda folder: _config(folder, vocab_size=99), "model_unreadable"),
    "a torn file": (lambda folder: os.truncate(folder / "model.safetensors", 500), "model_unreadable"),
}


@pytest.mark.parametrize("how", UNUSABLE)
def test_model_that_would_be_trained_with_other_weights_is_refused(model_dir: Path, tmp_path: Path, how: str) -> None:
    """transformers fills in random weights for those that are missing."""
    change, code = UNUSABLE[how]
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    change(folder)
    with raises(ModelError, code, model=str(folder)):
        Policy(ModelSource.of(str(folder)), "cpu")
