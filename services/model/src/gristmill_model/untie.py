"""An untied copy of a model whose output head shares the embedding's weights.

On a CPU, vLLM's reload_weights does not update a tied head. It updates every other tensor, so the sampled logprobs
drift silently. vLLM therefore serves a copy with `tie_word_embeddings: false` and a separate `lm_head.weight`. Every
publication contains that tensor. The trainer starts from the tied original.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from gristmill_model.cache import built, link_or_copy
from gristmill_model.errors import ModelError

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
INDEX = "model.safetensors.index.json"


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
    return built(models_dir, f"{folder.name}-untied", lambda target: _untie(folder, target))


def _untie(folder: Path, target: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
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
