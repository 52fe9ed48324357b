"""Log-probabilities of the trained tokens, without ever holding all logits."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from gristmill_trainer.batch import MicroBatch
from gristmill_trainer.policy import Policy

# Rows of hidden states that meet the vocabulary at once: 1024 x 150k logits in float32 are 600 MB.
CHUNK = 1024


def token_logprobs(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    """float32[M]: log pi(target) at the sampling temperature.

    Only positions whose next token is trained reach the output head, `CHUNK` at a time, and each
    chunk's logits are computed again in the backward pass rather than kept: B x T x V never exists.
    """
    decoder = policy.model.get_decoder()
    hidden = decoder(input_ids=batch.tokens, attention_mask=batch.attention, use_cache=False).last_hidden_state
    states = hidden[batch.rows, batch.columns]
    head = policy.model.get_output_embeddings()
    pieces = []
    for start in range(0, len(states), CHUNK):
        part = slice(start, start + CHUNK)
        pieces.append(
            checkpoint(_chunk, head, states[part], batch.targets[part], batch.temperatures[part], use_reentrant=False)
        )
    return torch.cat(pieces)


def _chunk(
    head: torch.nn.Module, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    logits: torch.Tensor = head(states).float() / temperatures[:, None]
    chosen: torch.Tensor = logits.gather(1, targets[:, None]).squeeze(1)
    return chosen - logits.logsumexp(dim=1)
