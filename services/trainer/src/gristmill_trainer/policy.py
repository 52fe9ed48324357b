"""The model being trained: found, loaded, exported."""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gristmill import Manifest
from gristmill_trainer.errors import ModelError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """Where the weights start from."""

    weights: str
    """Folder or hub id of the original model, its head tied if it was."""
    tokenizer: str
    served_name: str
    served_weights: Path | None
    """Folder that the server loaded, to compare shapes with; None when only the server knows."""
    max_model_len: int


def find_model(model_name: str | None, manifest: Manifest | None, served: dict[str, Any]) -> ModelSource:
    """Bring together what the user asks for, what the manifest says and what the server serves.

    `served` is the first entry of the server's /v1/models. Raises ModelError when they disagree.
    """
    served_name = str(served["id"])
    longest = int(served.get("max_model_len") or 2048)
    if manifest is not None and manifest.name == served_name:
        if model_name is not None and model_name not in {manifest.name, manifest.requested, manifest.weights_path}:
            raise ModelError(
                f"model_name is '{model_name}', but the model server runs '{served_name}'; "
                f"set MODEL={model_name} in .env and restart the model server, or leave model_name out"
            )
        return ModelSource(
            manifest.weights_path, manifest.tokenizer_path, served_name, Path(manifest.serve_path), longest
        )
    if model_name is None:
        raise ModelError(
            f"the model server runs '{served_name}' and no manifest of it is here; "
            "say which weights to train: --model_name NAME_OR_FOLDER"
        )
    if model_name != served_name and str(served.get("root")) != model_name:
        raise ModelError(
            f"model_name is '{model_name}', but the model server runs '{served_name}'; "
            f"start it with MODEL={model_name} (in .env), or train --model_name {served_name}"
        )
    return ModelSource(model_name, model_name, served_name, None, longest)


class Policy:
    """A causal language model with float32 parameters; on CUDA it computes in bfloat16."""

    def __init__(self, source: ModelSource, device: Literal["auto", "cpu", "cuda"], weights: str | None = None) -> None:
        """Load `source`, or the checkpoint folder `weights` of the same model. Raises ModelError."""
        wanted = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.device = torch.device(wanted)
        self.source = source
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(weights or source.weights, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot load the model '{weights or source.weights}': {error}") from error
        if getattr(model.config, "final_logit_softcapping", None):
            raise ModelError(
                f"'{source.weights}' caps its logits, which the chunked head does not do; take another model"
            )
        self.model = model.to(self.device).train()
        # Dropout would make the trainer's policy another one than the server's.
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        _LOG.info("model %s: %.1fM parameters on %s", source.weights, parameters / 1e6, self.device)

    def compute(self) -> AbstractContextManager[Any]:
        """Context of the forward pass: bfloat16 arithmetic on CUDA, float32 on CPU."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def served_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors as the server holds them: the head written out although it may be tied here."""
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        tensors["lm_head.weight"] = self.model.get_output_embeddings().weight.detach().clone()
        return tensors

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model folder, tied as the original."""
        self.model.save_pretrained(folder, safe_serialization=True)

    def export(self, folder: Path) -> None:
        """`save`, with tokenizer and chat template: what from_pretrained and vLLM load. Whole or not there."""
        partial = folder.with_name(f".{folder.name}.partial")
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        self.save(partial)
        AutoTokenizer.from_pretrained(self.source.tokenizer).save_pretrained(partial)
        partial.rename(folder)
