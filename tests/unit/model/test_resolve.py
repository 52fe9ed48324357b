"""MODEL becomes folders; what cannot is told in one clear line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tests.unit.model.models import save_random
from transformers import AutoModelForCausalLM, AutoTokenizer

from gristmill_model.cache import BUILDING, built, locked
from gristmill_model.errors import ModelError
from gristmill_model.resolve import resolve


@pytest.mark.parametrize("name", ["tinyy", "/no/such/folder", "./here", "a/b/c", "two words/x"])
def test_neither_a_folder_nor_a_hub_id(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="no folder here and no hub id") as caught:
        resolve(name, tmp_path / "models")
    assert "\n" not in str(caught.value)
    assert "tiny, smollm2" in str(caught.value)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path / "weights"), tmp_path / "models")


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    folder = save_random(tmp_path / "weights", tied=True)
    (folder / "model.safetensors").rename(folder / "model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        resolve(str(folder), tmp_path / "models")


def test_a_hub_out_of_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="the hub cannot be reached for 'nobody/nothing'") as caught:
        resolve("nobody/nothing", tmp_path / "models")
    assert "\n" not in str(caught.value)


def test_a_folder_elsewhere_moves_in_and_is_served_untied(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = save_random(tmp_path / "weights", tied=True)
    resolved = resolve(str(folder), models)
    assert resolved.weights_path.parent == resolved.serve_path.parent == models
    assert AutoTokenizer.from_pretrained(resolved.serve_path).encode("ab") == [97, 98]
    assert resolve(str(folder), models) == resolved
    save_random(folder, tied=True, seed=1)
    assert resolve(str(folder), models).sha256 != resolved.sha256


def test_an_untied_folder_is_served_as_it_is(tmp_path: Path) -> None:
    resolved = resolve(str(save_random(tmp_path / "weights", tied=False)), tmp_path / "models")
    assert resolved.serve_path == resolved.weights_path


def test_the_untied_copy_computes_the_same(tmp_path: Path) -> None:
    resolved = resolve(str(save_random(tmp_path / "weights", tied=True)), tmp_path / "models")
    original = AutoModelForCausalLM.from_pretrained(resolved.weights_path)
    served = AutoModelForCausalLM.from_pretrained(resolved.serve_path)
    assert original.config.tie_word_embeddings
    assert not served.config.tie_word_embeddings
    assert served.lm_head.weight.data_ptr() != served.model.embed_tokens.weight.data_ptr()
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(original(tokens).logits, served(tokens).logits)


def test_files_are_open_to_other_users(tmp_path: Path) -> None:
    resolved = resolve(str(save_random(tmp_path / "weights", tied=True)), tmp_path / "models")
    for folder in (resolved.weights_path, resolved.serve_path):
        assert folder.stat().st_mode & 0o555 == 0o555
        assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.iterdir())


def test_a_build_that_fails_leaves_nothing_and_is_swept(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise InterruptedError

    with pytest.raises(InterruptedError), locked(tmp_path):
        built(tmp_path, "name", half)
    assert not (tmp_path / "name").exists()
    with locked(tmp_path):
        assert not list(tmp_path.glob(f"{BUILDING}*"))


def test_a_kill_in_the_middle_leaves_nothing_half_made(tmp_path: Path) -> None:
    def killed(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        os._exit(9)

    child = os.fork()
    if child == 0:
        with locked(tmp_path):
            built(tmp_path, "name", killed)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "name").exists()
    with locked(tmp_path):  # the dead process holds no lock
        assert built(tmp_path, "name", lambda folder: (folder / "a").touch()).is_dir()
    assert not list(tmp_path.glob(f"{BUILDING}*"))
