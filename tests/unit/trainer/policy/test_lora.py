"""LoRA: adapters learn, the server gets whole weights, a checkpoint is small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.policy.models import micro_batch, sequences, tiny
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from gristmill_trainer.data.types import MicroBatch
from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy import Lora, ModelSource, Policy, check_publishable
from gristmill_trainer.policy.lora import attach

LORA = Lora(rank=3, alpha=7.0)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSource:
    folder = str(tmp_path / "base")
    tiny(tied=request.param).save_pretrained(folder)
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return ModelSource(folder, folder, None, 512)


def batch() -> MicroBatch:
    return micro_batch(sequences((9, 4)), packing=True)


def trained(source: ModelSource) -> Policy:
    """A policy whose adapters are no longer zero."""
    torch.manual_seed(3)
    policy = Policy(source, "cpu", packing=True, lora=LORA)
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward([-policy.scorer(batch()).logprobs.mean()])
        optimizer.step()
    return policy


def test_lora_trains_only_adapters_which_start_at_zero(source: ModelSource) -> None:
    before = Policy(source, "cpu", packing=True).scorer(batch()).logprobs
    policy = Policy(source, "cpu", packing=True, lora=LORA)
    assert torch.equal(policy.scorer(batch()).logprobs, before)
    torch.autograd.backward([policy.scorer(batch()).logprobs.sum()])
    with_gradient = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    # Two matrices on each of seven linear layers in two blocks, and none on the head.
    assert len(with_gradient) == len(policy.trained_parameters()) == 2 * 7 * 2
    assert all(".lora_" in name for name in with_gradient)


def test_lora_served_tensors_match_the_policy_and_keep_its_weights(source: ModelSource) -> None:
    policy = trained(source)
    live = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    plain = Policy(source, "cpu", packing=True)
    base = plain.scorer(batch()).logprobs
    served = policy.served_tensors()
    assert served.keys() == plain.served_tensors().keys()
    plain.model.load_state_dict(served)
    ours = policy.scorer(batch()).logprobs
    torch.testing.assert_close(plain.scorer(batch()).logprobs, ours, rtol=1e-4, atol=1e-4)
    assert float((base - ours).detach().abs().max()) > 0.1
    assert all(torch.equal(tensor, live[name]) for name, tensor in policy.model.state_dict().items())


def test_lora_export_is_a_whole_model(source: ModelSource, tmp_path: Path) -> None:
    policy = trained(source)
    policy.save_whole(tmp_path / "export")
    exported = Policy(ModelSource(str(tmp_path / "export"), "", None, 512), "cpu", packing=True)
    torch.testing.assert_close(exported.scorer(batch()).logprobs, policy.scorer(batch()).logprobs, rtol=1e-4, atol=1e-4)
    assert exported.model.config.tie_word_embeddings == policy.model.config.tie_word_embeddings
    assert "gristmill" not in (tmp_path / "export" / "config.json").read_text()


def test_lora_checkpoint_contains_the_adapters_and_resumes_bit_for_bit(source: ModelSource, tmp_path: Path) -> None:
    policy = trained(source)
    policy.save(tmp_path / "saved")
    again = Policy(source, "cpu", str(tmp_path / "saved"), packing=True, lora=LORA)
    assert torch.equal(again.scorer(batch()).logprobs, policy.scorer(batch()).logprobs)
    whole = (Path(source.weights) / "model.safetensors").stat().st_size
    assert (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size < whole
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "saved").iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]


def test_lora_checkpoint_loads_in_peft(source: ModelSource, tmp_path: Path) -> None:
    from peft import PeftModel

    policy = trained(source)
    policy.save(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(source.weights, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "saved"))
    tokens = sequences((9,))
    logits = theirs(input_ids=torch.tensor(tokens)).logits[0, :-1]
    wanted = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens[0][1:])[:, None]).squeeze(1)
    ours = policy.scorer(micro_batch(tokens, packing=True)).logprobs
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_lora_refuses_a_mixture_of_experts_whose_weights_would_stay_frozen(family: str) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 61, "num_experts_per_tok": 2,
    }  # fmt: skip
    count = "num_local_experts" if family == "mixtral" else "num_experts"
    config = AutoConfig.for_model(family, **shape, **{count: 4}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model: Any = AutoModelForCausalLM.from_config(config)
    with raises(ModelError, "experts_unsupported", model=type(model).__name__):
        attach(model, Lora(4, 8))


def test_checkpoint_of_another_kind_is_refused(source: ModelSource, tmp_path: Path) -> None:
    trained(source).save(tmp_path / "saved")
    with raises(ModelError, "lora_mismatch", folder=tmp_path / "saved", asked="a whole model"):
        Policy(source, "cpu", str(tmp_path / "saved"))
    for other in (replace(LORA, rank=4), replace(LORA, alpha=64.0)):  # Another alpha would scale the learned adapters.
        with raises(ModelError, "lora_mismatch"):
            Policy(source, "cpu", str(tmp_path / "saved"), lora=other)
    with raises(ModelError, "lora_mismatch", saved="a whole model"):
        Policy(source, "cpu", source.weights, lora=LORA)


def test_adapter_server_refuses_other_policies(source: ModelSource) -> None:
    served = replace(source, lora_rank=8)
    check_publishable(8, served)
    with raises(ModelError, "lora_rank_not_served", lora_rank=0, highest=8):
        check_publishable(0, served)
    with raises(ModelError, "lora_rank_not_served", lora_rank=9, highest=8) as raised:
        check_publishable(9, served)
    assert "LORA_RANK=9" in str(raised.value)


def test_server_of_whole_weights_accepts_any_rank(source: ModelSource) -> None:
    for rank in (0, 8):
        check_publishable(rank, source)


def test_adapter_server_gets_only_the_adapters(source: ModelSource) -> None:
    policy = trained(replace(source, lora_rank=8))
    tensors = policy.served_tensors()
    assert len(tensors) == len(policy.trained_parameters())
    assert all(name.startswith("base_model.model.model.layers.") and ".lora_" in name for name in tensors)
