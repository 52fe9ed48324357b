"""Turns MODEL into folders on this machine: the model for the trainer's start, and the copy that vLLM serves."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from gristmill_model import smollm2, tiny
from gristmill_model.cache import built, digest, link_or_copy, locked
from gristmill_model.errors import ModelError
from gristmill_model.settings import EMBEDDED, named
from gristmill_model.untie import untied

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
HUB_TOKEN = "a token that may read it (HF_TOKEN, or in Compose HF_TOKEN_FILE)"


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
        ModelError: the model does not exist, the folder holds no model, or the hub does not answer.
    """
    hub = named(requested)
    with locked(models_dir):
        weights, revision = _from_hub(hub[1], hub[2], models_dir) if hub else _original(requested, models_dir)
        name = hub[1] if hub else requested
        return ResolvedModel(requested, name, revision, weights, untied(weights, models_dir), digest(weights))


def _original(requested: str, models_dir: Path) -> tuple[Path, str]:
    if requested == "tiny":
        return built(models_dir, f"tiny-{tiny.revision()}", tiny.build), tiny.revision()
    if requested == "smollm2":
        return built(models_dir, f"smollm2-{smollm2.REVISION}", smollm2.build), smollm2.REVISION
    return _local(Path(requested).expanduser().resolve(), models_dir)


def _local(folder: Path, models_dir: Path) -> tuple[Path, str]:
    _require_safetensors(folder, str(folder))
    revision = _fingerprint(folder)
    if folder.is_relative_to(models_dir):
        return folder, revision
    # The other containers see only the models folder, so the model is linked or copied into it.
    name = f"path--{folder.name}-{revision}"
    return built(models_dir, name, lambda target: _take(folder, target)), revision


def _from_hub(hub_id: str, wanted: str | None, models_dir: Path) -> tuple[Path, str]:
    """`wanted`: a commit, tag or branch; None for the newest commit."""
    try:
        snapshot = Path(snapshot_download(hub_id, revision=wanted, allow_patterns=HUB_FILES))
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
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise ModelError(
            "hub_unreachable",
            f"the hub cannot be reached for {hub_id!r} and the local cache does not hold {wanted or 'it'} "
            f"({type(error).__name__}); check the network, or set MODEL to one of {', '.join(EMBEDDED)} or to a folder",
            model=hub_id,
            revision=wanted,
        ) from error
    if not (snapshot / "config.json").is_file():
        raise ModelError(
            "model_config_missing", f"{hub_id} has no config.json: it is not a transformers model", model=hub_id
        )
    _require_safetensors(snapshot, hub_id)
    revision = snapshot.name
    name = f"hub--{hub_id.replace('/', '--')}-{revision[:12]}"
    return built(models_dir, name, lambda target: _take(snapshot, target)), revision


def _require_safetensors(folder: Path, name: str) -> None:
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            "model_weights_missing", f"{name} has no *.safetensors files; save the weights in that format", model=name
        )


def _take(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if not path.is_file():
            continue
        if path.suffix == ".safetensors":
            link_or_copy(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def _fingerprint(folder: Path) -> str:
    """Returns a hash of the files' paths, sizes and times. It detects changed weights without reading them."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        state = path.stat()
        total.update(f"{path}:{state.st_size}:{state.st_mtime_ns}\n".encode())
    return total.hexdigest()[:12]
