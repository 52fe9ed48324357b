"""The model service's manifest: the single source of truth about the model that a stack trains."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill.errors import ManifestError

FILE_NAME = "manifest.json"


class Manifest(BaseModel):
    """Written by the model service before the server starts; read by environment and trainer."""

    model_config = ConfigDict(frozen=True)

    format: int = 1
    name: str
    """The name the server answers to: MODEL, without the revision of a hub id."""
    requested: str
    """MODEL as the user wrote it. A configuration may name the model by either."""
    revision: str
    """The hub's commit, or a content hash."""
    tokenizer_path: str
    weights_path: str
    """Folder of the original model: what the trainer starts from."""
    serve_path: str
    """Folder the server loads: an untied copy where the original ties its embeddings."""
    sha256: str
    """Of the original's weight files."""
    dtype: str
    max_model_len: int
    lora_rank: int = 0
    """Highest rank of LoRA adapters that the server takes in place of whole weights; 0: it takes whole weights."""

    @classmethod
    def read(cls, models_dir: Path) -> Manifest:
        """Reads `models_dir`/manifest.json. Raises ManifestError if the file does not exist or is not readable."""
        path = models_dir / FILE_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise ManifestError(
                "manifest_missing",
                f"no model manifest at {path}; the model service writes it: start it first, "
                "or point GRISTMILL_MODELS_DIR at its folder",
                path=path,
            ) from error
        except ValidationError as error:
            raise ManifestError(
                "manifest_invalid", f"the model manifest {path} is not readable: {error}", path=path
            ) from error

    def write(self, models_dir: Path) -> Path:
        """Writes the manifest atomically: readers see either the old manifest or the new manifest."""
        models_dir.mkdir(parents=True, exist_ok=True)
        path = models_dir / FILE_NAME
        handle, temporary = tempfile.mkstemp(dir=models_dir, prefix=".manifest-")
        with os.fdopen(handle, "w") as file:
            file.write(self.model_dump_json(indent=2))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
        return path
