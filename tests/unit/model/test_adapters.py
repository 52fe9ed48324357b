"""A server for LoRA adapters: how vLLM is started, the first adapter, and which requests use the adapter."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file
from tests.support.errors import raises
from tests.unit.model.models import save_random
from transformers import AutoModelForCausalLM

from gristmill.model_servers import GENERATE, generation
from gristmill_model.__main__ import describe
from gristmill_model.errors import ModelError
from gristmill_model.lora import SERVED_MODEL, LoraRouting, first_adapter
from gristmill_model.resolve import resolve
from gristmill_model.server import arguments, environment
from gristmill_model.settings import Settings

COMMIT = "a" * 40


def _settings(tmp_path: Path, **environ: str) -> Settings:
    folders = {"GRISTMILL_MODELS_DIR": str(tmp_path / "models"), "GRISTMILL_WEIGHTS_DIR": str(tmp_path / "weights")}
    return Settings.read({**folders, **environ}, cuda_available=False)


def test_vllm_is_started_for_one_adapter_at_most_that_large(tmp_path: Path) -> None:
    chosen = _settings(tmp_path, MODEL=str(save_random(tmp_path / "model", tied=True)), LORA_RANK="12")
    resolved = resolve(chosen.model, chosen.models_dir)
    manifest = describe(resolved, chosen)
    assert manifest.lora_rank == 16
    folder = first_adapter(resolved.weights_path, chosen.models_dir)
    command = arguments(chosen, manifest, folder)
    options = dict(itertools.pairwise(command))
    assert (options["--max-lora-rank"], options["--max-loras"]) == ("16", "1")
    assert json.loads(options["--lora-modules"]) == {"name": "lora", "path": str(folder)}
    layers = [command[place + 1] for place, text in enumerate(command) if text == "--middleware"]
    # From the inside out: the request of /generate to /v1/completions goes through the adapter too.
    names = [layer.rpartition(".")[2] for layer in layers]
    assert names == ["LoraRouting", "AtroposGenerate", "DeveloperGate"]
    assert "--enable-lora" not in arguments(chosen, manifest)


@pytest.mark.parametrize("rank", ["many", "-1", "513", "1.5"])
def test_lora_rank_that_vllm_does_not_support_is_refused(tmp_path: Path, rank: str) -> None:
    with raises(ModelError, "invalid_variable", variable="LORA_RANK", value=rank):
        _settings(tmp_path, LORA_RANK=rank)


def test_unset_lora_rank_means_no_adapter(tmp_path: Path) -> None:
    assert _settings(tmp_path, LORA_RANK="").lora_rank == _settings(tmp_path).lora_rank == 0


def test_first_adapter_is_all_zeros_and_loads_in_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    model = save_random(tmp_path / "model", tied=True)
    folder = first_adapter(model, tmp_path / "models")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7  # of one layer's seven matrices; the head has none
    assert not any(tensor.any() for tensor in tensors.values())
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder))
    assert {name.replace(".default", "") for name in adapted.state_dict() if ".lora_" in name} == tensors.keys()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}, {"model": "served"}])
def test_request_for_the_served_model_is_sent_to_its_adapter(path: str, named: dict[str, Any]) -> None:
    scope, body = _passed_on(path, json.dumps({"token_ids": [1, 2], **named}).encode())
    assert json.loads(body) == {"token_ids": [1, 2], "model": "lora"}
    assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()


@pytest.mark.parametrize("body", [b'{"model": "another"}', b'{"model": 1}', b"[1]", b"no json", b"", b"[" * 100_000])
def test_request_for_another_model_is_passed_on_unchanged(body: bytes) -> None:
    assert _passed_on("/v1/completions", body)[1] == body


def test_request_to_another_path_is_passed_on_unchanged() -> None:
    assert _passed_on("/tokenize", b'{"model": "served"}')[1] == b'{"model": "served"}'


@pytest.mark.parametrize(
    "spelled",
    [
        "owner/name",
        f"owner/name@{COMMIT}",
        "owner/name@v1/first",
        "{folder}",
        "{folder}/",
        "{folder}/../mod@el",
        "./mod@el",
        "lora",
        "lora/",
    ],
)
def test_every_spelling_of_the_model_reaches_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str
) -> None:
    """By the name that vLLM is started with, which is also the name in the requests of environments and receipts."""
    folder = save_random(tmp_path / "mod@el", tied=False)
    shutil.copytree(folder, tmp_path / "lora")
    hub = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(folder, hub / "snapshots" / COMMIT)
    for ref in ("main", "v1/first"):
        (hub / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (hub / "refs" / ref).write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    chosen = _settings(tmp_path, MODEL=spelled.format(folder=folder), LORA_RANK="8")
    resolved = resolve(chosen.model, chosen.models_dir)
    manifest = describe(resolved, chosen)
    options = dict(itertools.pairwise(arguments(chosen, manifest, tmp_path)))
    served = options["--served-model-name"]
    assert served == manifest.name
    environ = environment(chosen, manifest, tmp_path, {"MODEL": chosen.model, "VLLM_SKIP_MODEL_NAME_VALIDATION": "1"})
    assert environ["VLLM_SKIP_MODEL_NAME_VALIDATION"] == "0", "vLLM takes any name for the model without the adapter"
    body = json.dumps(generation(served, [1, 2], {})).encode()
    assert json.loads(_passed_on(GENERATE, body, environ)[1])["model"] == "lora"


def _passed_on(path: str, body: bytes, environ: Mapping[str, str] | None = None) -> tuple[dict[str, Any], bytes]:
    """Returns scope and body that the application gets. `environ`: of vLLM's process."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend((scope, (await receive())["body"]))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", b"1")]}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environ or {SERVED_MODEL: "served"}).items():
            patch.setenv(name, value)
        asyncio.run(LoraRouting(app)(scope, receive, send))
    return dict(seen[0]), seen[1]
