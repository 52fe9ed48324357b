"""Turns MODEL into folders on this machine: the model for the trainer's start, and the copy that vLLM serves.

If a model's output head shares the embedding's weights, the served copy is untied. On a CPU, vLLM's reload_weights does
not update a tied head. It updates every other tensor, so the sampled logprobs drift silently. vLLM therefore serves a
copy with `tie_word_embeddings: false` and a separate `lm_head.weight`. Every publication contains that tensor. The
trainer starts from the tied original.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError of httpx or httpx2, by the version
    GatedRepoError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from gristmill.deployment import weight_files
from gristmill_model import revision, smollm2, tiny
from gristmill_model.cache import built, digest, link_or_copy, locked, name_of_copy
from gristmill_model.errors import ModelError
from gristmill_model.settings import EMBEDDED, named

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
HUB_TOKEN = "a token that may read it (HF_TOKEN, or in Compose HF_TOKEN_FILE)"
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
INDEX = "model.safetensors.index.json"
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
"""Errors of a download that are not the network's."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is on this machine."""

    requested: str
    """MODEL."""
    name: str
    """MODEL without the revision of a hub id. The server answers to this name."""
    revision: str
    """The hub's commit, or a hash of the model's sources."""
    weights_path: Path
    """The original model, from which the trainer starts."""
    serve_path: Path
    """The model that vLLM serves: the original, or an untied copy of it."""
    sha256: str


def resolve(requested: str, models_dir: Path) -> ResolvedModel:
    """Finds, builds or fetches a model. Returns quickly if an earlier call did the work.

    Args:
        requested: tiny, smollm2, a folder with a config.json, or a hub id such as Qwen/Qwen2.5-1.5B-Instruct. After a
            hub id, @ and a commit, tag or branch pin the revision.
        models_dir: absolute folder for everything that is built.

    Raises:
        ModelError: the model does not exist, the folder holds no model, its files cannot be read, or the hub does not
            answer.
    """
    hub = named(requested)
    with locked(models_dir):
        weights, found = _from_hub(hub[1], hub[2], models_dir) if hub else _original(requested, models_dir)
        name = hub[1] if hub else requested
        try:
            served = untied(weights, models_dir)
        except (ValueError, SafetensorError) as error:
            raise ModelError(
                "model_unreadable",
                f"{requested} cannot be read: {str(error).partition(chr(10))[0]}; if it is a checkout of Git, run "
                "`git lfs pull`, else check config.json and the weights, or choose a model that transformers knows",
                model=requested,
            ) from error
        return ResolvedModel(requested, name, found, weights, served, digest(weights))


def _original(requested: str, models_dir: Path) -> tuple[Path, str]:
    if requested == "tiny":
        return built(models_dir, f"tiny-{revision.tiny()}", tiny.build), revision.tiny()
    if requested == "smollm2":
        return built(models_dir, f"smollm2-{smollm2.REVISION}", smollm2.build), smollm2.REVISION
    return _local(Path(requested).expanduser().resolve(), models_dir)


def _local(folder: Path, models_dir: Path) -> tuple[Path, str]:
    _require_safetensors(folder, str(folder))
    found = revision.fingerprint(folder)
    if folder.is_relative_to(models_dir):
        return folder, found
    # The other containers see only the models folder. A copy, because the user may write to the files.
    name = f"path--{folder.name}-{found}"
    return built(models_dir, name, lambda target: _take(folder, target, shutil.copyfile)), found


def _from_hub(hub_id: str, wanted: str | None, models_dir: Path) -> tuple[Path, str]:
    """`wanted`: a commit, tag or branch; None for the newest commit."""
    try:
        # Some repositories have the weights a second time, in another format.
        other = ["consolidated*.safetensors"]
        snapshot = Path(snapshot_download(hub_id, revision=wanted, allow_patterns=HUB_FILES, ignore_patterns=other))
    except GatedRepoError as error:
        raise ModelError(
            "model_gated", f"{hub_id} is gated: accept its terms on its page and give {HUB_TOKEN}", model=hub_id
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            "model_missing", f"the hub has no model {hub_id!r}, or reading it needs {HUB_TOKEN}", model=hub_id
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            "model_revision_missing",
            f"{hub_id} has no revision {wanted!r}; name a commit, a tag or a branch of it",
            model=hub_id,
            revision=wanted,
        ) from error
    except (HTTPError, OSError) as error:  # HTTPError: of the hub's HTTP client, as for a proxy that refuses.
        if isinstance(error, OSError) and error.errno in _DISK:
            raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ModelError(
            "hub_unreachable",
            f"the hub cannot be reached for {hub_id!r} and the local cache does not hold {wanted or 'it'} "
            f"({reason}); check the network, or set MODEL to one of {', '.join(EMBEDDED)} or to a folder",
            model=hub_id,
            revision=wanted,
        ) from error
    if not (snapshot / "config.json").is_file():
        raise ModelError(
            "model_config_missing", f"{hub_id} has no config.json: it is not a transformers model", model=hub_id
        )
    _require_safetensors(snapshot, hub_id)
    commit = snapshot.name
    name = f"hub--{hub_id.replace('/', '--')}-{commit[:12]}"
    return built(models_dir, name, lambda target: _take(snapshot, target, link_or_copy)), commit


def _require_safetensors(folder: Path, name: str) -> None:
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            "model_weights_missing", f"{name} has no *.safetensors files; save the weights in that format", model=name
        )


def _take(source: Path, target: Path, take_weights: Callable[[Path, Path], object]) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("."):
            take = take_weights if path.suffix == ".safetensors" else shutil.copyfile
            take(path, target / path.name)


def is_tied(folder: Path) -> bool:
    """Returns whether the model in `folder` shares one tensor between embedding and output head."""
    # The config class knows the value even if config.json leaves the key out. Defaults differ by architecture.
    return bool(AutoConfig.from_pretrained(folder, trust_remote_code=False).tie_word_embeddings)


def untied(folder: Path, models_dir: Path) -> Path:
    """Returns the folder to serve for the model in `folder`: `folder` if its head is not tied, else an untied copy.

    The copy is made once and kept in `models_dir`.

    Raises ModelError if a tied model has no tensor that can be its head.
    """
    if not is_tied(folder):
        return folder
    return built(models_dir, name_of_copy(folder, "untied"), lambda target: _untie(folder, target))


def _untie(folder: Path, target: Path) -> None:
    shards = weight_files(folder)
    # The copy has one file more than the original. No file is named `model.safetensors`, because readers would then
    # read only that file.
    names = [f"model-{place + 1:05}-of-{len(shards) + 1:05}.safetensors" for place in range(len(shards) + 1)]
    weight_map: dict[str, str] = {}
    for shard, name in zip(shards, names, strict=False):
        link_or_copy(shard, target / name)
        with safe_open(shard, framework="pt") as file:
            weight_map.update(dict.fromkeys(file.keys(), name))
    if HEAD not in weight_map:
        embeddings = [tensor for tensor in weight_map if tensor.endswith(EMBEDDING)]
        if len(embeddings) != 1:
            raise ModelError(
                "tied_head_missing",
                f"{folder} ties its head, but holds {len(embeddings)} tensors *.{EMBEDDING}; expected one",
                folder=folder,
                found=embeddings,
            )
        with safe_open(target / weight_map[embeddings[0]], framework="pt") as file:
            save_file({HEAD: file.get_tensor(embeddings[0])}, target / names[-1], metadata={"format": "pt"})
        weight_map[HEAD] = names[-1]
    size = sum((target / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.startswith(".") and path.name != INDEX:
            shutil.copyfile(path, target / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
