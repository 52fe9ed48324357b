"""A look, before training, whether our scores are the model's own: what a configuration does not tell."""

from __future__ import annotations

from typing import Any

import torch

from gristmill_trainer.data.tensors import Layout, MicroBatch
from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy.scoring import Scorer

# Nats. Kernels differ by some 1e-5 in float32; a sequence that sees its neighbour, or a head with a scale that we do
# not know, by far more in a trained model.
_TOLERANCE = 1e-3
_LENGTHS = (5, 9, 2)


def prepare(model: Any, *, packing: bool) -> Scorer:
    """The model's `Scorer`, checked against the model's own logits on three short sequences.

    Raises ModelError when they differ. Before sharding and compiling; draws no random numbers.
    """
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    device = model.get_output_embeddings().weight.device
    sequences = [
        (torch.arange(length, device=device) * 7 + 3 * length + 1) % vocabulary for length in _LENGTHS
    ]  # any tokens will do, but the sequences differ
    with torch.no_grad():
        wanted = torch.cat([_own_logprobs(model, tokens) for tokens in sequences])
        scorer = Scorer(model, packing=packing)
        found = scorer(_micro_batch(sequences, packing=packing)).logprobs
    difference = float((wanted - found).abs().max())
    # Written so that NaN is refused.
    if not difference <= _TOLERANCE:
        remedy = "train with --packing false, or take another model" if packing else "take another model"
        raise ModelError(
            f"log-probabilities of '{model.config.name_or_path}' ({type(model).__name__}) computed our way differ by "
            f"{difference:.2g} from the model's own; {remedy}"
        )
    return scorer


def _own_logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(dim=1).gather(1, tokens[1:, None]).squeeze(1)


def _micro_batch(sequences: list[torch.Tensor], *, packing: bool) -> MicroBatch:
    lengths = torch.tensor([len(tokens) for tokens in sequences], device=sequences[0].device)
    longest = int(lengths.max())
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    columns = torch.arange(longest, device=lengths.device).expand_as(padded)
    real = columns < lengths[:, None]
    if packing:
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        layout = Layout(padded[real][None], columns[real][None], starts, None, longest)
    else:
        layout = Layout(padded, columns, None, real.long(), longest)
    places = torch.zeros_like(padded)
    places[real] = torch.arange(int(lengths.sum()), device=lengths.device)
    if not packing:
        places = torch.arange(padded.numel(), device=lengths.device).view_as(padded)
    predicted = real & (columns > 0)
    targets = padded[predicted]
    nothing = torch.zeros(len(targets), device=lengths.device)
    return MicroBatch(
        layout=layout,
        sources=places[predicted] - 1,
        targets=targets,
        sequence=torch.arange(len(sequences), device=lengths.device).repeat_interleave(lengths - 1),
        sequences=len(sequences),
        rollout_logprobs=nothing,
        advantages=nothing,
        temperatures=torch.ones_like(nothing),
        weights=nothing,
    )
