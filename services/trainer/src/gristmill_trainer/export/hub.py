"""Push of the finished model to a hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.deployment import read_secret
from gristmill_trainer.errors import TrainerError

_LOG = logging.getLogger(__name__)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Hub:
    """A hub repository and a token with write access."""

    repository: str
    token: str = field(repr=False)
    endpoint: str | None = None
    """URL of the hub; None: HF_ENDPOINT, else huggingface.co."""

    @classmethod
    def read(cls, repository: str | None, environ: Mapping[str, str]) -> Hub | None:
        """Reads the hub from `push_to_hub` and `os.environ`; returns None without `push_to_hub`.

        The token is HF_TOKEN, else the content of the file HF_TOKEN_PATH. Raises TrainerError or ConfigError before
        training starts, not after hours of training.
        """
        if repository is None:
            return None
        if not _REPOSITORY.fullmatch(repository):
            raise TrainerError(
                "repository_name",
                f"push_to_hub is '{repository}'; a hub repository is written owner/name",
                repository=repository,
            )
        token = environ.get("HF_TOKEN") or read_secret(environ, "HF_TOKEN_PATH")
        if not token:
            raise TrainerError(
                "hub_token_missing",
                f"push_to_hub is '{repository}', but there is no token with write access: set HF_TOKEN, or in Compose "
                "HF_WRITE_TOKEN_FILE (docs/security.md), or leave push_to_hub out",
                repository=repository,
            )
        return cls(repository, token)

    def push(self, folder: Path) -> None:
        """Creates a private repository if it does not exist, and uploads the folder. Raises TrainerError."""
        from huggingface_hub import HfApi

        # The error class of the HTTP client that the installed huggingface_hub uses.
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        api = HfApi(endpoint=self.endpoint, token=self.token)
        try:
            api.create_repo(self.repository, private=True, exist_ok=True)
            api.upload_folder(
                repo_id=self.repository, folder_path=folder, commit_message="Model of a finished Gristmill run"
            )
        except (HTTPError, OSError, ValueError) as error:
            raise TrainerError(
                "push_failed",
                f"the model could not be pushed to {self.repository}: {error}. It is whole in {folder}; "
                f"push it by hand: hf upload {self.repository} {folder}",
                repository=self.repository,
                folder=folder,
            ) from error
        _LOG.info("pushed %s to %s", folder, self.repository)
