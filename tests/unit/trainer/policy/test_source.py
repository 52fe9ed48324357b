"""Which model is trained: the configuration, the manifest and the server must agree."""

from __future__ import annotations

import pytest

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
def test_another_model_or_revision_names_the_line_to_change(name: str) -> None:
    with pytest.raises(ModelError, match=f"MODEL={name}"):
        find_model(name, MANIFEST, SERVED)
