"""The weights that a run published, and a copy of its model on the CPU that computes scores with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from gristmill import PolicyVersion
from gristmill_trainer.memory import available_memory, gigabytes
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.policy.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from gristmill_trainer.policy.source import attention_options
from gristmill_trainer.receipts.probes import F64, Probe, Probes, ProbeScores

Tensors = dict[str, torch.Tensor]
_COPIES: Final = 4
"""Of all weights in float32: the model that computes, the first weights, and those of two more versions or dtypes."""
_SHARE: Final = 0.5
"""Of the available memory that a diagnosis may take, because the training goes on meanwhile."""


class PublishedWeights:
    """The published files of a run, and a copy of its model on the CPU that computes scores with them."""

    def __init__(self, source: ModelSource, path: Path | None, version: str) -> None:
        """`path`: folder of the published `version`, next to the folder of the version before; None before the first
        publication."""
        self._source, self._path = source, path
        self._before: Path | None = None
        if path is not None:
            parsed = PolicyVersion.parse(version)
            self._before = path.with_name(str(PolicyVersion(parsed.incarnation, parsed.step - 1)))
        self._model: Any = None
        self._base: Tensors | None = None

    @property
    def tied(self) -> bool:
        """Whether the trained model's head is its embedding table."""
        return bool(AutoConfig.from_pretrained(self._source.weights, trust_remote_code=False).tie_word_embeddings)

    def too_large(self) -> str:
        """Returns a text if the memory is too small for the copies of the model, else an empty text."""
        room = available_memory()
        if room is None or self.needed <= _SHARE * room:
            return ""
        return (
            f"the copies of the model need {gigabytes(self.needed)}, and a diagnosis takes at most {_SHARE:.0%} of the "
            f"{gigabytes(room)} of memory that are available"
        )

    @property
    def needed(self) -> int:
        """Bytes of the copies of the model that a diagnosis holds at the same time."""
        name = self._source.weights
        options = {"config": AutoConfig.from_pretrained(name, trust_remote_code=False), **attention_options(name)}
        create: Any = AutoModelForCausalLM.from_config
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            tensors: Tensors = create(dtype=torch.float32, trust_remote_code=False, **options).state_dict()
        return _COPIES * sum(tensor.nbytes for tensor in tensors.values())

    def current(self) -> Tensors:
        return self.first() if self._path is None else self._read(self._path)

    def before(self) -> Tensors | None:
        return None if self._before is None or not self._before.is_dir() else self._read(self._before)

    def first(self) -> Tensors:
        """Returns the weights of the model before any training. New adapters do not change the model."""
        if self._base is None:
            # Loading may draw random numbers for tensors that it then overwrites; the training keeps its own.
            with torch.random.fork_rng(devices=[]):
                model: Any = AutoModelForCausalLM.from_pretrained(
                    self._source.weights,
                    dtype=torch.float32,
                    trust_remote_code=False,
                    **attention_options(self._source.weights),
                )
            model.train(False)
            head = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
            self._model = model
            self._base = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return self._base

    def _read(self, folder: Path) -> Tensors:
        """Returns whole weights in float32; adapters are merged into the first weights."""
        base = self.first()
        if not (folder / ADAPTER_CONFIG).is_file():
            found = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
            return {**base, **found}
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        factor = float(config["lora_alpha"]) / float(config["r"])
        adapters = load_file(folder / ADAPTER_WEIGHTS)
        merged = dict(base)
        for name, left in adapters.items():
            if ".lora_B." in name:
                right = adapters[name.replace(".lora_B.", ".lora_A.")]
                plain = re.sub(r"^base_model\.model\.|\.lora_B(\.default)?", "", name)
                merged[plain] = base[plain] + factor * (left.float() @ right.float())
        return merged

    def scores(self, tensors: Tensors, probes: Probes, dtype: torch.dtype = torch.float32) -> list[ProbeScores]:
        """Computes the scores of `probes` with `tensors`. `dtype`: of the arithmetic."""
        self.first()
        self._model.load_state_dict(tensors, strict=False)
        model = self._model.to(dtype)
        try:
            return torch_scores(model, probes)
        finally:
            self._model = model.float()


def torch_scores(model: Any, probes: Probes) -> list[ProbeScores]:
    """Returns the scores by a model of transformers, as a server without faults computes them."""
    with torch.no_grad():
        return [_scores(model, probe, probes.temperature) for probe in probes.probes]


def _scores(model: Any, probe: Probe, temperature: float) -> ProbeScores:
    tokens = torch.tensor([probe.tokens])
    logits = model(input_ids=tokens, use_cache=False).logits[0].double()
    prompt: F64 = np.zeros(0)
    if probe.prompt:
        prompt = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    sampled = (logits[-1] / temperature).log_softmax(-1)[list(probe.ids)].numpy()
    return ProbeScores(prompt, sampled)
