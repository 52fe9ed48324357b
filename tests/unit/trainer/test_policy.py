"""The model being trained, as the server sees it."""

from __future__ import annotations

import torch

from gristmill_trainer.policy import Policy


def test_the_served_head_is_written_out_although_it_is_tied(policy: Policy) -> None:
    assert policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
    tensors = policy.served_tensors()
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert tensors["lm_head.weight"].data_ptr() != tensors["model.embed_tokens.weight"].data_ptr()
