"""Checks before training that our log-probabilities match the model's own logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.types import MicroBatch, Sample
from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy.scoring import Scorer

# Nats. Kernels differ by about 1e-5 in float32. In a trained model, attention to another sequence or an unknown scale
# of the head makes a much larger difference.
_TOLERANCE = 1e-3
_LENGTHS = (5, 9, 2)


def prepare(model: Any, *, packing: bool, seq_len: int = 0) -> Scorer:
    """Returns the model's `Scorer` after a comparison with the model's own logits on three short sequences.

    `seq_len`: tokens of the longest sequence to score. Raises ModelError if the scores differ, or if packed rows do
    not support a sequence of this length. Call it before sharding and compiling; it draws no random numbers.
    """
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    device = model.get_output_embeddings().weight.device
    # The tokens are arbitrary, but the sequences must differ.
    sequences = [(np.arange(length, dtype=np.int32) * 7 + 3 * length + 1) % vocabulary for length in _LENGTHS]
    micro = collate(
        [_sample(tokens) for tokens in sequences],
        range(len(sequences)),
        np.ones(len(sequences)),
        packing=packing,
        device=device,
    )
    with torch.no_grad():
        wanted = torch.cat([_own_logprobs(model, torch.from_numpy(tokens).to(device)) for tokens in sequences])
        scorer = Scorer(model, packing=packing)
        found = scorer(_as_long(micro, seq_len) if packing else micro).logprobs
    difference = float((wanted - found).abs().max())
    # This comparison also refuses NaN.
    if not difference <= _TOLERANCE:
        remedy = "train with --packing false, or take another model" if packing else "take another model"
        raise ModelError(
            "logprobs_differ",
            f"log-probabilities of '{model.config.name_or_path}' ({type(model).__name__}) computed our way differ by "
            f"{difference:.2g} from the model's own; {remedy}",
            model=model.config.name_or_path,
            difference=difference,
        )
    return scorer


def _own_logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens[None].long(), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(dim=1).gather(1, tokens[1:, None].long()).squeeze(1)


def _sample(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Sample:
    nothing = np.zeros(len(tokens), np.float32)
    return Sample("", tokens, np.arange(len(tokens)) > 0, nothing, nothing, 1.0)


def _as_long(micro: MicroBatch, seq_len: int) -> MicroBatch:
    """Sets the longest sequence to `seq_len`, so that an attention without support for this length fails now."""
    return replace(micro, layout=replace(micro.layout, longest=max(micro.layout.longest, seq_len)))
