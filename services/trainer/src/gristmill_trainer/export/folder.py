"""The folder of a finished model, created atomically."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill_trainer.disk import sync, writing
from gristmill_trainer.errors import ModelError
from gristmill_trainer.export.card import RunFacts, model_card


def export_model(folder: Path, save_model: Callable[[Path], None], tokenizer: str, facts: RunFacts) -> None:
    """Writes config, weights and generation config (`save_model`), tokenizer with its chat template, and the card.

    `tokenizer`: folder or hub id. An existing folder is replaced. Raises ModelError if the tokenizer cannot be loaded,
    and TrainerError if the disk is full.
    """
    from transformers import AutoTokenizer

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(
        folder, remedy="Start the trainer again: it continues from the last checkpoint and repeats the export"
    ):
        save_model(partial)
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
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def _save(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # The tokenizers package has no specific exception for a full disk.
        raise OSError(f"the tokenizer: {error}") from error
