"""The API's token comes from a file, and is shown nowhere. Manifests of earlier versions are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.errors import raises

from gristmill import Client, ConfigError, Deployment, Manifest, SyncClient
from gristmill.deployment import weight_files
from gristmill.errors import FileError
from gristmill.folders import default_roots
from gristmill.internal.calls import headers

TOKEN = "a-token-that-nobody-may-see"


def test_api_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text(TOKEN + "\n")
    read = Deployment.read({"GRISTMILL_API_TOKEN_FILE": str(file)})
    assert read.api_token == TOKEN
    assert TOKEN not in repr(read)


def test_folders_may_be_below_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {f"GRISTMILL_{name}_DIR": f"~/{name}" for name in ("CONFIG", "MODELS", "WEIGHTS", "RUNS")}
    read = Deployment.read(environ)
    found = [read.config_dir, read.models_dir, read.weights_dir, read.runs_dir]
    assert found == [tmp_path / name for name in ("CONFIG", "MODELS", "WEIGHTS", "RUNS")]
    monkeypatch.setenv("GRISTMILL_RUNS_DIR", "~/RUNS")
    assert default_roots() == [tmp_path / "RUNS"]


def test_missing_or_empty_token_file_variable_means_no_token(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("\n")
    assert Deployment.read({"GRISTMILL_API_TOKEN_FILE": str(file)}).api_token is None
    assert Deployment.read({"GRISTMILL_API_TOKEN_FILE": ""}).api_token is None
    assert Deployment.read({}).api_token is None


@pytest.mark.parametrize(("text", "code"), [("a b", "secret_file_several_words"), ("ä", "secret_file_not_ascii")])
def test_file_with_an_invalid_token_is_an_error(tmp_path: Path, text: str, code: str) -> None:
    file = tmp_path / "env"
    file.write_text(text)
    with raises(ConfigError, code, variable="GRISTMILL_API_TOKEN_FILE", file=str(file)):
        Deployment.read({"GRISTMILL_API_TOKEN_FILE": str(file)})


def test_hub_token_file_must_be_readable_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hf_token"
    Deployment.read({"HF_TOKEN_PATH": str(file)})
    file.write_text("hf_abc def\n")
    with raises(ConfigError, "secret_file_several_words", variable="HF_TOKEN_PATH", file=str(file)):
        Deployment.read({"HF_TOKEN_PATH": str(file)})
    file.write_text("")
    Deployment.read({"HF_TOKEN_PATH": str(file)})
    monkeypatch.setattr(Path, "read_text", _denied)  # the tests may run as root, who may read every file
    with raises(ConfigError, "secret_file_unreadable", variable="HF_TOKEN_PATH"):
        Deployment.read({"HF_TOKEN_PATH": str(file)})


def _denied(*_: object, **__: object) -> str:
    raise PermissionError(13, "Permission denied")


def test_missing_token_file_is_an_error(tmp_path: Path) -> None:
    with raises(ConfigError, "secret_file_unreadable", file=str(tmp_path / "env")):
        Deployment.read({"GRISTMILL_API_TOKEN_FILE": str(tmp_path / "env")})


@pytest.mark.parametrize("url", [f"http://env:{TOKEN}@127.0.0.1:8000", f"https://{TOKEN}@host/"])
async def test_a_url_with_a_password_is_refused_and_not_repeated(url: str) -> None:
    for kind in (Client, SyncClient):
        with raises(ConfigError, "password_in_url") as error:
            kind(url)
        assert TOKEN not in repr((error.value, error.value.values))


def test_url_and_token_that_no_request_can_have_are_refused() -> None:
    for kind in (Client, SyncClient):
        with raises(ConfigError, "api_url_invalid", url="127.0.0.1:8000"):
            kind("127.0.0.1:8000")
        with raises(ConfigError, "token_invalid"):
            kind("http://127.0.0.1:8000", token="schlüssel")
    assert headers("http://127.0.0.1:8000", "of a file\n")["Authorization"] == "Bearer of a file"


def test_manifest_without_parsers_is_read(tmp_path: Path) -> None:
    names = ("name", "requested", "revision", "tokenizer_path", "weights_path", "serve_path", "sha256", "dtype")
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "max_model_len": 64} | dict.fromkeys(names, "a")))
    manifest = Manifest.read(tmp_path)
    assert (manifest.tool_parser, manifest.reasoning_parser) == (None, None)


def test_weight_files_are_those_of_the_index(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    for name in ("a.safetensors", "b.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert len(weight_files(tmp_path)) == 3
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    (tmp_path / "b.safetensors").unlink()
    with raises(FileError, "weight_file_missing", path=tmp_path / "b.safetensors"):
        weight_files(tmp_path)
    for wrong in ("{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"x": []}}'):
        index.write_text(wrong)
        with raises(FileError, "weight_index_unreadable", path=index):
            weight_files(tmp_path)
    index.unlink()
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
