"""Pushing the finished model to a hub."""

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
    """A repository, and the leave to write to it."""

    repository: str
    token: str = field(repr=False)
    endpoint: str | None = None
    """None: huggingface.co, or HF_ENDPOINT."""

    @classmethod
    def read(cls, repository: str | None, environ: Mapping[str, str]) -> Hub | None:
        """From `push_to_hub` and `os.environ`; None when nothing is to be pushed.

        The token is HF_TOKEN, else the word in the file that HF_TOKEN_PATH names. Raises TrainerError and ConfigError:
        at the start, not after hours of training.
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
        """Create the repository, private where it is new, and upload the folder. Raises TrainerError."""
        from huggingface_hub import HfApi

        # Of the HTTP client that this huggingface_hub uses, whichever it is.
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
