"""Which model is trained: the configuration, the manifest and the server must agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.errors import raises

from gristmill import Manifest
from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy.source import find_model

MANIFEST = Manifest(
    name="owner/name",
    requested="owner/name@v1",
    revision="a" * 40,
    tokenizer_path="/models/m",
    weights_path="/models/m",
    serve_path="/models/m-untied",
    sha256="",
    dtype="float32",
    max_model_len=64,
)
SERVED = {"id": "owner/name", "max_model_len": 64}


@pytest.mark.parametrize("name", [None, "owner/name", "owner/name@v1", "/models/m"])
def test_pinned_model_may_be_named_with_and_without_its_revision(name: str | None) -> None:
    assert find_model(name, MANIFEST, SERVED).weights == "/models/m"


@pytest.mark.parametrize("name", ["owner/other", "owner/name@v2"])
def test_other_model_or_revision_is_refused_with_the_line_to_change(name: str) -> None:
    with raises(ModelError, "model_mismatch", model_name=name, served="owner/name") as raised:
        find_model(name, MANIFEST, SERVED)
    assert f"MODEL={name}" in str(raised.value)


def test_weights_are_published_in_the_dtype_of_the_manifest() -> None:
    source = find_model(None, MANIFEST.model_copy(update={"dtype": "bfloat16", "lora_rank": 8}), SERVED)
    assert (source.served_weights, source.served_dtype) == (Path("/models/m-untied"), "bfloat16")
    assert (source.max_model_len, source.lora_rank) == (64, 8)


@pytest.mark.parametrize("manifest", [None, MANIFEST.model_copy(update={"dtype": "bfloat16"})])
def test_a_server_without_a_manifest_gets_float32(manifest: Manifest | None) -> None:
    source = find_model("other", manifest, {"id": "other"})
    assert (source.served_weights, source.served_dtype, source.lora_rank) == (None, "float32", 0)
