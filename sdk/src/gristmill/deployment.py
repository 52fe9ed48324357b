"""The stack that a service belongs to, as read once at start: the GRISTMILL_* variables and the model's manifest."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill.errors import ConfigError, FileError, ManifestError
from gristmill.internal.disk import write_file
from gristmill.internal.dotenv import DotenvError, read_env_file
from gristmill.internal.redaction import remember

_LOG = logging.getLogger(__name__)
API_URL = "http://127.0.0.1:8000"
MODEL_URL = "http://127.0.0.1:9001"
RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Pattern of run ids, for re.fullmatch. Run ids name folders and are words of command lines, so an id starts with a
letter or a digit: neither `..` nor `-rf` is an id."""
_MANIFEST = "manifest.json"


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of the model in `folder`: those of its index, else model.safetensors, else all.

    Some folders have the same weights in another format too (consolidated.safetensors). Raises FileError for an index
    that is not readable, or that names a file that does not exist.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise FileError(
                "weight_index_unreadable", f"{index} is not an index of weights ({error}); copy it again", path=index
            ) from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise FileError(
                "weight_file_missing",
                f"{index} names {missing[0]}, which is not in the folder; copy or download the model again",
                path=folder / missing[0],
            )
        return [folder / name for name in names]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


@dataclass(frozen=True)
class Deployment:
    """URLs, directories and ids of a stack. They override the YAML, so one file works with and without Docker."""

    api_url: str | None
    """URL of the trajectory API; None if the variable is not set."""
    model_url: str | None
    run_id: str | None
    stack: str
    """The stack's name at an API that several stacks share. Each stack works on one open run at a time."""
    config_dir: Path
    models_dir: Path
    weights_dir: Path
    runs_dir: Path
    metrics_address: str | None = None
    """PORT or HOST:PORT of this process' /metrics for Prometheus; None serves no metrics."""
    gateway_address: str | None = None
    """PORT or HOST:PORT at which the gateway listens for agents elsewhere; None: the configuration's address."""
    api_token: str | None = field(default=None, repr=False)
    """Token for the trajectory API, from the file that GRISTMILL_API_TOKEN_FILE names. The token is in a file because
    other users can read a process' command line and environment."""
    default_api_url: str = API_URL
    """Used if neither a variable nor a setting names a URL: on this machine, at the port of the variable API_PORT."""
    default_model_url: str = MODEL_URL

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Deployment:
        """Reads `environ`, normally `os.environ`. An empty variable counts as unset, as Compose passes empty ones.

        Raises ConfigError for a token file that cannot be read. An empty token file means that the stack has no token.
        """
        _check_hub_token(environ)

        def get(name: str) -> str | None:
            return environ.get(f"GRISTMILL_{name}") or None

        return cls(
            api_url=get("API_URL"),
            model_url=get("MODEL_URL"),
            run_id=get("RUN_ID"),
            stack=get("STACK") or "default",
            config_dir=Path(get("CONFIG_DIR") or "configs").expanduser(),
            models_dir=Path(get("MODELS_DIR") or ".gristmill/models").expanduser(),
            weights_dir=Path(get("WEIGHTS_DIR") or ".gristmill/weights").expanduser(),
            runs_dir=Path(get("RUNS_DIR") or "runs").expanduser(),
            metrics_address=get("METRICS_ADDRESS"),
            gateway_address=get("GATEWAY_ADDRESS"),
            api_token=read_secret(environ, "GRISTMILL_API_TOKEN_FILE"),
            default_api_url=_at_port(environ.get("API_PORT"), API_URL),
            default_model_url=_at_port(environ.get("MODEL_PORT"), MODEL_URL),
        )


def _at_port(port: str | None, url: str) -> str:
    """Returns the URL at a port. Kubernetes sets variables such as API_PORT to other texts, which do not count."""
    return f"{url.rpartition(':')[0]}:{port}" if port and port.isdecimal() else url


class Manifest(BaseModel):
    """The model that a stack serves and trains.

    The model service writes the manifest before the server starts. Environment and trainer read it.
    """

    model_config = ConfigDict(frozen=True)

    format: int = 1
    name: str
    """The name of the model in requests to the server: MODEL, without the revision of a hub id."""
    requested: str
    """MODEL as the user wrote it. A configuration may use either name."""
    revision: str
    """The hub's commit, or a content hash."""
    tokenizer_path: str
    weights_path: str
    """Folder of the original model, from which the trainer starts."""
    serve_path: str
    """Folder that the server loads: an untied copy if the original ties its embeddings."""
    sha256: str
    """Digest of the original's weight files."""
    dtype: str
    max_model_len: int
    lora_rank: int = 0
    """Highest rank of LoRA adapters that the server accepts instead of whole weights; 0 accepts whole weights."""
    sleep: bool = False
    """Whether the server may be put to sleep while the trainer uses its GPU."""
    tool_parser: str | None = None
    """The server's parser of tool calls, by vLLM's name. None: the server does not return tool calls."""
    reasoning_parser: str | None = None
    """The server's parser of reasoning. None: the server returns reasoning as part of the content."""

    @classmethod
    def find(cls, models_dir: Path) -> Manifest | None:
        """Returns the manifest, or None if it does not exist or is not readable, and logs the reason."""
        try:
            return cls.read(models_dir)
        except ManifestError as error:
            _LOG.debug("%s", error)
            return None

    @classmethod
    def read(cls, models_dir: Path) -> Manifest:
        """Reads `models_dir`/manifest.json. Raises ManifestError if the file does not exist or is not readable."""
        path = models_dir / _MANIFEST
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
        path = models_dir / _MANIFEST
        write_file(path, self.model_dump_json(indent=2).encode(), several=True)
        return path


def read_secret(environ: Mapping[str, str], variable: str) -> str | None:
    """Returns the word in the file that `variable` names; None if it names no file or the file is empty.

    Logs mask the word from then on. Raises ConfigError for a file that cannot be read or holds more than one word.
    """
    file = environ.get(variable)
    if not file:
        return None
    try:
        word = Path(file).read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            "secret_file_not_ascii", f"{variable}={file} is not plain ASCII text.", variable=variable, file=file
        ) from error
    except OSError as error:
        raise ConfigError(
            "secret_file_unreadable",
            f"{variable}={file} cannot be read: {error.strerror}. In Compose, the group SECRETS_GID must be able to "
            "read the file on the host (docs/security.md).",
            variable=variable,
            file=file,
        ) from error
    if len(word.split()) > 1:
        raise ConfigError(
            "secret_file_several_words",
            f"{variable}={file} holds more than one word; it must hold the token alone.",
            variable=variable,
            file=file,
        )
    remember(word)
    return word or None


def env_file(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `folder`/.env that `environ` does not set, as Compose reads them. Raises ConfigError."""
    path = folder / ".env"
    try:
        return read_env_file(path, environ)
    except (DotenvError, OSError) as error:
        raise ConfigError("env_file_invalid", f"{error}; correct the file, or remove it", path=path) from error


def _check_hub_token(environ: Mapping[str, str]) -> None:
    # huggingface_hub reads this file. If huggingface_hub cannot read it, services report that the hub does not answer.
    # If the file does not exist, the user has no token.
    if Path(environ.get("HF_TOKEN_PATH") or ".").is_file():
        read_secret(environ, "HF_TOKEN_PATH")
