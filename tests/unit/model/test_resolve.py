"""MODEL becomes folders; an unusable MODEL is reported in one clear line."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import httpx2
import pytest
import torch
from huggingface_hub import constants
from tests.support.errors import raises
from tests.support.http_server import Answer, HttpServer
from tests.unit.model.models import save_random
from transformers import AutoModelForCausalLM, AutoTokenizer

from gristmill_model.__main__ import describe
from gristmill_model.cache import BUILDING, DIGEST_FILE, built, locked
from gristmill_model.errors import ModelError
from gristmill_model.resolve import resolve
from gristmill_model.settings import Settings


@pytest.mark.parametrize("name", ["tinyy", "/no/such/folder", "./here", "a/b/c", "two words/x", "a/b@", "tiny@main"])
def test_resolve_refuses_a_name_that_is_neither_a_folder_nor_a_hub_id(tmp_path: Path, name: str) -> None:
    with raises(ModelError, "model_missing", model=name, known=("tiny", "smollm2")) as caught:
        resolve(name, tmp_path / "models")
    assert "\n" not in str(caught.value)
    assert "tiny, smollm2" in str(caught.value)


def test_resolve_refuses_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with raises(ModelError, "model_config_missing", model=str(tmp_path / "weights")):
        resolve(str(tmp_path / "weights"), tmp_path / "models")


def test_resolve_refuses_a_folder_without_safetensors(tmp_path: Path) -> None:
    folder = save_random(tmp_path / "weights", tied=True)
    (folder / "model.safetensors").rename(folder / "model.bin")
    with raises(ModelError, "model_weights_missing", model=str(folder)):
        resolve(str(folder), tmp_path / "models")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"model_type": "unknown"}'),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"),
    ],
)
def test_resolve_refuses_a_folder_that_cannot_be_read(tmp_path: Path, file: str, text: str) -> None:
    folder = save_random(tmp_path / "weights", tied=True)
    (folder / file).write_text(text)
    with raises(ModelError, "model_unreadable", model=str(folder)):
        resolve(str(folder), tmp_path / "models")


def test_resolve_names_a_hub_that_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises(ModelError, "hub_unreachable", model="nobody/nothing") as caught:
        resolve("nobody/nothing", tmp_path / "models")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        httpx2.ProxyError("407 Proxy Authentication Required"),
        httpx2.ReadTimeout("slow"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_of_the_network_is_reported_with_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("gristmill_model.resolve.snapshot_download", fails)
    with raises(ModelError, "hub_unreachable", model="owner/name") as caught:
        resolve("owner/name", tmp_path / "models")
    assert str(error) in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_error_of_the_disk_is_not_one_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("gristmill_model.resolve.snapshot_download", fails)
    with pytest.raises(OSError, match=os.strerror(number)):
        resolve("owner/name", tmp_path / "models")


def hub_model(home: Path, commits: dict[str, int], refs: dict[str, str]) -> None:
    """Creates a hub's cache with the model owner/name, made from a seed at each commit."""
    folder = home / "models--owner--name"
    for commit, seed in commits.items():
        save_random(folder / "snapshots" / commit, tied=False, seed=seed)
    for ref, commit in refs.items():
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)


def test_hub_id_takes_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = "a" * 40, "b" * 40
    hub_model(tmp_path / "hub", {old: 1, new: 2}, {"main": new, "v1/first": old})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    models = tmp_path / "models"
    newest = resolve("owner/name", models)
    assert (newest.name, newest.revision) == ("owner/name", new)
    for revision in (old, "v1/first"):
        pinned = resolve(f"owner/name@{revision}", models)
        assert (pinned.name, pinned.requested, pinned.revision) == ("owner/name", f"owner/name@{revision}", old)
        assert pinned.sha256 != newest.sha256
    manifest = describe(pinned, Settings.read({"GRISTMILL_MODELS_DIR": str(models)}, cuda_available=False))
    assert (manifest.name, manifest.requested, manifest.revision) == ("owner/name", "owner/name@v1/first", old)
    with raises(ModelError, "hub_unreachable", model="owner/name", revision="v2"):
        resolve("owner/name@v2", models)


@pytest.mark.parametrize(
    ("answer", "code", "named"),
    [
        ("RevisionNotFound", "model_revision_missing", "'v2'"),
        ("GatedRepo", "model_gated", "HF_TOKEN_FILE"),
        ("RepoNotFound", "model_missing", "HF_TOKEN_FILE"),
    ],
)
def test_hub_errors_name_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: str, named: str
) -> None:
    refusal = Answer(403 if answer == "GatedRepo" else 404, headers={"X-Error-Code": answer})
    with HttpServer(lambda request: refusal) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        with raises(ModelError, code, model="owner/name") as raised:
            resolve("owner/name@v2", tmp_path / "models")
    assert named in str(raised.value)


def test_resolve_copies_an_outside_folder_and_serves_it_untied(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = save_random(tmp_path / "weights", tied=True)
    resolved = resolve(str(folder), models)
    assert resolved.weights_path.parent == resolved.serve_path.parent == models
    assert AutoTokenizer.from_pretrained(resolved.serve_path).encode("ab") == [97, 98]
    assert resolve(str(folder), models) == resolved
    save_random(folder, tied=True, seed=1)
    assert resolve(str(folder), models).sha256 != resolved.sha256


def test_second_format_of_the_weights_is_not_served(tmp_path: Path) -> None:
    folder = save_random(tmp_path / "weights", tied=True)
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    served = resolve(str(folder), tmp_path / "models").serve_path
    assert len(list(served.glob("*.safetensors"))) == 2, "the model's, and its head"


def test_folders_of_one_name_within_the_models_have_their_own_copies(tmp_path: Path) -> None:
    first, second = (save_random(tmp_path / part / "foo", tied=True, seed=seed) for seed, part in enumerate("ab"))
    one, other = (resolve(str(folder), tmp_path) for folder in (first, second))
    assert one.weights_path != other.weights_path
    assert one.serve_path != other.serve_path
    save_random(first, tied=True, seed=5)
    assert resolve(str(first), tmp_path).serve_path not in (one.serve_path, other.serve_path)


def test_a_folder_of_the_users_is_not_shared_with_the_models(tmp_path: Path) -> None:
    weights = save_random(tmp_path / "weights", tied=True) / "model.safetensors"
    weights.chmod(0o600)
    before = weights.read_bytes()
    resolved = resolve(str(weights.parent), tmp_path / "models")
    assert weights.stat().st_mode & 0o777 == 0o600
    weights.write_bytes(bytes(len(before)))
    assert (resolved.weights_path / "model.safetensors").read_bytes() == before


def test_a_copy_of_a_built_model_is_digested_again(tmp_path: Path) -> None:
    built_model = resolve(str(save_random(tmp_path / "weights", tied=False)), tmp_path / "models")
    assert (built_model.weights_path / DIGEST_FILE).is_file()
    copy = Path(shutil.copytree(built_model.weights_path, tmp_path / "models" / "copy"))
    other = save_random(tmp_path / "other", tied=False, seed=3) / "model.safetensors"
    shutil.copyfile(other, copy / "model.safetensors")
    assert resolve(str(copy), tmp_path / "models").sha256 != built_model.sha256
    outside = Path(shutil.copytree(copy, tmp_path / "outside"))
    assert resolve(str(outside), tmp_path / "models").sha256 == resolve(str(copy), tmp_path / "models").sha256


def test_resolve_serves_an_untied_folder_unchanged(tmp_path: Path) -> None:
    resolved = resolve(str(save_random(tmp_path / "weights", tied=False)), tmp_path / "models")
    assert resolved.serve_path == resolved.weights_path


def test_untied_copy_computes_the_same_logits(tmp_path: Path) -> None:
    resolved = resolve(str(save_random(tmp_path / "weights", tied=True)), tmp_path / "models")
    original = AutoModelForCausalLM.from_pretrained(resolved.weights_path)
    served = AutoModelForCausalLM.from_pretrained(resolved.serve_path)
    assert original.config.tie_word_embeddings
    assert not served.config.tie_word_embeddings
    assert served.lm_head.weight.data_ptr() != served.model.embed_tokens.weight.data_ptr()
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(original(tokens).logits, served(tokens).logits)


def test_resolved_files_are_readable_by_other_users(tmp_path: Path) -> None:
    resolved = resolve(str(save_random(tmp_path / "weights", tied=True)), tmp_path / "models")
    for folder in (resolved.weights_path, resolved.serve_path):
        assert folder.stat().st_mode & 0o555 == 0o555
        assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.iterdir())


def test_failed_build_leaves_no_files(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise InterruptedError

    with pytest.raises(InterruptedError), locked(tmp_path):
        built(tmp_path, "name", half)
    assert not (tmp_path / "name").exists()
    with locked(tmp_path):
        assert not list(tmp_path.glob(f"{BUILDING}*"))


def test_build_killed_halfway_leaves_no_files_and_no_lock(tmp_path: Path) -> None:
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
