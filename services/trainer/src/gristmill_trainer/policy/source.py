"""The model to train, from the user's settings, the manifest and the model server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from gristmill import Manifest
from gristmill_trainer.errors import ModelError
from gristmill_trainer.settings import TrainerSettings


@dataclass(frozen=True)
class ModelSource:
    """The initial weights of the training."""

    weights: str
    """Folder or hub id of the original model, with its original head (tied or separate)."""
    tokenizer: str
    served_weights: Path | None
    """Folder that the server loaded, for a comparison of shapes; None if the trainer does not know the folder."""
    max_model_len: int
    lora_rank: int = 0
    """Highest rank of LoRA adapters that the server takes instead of whole weights; 0: it takes whole weights."""
    served_dtype: str = "float32"
    """torch's name of the dtype that the server computes in. Weights are published in this dtype."""
    sha256: str | None = None
    """Digest of the original's weight files, from the manifest; None without a manifest."""
    sleep: bool = False
    """Whether the model server may be put to sleep while the trainer uses its GPU."""

    def sleeps(self, settings: TrainerSettings) -> bool:
        """Whether the model servers sleep during a step. In a run with max_staleness above 0 they generate then."""
        return self.sleep and settings.max_staleness == 0 and settings.publisher != "none"

    @classmethod
    def of(cls, model: str, max_model_len: int = 2048) -> ModelSource:
        """Returns the source of a hub id or folder without a model server."""
        return cls(model, model, None, max_model_len)


def config_without_attention(model: str) -> Any:
    """Returns the config of `model` without the attention that it or one of its parts names: transformers chooses one.

    transformers would fetch the code of an attention such as `owner/repository`. Models bring data only.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    config._attn_implementation = None  # also in the configs of its parts
    return config


def find_model(model_name: str | None, manifest: Manifest | None, served: dict[str, Any]) -> ModelSource:
    """Finds the model from the user's model name, the manifest and the served model.

    `served`: the first entry of the server's /v1/models. Raises ModelError if they disagree.
    """
    served_name = str(served["id"])
    longest = int(served.get("max_model_len") or 2048)
    if manifest is not None and manifest.name == served_name:
        if model_name is not None and model_name not in {manifest.name, manifest.requested, manifest.weights_path}:
            raise ModelError(
                "model_mismatch",
                f"model_name is '{model_name}', but the model server runs '{served_name}'; "
                f"set MODEL={model_name} in .env and restart the model server, or leave model_name out",
                model_name=model_name,
                served=served_name,
            )
        serve_path = Path(manifest.serve_path)
        return ModelSource(
            manifest.weights_path,
            manifest.tokenizer_path,
            serve_path,
            longest,
            manifest.lora_rank,
            manifest.dtype,
            manifest.sha256,
            manifest.sleep,
        )
    if model_name is None:
        raise ModelError(
            "model_name_missing",
            f"the model server runs '{served_name}' and no manifest of it is here; "
            "say which weights to train: --model_name NAME_OR_FOLDER",
            served=served_name,
        )
    if model_name != served_name and str(served.get("root")) != model_name:
        raise ModelError(
            "model_mismatch",
            f"model_name is '{model_name}', but the model server runs '{served_name}'; "
            f"start it with MODEL={model_name} (in .env), or train --model_name {served_name}",
            model_name=model_name,
            served=served_name,
        )
    return ModelSource(model_name, model_name, None, longest)


def check_publishable(lora_rank: int, source: ModelSource) -> None:
    """Checks that the server accepts this training's adapters or weights. Raises ModelError."""
    highest = source.lora_rank
    if highest and not 1 <= lora_rank <= highest:
        raise ModelError(
            "lora_rank_not_served",
            f"the model server takes LoRA adapters of rank 1 to {highest}, and lora_rank is {lora_rank}; set lora_rank "
            f"to {highest} or less in the trainer's settings, or start the model server with "
            f"LORA_RANK={lora_rank or ''} (in .env)",
            lora_rank=lora_rank,
            highest=highest,
        )
