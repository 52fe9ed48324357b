"""Export of the finished model: a folder for from_pretrained and vLLM with a card of the run, and a push to a hub."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from gristmill.deployment import read_secret
from gristmill.internal.disk import sync
from gristmill.internal.receipts import Proven
from gristmill.internal.redaction import redact_arguments, redact_text
from gristmill_trainer.disk import writing
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import ModelError, TrainerError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d+")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_LOG = logging.getLogger(__name__)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def export_model(
    folder: Path,
    save_model: Callable[[Path], None],
    tokenizer: str,
    facts: RunFacts,
    dist: DistContext | None = None,
) -> None:
    """Writes config, weights and generation config (`save_model`), tokenizer with its chat template, and the card.

    Every rank calls it, because `save_model` gathers the weights; rank 0 writes. `tokenizer`: folder or hub id. An
    existing folder is replaced. Raises ModelError if the tokenizer cannot be loaded, and TrainerError if the disk is
    full.
    """
    dist = dist or DistContext()
    partial = folder.with_name(f".{folder.name}.partial")
    dist.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
    with writing(
        folder, remedy="Start the trainer again: it continues from the last checkpoint and repeats the export"
    ):
        save_model(partial)
    dist.on_main(lambda: _add_tokenizer_and_card(partial, folder, tokenizer, facts))


def _add_tokenizer_and_card(partial: Path, folder: Path, tokenizer: str, facts: RunFacts) -> None:
    """Completes the folder `partial`, which has the weights, and renames it to `folder`."""
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            "tokenizer_unreadable",
            f"the tokenizer '{tokenizer}' cannot be loaded ({error}); the weights are in {partial}",
            tokenizer=tokenizer,
            weights=partial,
        ) from error
    with writing(folder, remedy=f"The weights are in {partial}"):
        _save(loaded, partial)
        (partial / "README.md").write_text(model_card(facts), encoding="utf-8")
        for file in filter(Path.is_file, partial.rglob("*")):
            file.chmod(0o644)  # safetensors makes files private to the owner, but servers run as other users.
            sync(file)
        replaced = folder.with_name(f".{folder.name}.replaced")
        _remove(replaced)
        if os.path.lexists(folder):  # Renamed, not removed: the rename of a mount point fails, and its files stay.
            folder.rename(replaced)
        partial.rename(folder)
        _remove(replaced)


def _remove(path: Path) -> None:
    """Removes a folder with its files, or a link without the files behind it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _save(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # The tokenizers package has no specific exception for a full disk.
        raise OSError(f"the tokenizer: {error}") from error


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run for the model card. All fields become public with the model."""

    run_id: str
    base_model: str
    """The user's name of the model; the card contains only the last part of a folder's path."""
    dataset: str
    rewards: list[str]
    objective: str
    steps: int
    policy_version: str
    final_reward: float | None
    """Mean reward of the last step's groups; None if this process trained no step."""
    command: str
    """Command line from `public_command`."""
    versions: dict[str, str] = field(default_factory=dict)
    receipts: Proven | None = None
    """None without receipts, because the trainer published no weights."""


def public_command(program: str, arguments: Sequence[str]) -> str:
    """Returns a command line without secrets, addresses and this machine's paths."""
    words = [program]
    for argument in redact_arguments(arguments):
        flag, equals, value = argument.partition("=")
        named = flag.startswith("--") and equals
        words.append(f"{flag}={shlex.quote(_public(value))}" if named else shlex.quote(_public(argument)))
    return " ".join(words)


def model_card(facts: RunFacts) -> str:
    base = _public(facts.base_model)
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [gristmill, reinforcement-learning]"]
    if _HUB_ID.fullmatch(base):
        head.insert(0, f"base_model: {base}")
    final = facts.final_reward
    reward = f"{final:.4f}" if final is not None and math.isfinite(final) else "not known"
    rows = {
        "Base model": base,
        "Dataset": _public(facts.dataset),
        "Rewards": ", ".join(facts.rewards) or "none",
        "Objective": facts.objective,
        "Optimizer steps": str(facts.steps),
        "Mean reward of the last step": reward,
        "Policy version": facts.policy_version,
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items())),
    }
    if facts.receipts is not None:
        rows["Receipts"] = f"{facts.receipts.proven} of {facts.receipts.publications} publications proven"
    table = "\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items())
    front = "\n".join(head)
    return (
        f"---\n{front}\n---\n\n# {facts.run_id}\n\n"
        f"{base}, trained further by reinforcement learning with Gristmill.\n\n"
        f"| | |\n|---|---|\n{table}\n\n```sh\n{facts.command}\n```\n"
    )


def _public(text: str) -> str:
    """Returns the text without secrets and addresses; a path becomes its last part."""
    text = redact_text(text)
    if _URL.search(text):
        return _URL.sub("URL", text)
    if _HOST_AND_PORT.fullmatch(text):
        return "ADDRESS"
    if text.startswith(("/", "~", "./", "../")) or "\\" in text or text.count("/") > 1 or os.path.exists(text):  # noqa: PTH110  It takes a text of any length.
        return PurePath(text).name
    return text


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
                f"push_to_hub is '{repository}', but no token with write access is set: set HF_TOKEN, or in Compose "
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
