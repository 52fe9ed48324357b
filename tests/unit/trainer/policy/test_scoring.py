"""Scores are the same for packed and padded rows, with and without gradient checkpointing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.unit.trainer.policy.models import ARCHITECTURES, VOCABULARY, checked_scorer, micro_batch, sequences, tiny
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from gristmill_trainer.data.types import MicroBatch
from gristmill_trainer.errors import ModelError
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.policy.head import Entropy, Scores
from gristmill_trainer.policy.model import cast_linear_weights
from gristmill_trainer.policy.scoring import Scorer

RAGGED = (7, 2, 19, 1, 11)


def learn(scorer: Scorer, micro: MicroBatch, entropy: Entropy = "gradient") -> tuple[Scores, dict[str, torch.Tensor]]:
    """Returns the scores, and the gradients of a loss that depends on all of them."""
    scores = scorer(micro, entropy=entropy)
    loss = torch.zeros((), dtype=scores.logprobs.dtype)
    for values in scores:
        if values is not None:
            weights = torch.linspace(-1.0, 2.0, values.numel(), dtype=values.dtype).view_as(values)
            loss = loss + (weights * values).sum()
    scorer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return scores, {
        name: parameter.grad.clone() for name, parameter in scorer.named_parameters() if parameter.grad is not None
    }


def assert_same(one: tuple[Scores, dict[str, torch.Tensor]], other: tuple[Scores, Any], tolerance: float) -> None:
    for mine, theirs in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        scale = float(other[1][name].abs().max())
        difference = float((gradient - other[1][name]).abs().max())
        assert difference <= tolerance * max(1.0, scale), f"{name}: {difference} of {scale}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_padded_and_plain_scores_agree_to_the_last_digits(name: str, tied: bool) -> None:
    tokens = sequences(RAGGED)
    temperatures = [1.0, 0.5, 0.7, 1.0, 1.9]
    trained = sum(length - 1 for length in RAGGED)
    teacher = torch.randint(-1, VOCABULARY, (trained, 4), generator=torch.Generator().manual_seed(1))
    results = [
        learn(
            Scorer(tiny(name, tied=tied, dtype=torch.float64), packing=packing),
            micro_batch(tokens, packing=packing, temperatures=temperatures, teacher_ids=teacher),
        )
        for packing in (True, False)
    ]
    assert_same(results[0], results[1], 1e-10)
    # The same from the model's own logits, one sequence at a time, by autograd.
    model = tiny(name, tied=tied, dtype=torch.float64)
    parts = []
    for one, temperature in zip(tokens, temperatures, strict=True):
        logits = model(input_ids=torch.tensor([one])).logits[0, :-1] / temperature
        parts.append(logits.log_softmax(dim=1))
    logprobs = torch.cat(parts)
    targets = micro_batch(tokens, packing=True).targets
    scores = Scores(
        logprobs.gather(1, targets[:, None]).squeeze(1),
        -(logprobs.exp() * logprobs).sum(dim=1),
        logprobs.gather(1, teacher.clamp(min=0)).masked_fill(teacher < 0, 0.0),
    )
    torch.autograd.backward(
        [
            (torch.linspace(-1.0, 2.0, values.numel(), dtype=values.dtype).view_as(values) * values).sum()
            for values in scores
            if values is not None
        ]
    )
    plain = {f"model.{key}": value.grad for key, value in model.named_parameters()}
    # transformers' norms compute in float32, whatever the model's dtype.
    assert_same(results[0], (scores, plain), 1e-6)


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 33), min_size=1, max_size=7), seed=st.integers(0, 1000))
def test_packing_does_not_change_float32_scores(lengths: list[int], seed: int) -> None:
    tokens = sequences(lengths, seed)
    packed, padded = (
        learn(Scorer(tiny(initializer_range=0.1), packing=packing), micro_batch(tokens, packing=packing))
        for packing in (True, False)
    )
    assert_same(packed, padded, 2e-6 if len(padded[0].logprobs) else 0.0)


def test_packed_sequences_do_not_attend_to_one_another() -> None:
    scorer = Scorer(tiny(), packing=True)
    tokens = sequences(RAGGED)
    before = scorer(micro_batch(tokens, packing=True)).logprobs
    changed = [tokens[0], tokens[1], [(token + 1) % VOCABULARY for token in tokens[2]], tokens[3], tokens[4]]
    batch = micro_batch(changed, packing=True)
    after = scorer(batch).logprobs
    others = batch.sequence != 2
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def test_gradient_checkpointing_changes_no_bit() -> None:
    batch = micro_batch(sequences(RAGGED), packing=True)
    kept = learn(Scorer(tiny(), packing=True), batch)
    scorer = Scorer(tiny(), packing=True)
    scorer.checkpoint_layers()
    seen: list[int] = []
    layer: Any = scorer.layers()[0]
    layer.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    again = learn(scorer, batch)
    assert len(seen) == 2
    assert_same(again, kept, 0.0)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_give_the_same_scores() -> None:
    plain, compiled = Scorer(tiny(), packing=True), Scorer(tiny(), packing=True)
    compiled.compile_layers()
    for lengths in (RAGGED, (3, 21)):
        batch = micro_batch(sequences(lengths), packing=True)
        assert_same(learn(compiled, batch), learn(plain, batch), 1e-4)


def test_batch_without_trained_tokens_has_zero_gradients() -> None:
    scores, gradients = learn(Scorer(tiny(), packing=True), micro_batch(sequences((1, 1)), packing=True))
    assert scores.logprobs.shape == (0,)
    assert gradients
    assert all(not gradient.any() for gradient in gradients.values())


def test_scorer_refuses_a_batch_in_the_other_layout() -> None:
    scorer = Scorer(tiny(), packing=True)
    with raises(ModelError, "packing_mismatch", batch="padded", model="packed"):
        scorer(micro_batch(sequences((3, 4)), packing=False))


def test_model_with_a_short_attention_window_can_be_padded_but_not_packed() -> None:
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    scorer = checked_scorer(tiny("qwen2", **window | {"sliding_window": 16}), packing=True)
    scorer(micro_batch(sequences((16, 3)), packing=True))
    with raises(ModelError, "sequence_over_window", longest=17, window=16) as raised:
        scorer(micro_batch(sequences((17, 3)), packing=True))
    assert "--packing false" in str(raised.value)
    with raises(ModelError, "sequence_over_window", longest=17, window=16):
        checked_scorer(tiny("qwen2", **window | {"sliding_window": 16}), packing=True, seq_len=17)
    padded = checked_scorer(tiny("qwen2", **window), packing=False, seq_len=17)
    tokens = sequences((20, 3))
    ours = padded(micro_batch(tokens, packing=False)).logprobs[:19]
    logits = padded.model(input_ids=torch.tensor(tokens[:1])).logits[0, :-1]
    wanted = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens[0][1:])[:, None]).squeeze(1)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        ("phimoe", {"sliding_window": 16}),
        ("llama4_text", {"attention_chunk_size": 16, "head_dim": 8, "no_rope_layers": [1, 1], "attn_scale": 0.1}),
    ],
)
def test_window_or_chunk_that_is_only_in_the_masks_is_refused(kind: str, window: dict[str, Any]) -> None:
    def model() -> Any:
        build: Any = AutoModelForCausalLM.from_config
        return build(AutoConfig.for_model(kind, **SHAPE, **EXPERTS, **window)).eval()

    checked_scorer(model(), packing=True, seq_len=16)
    with raises(ModelError, "sequence_over_window", longest=17, window=16):
        checked_scorer(model(), packing=True, seq_len=17)
    checked_scorer(model(), packing=False, seq_len=17)


def test_window_of_0_is_none() -> None:
    """transformers writes it for a Qwen2-MoE without a window, and builds its mask."""
    build: Any = AutoModelForCausalLM.from_config
    config = AutoConfig.for_model("qwen2_moe", **SHAPE, **EXPERTS, use_sliding_window=False)
    assert config.sliding_window == 0
    checked_scorer(build(config).eval(), packing=True, seq_len=64)


@pytest.mark.parametrize(
    "model",
    [
        CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.4)),
        GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=3.0, embedding_multiplier=2.0)),
    ],
    ids=["cohere", "granite"],
)
def test_heads_that_scale_their_logits_are_scored_exactly(model: Any) -> None:
    model.train()
    tokens = sequences((9,))
    logits = model(input_ids=torch.tensor(tokens)).logits[0, :-1] / 0.7
    wanted = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens[0][1:])[:, None]).squeeze(1)
    scorer = checked_scorer(model, packing=True)
    ours = scorer(micro_batch(tokens, packing=True, temperatures=[0.7])).logprobs
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_heads_that_are_not_a_plain_matrix_are_refused() -> None:
    with raises(ModelError, "logits_capped"):
        checked_scorer(Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)), packing=False)
    with raises(ModelError, "head_unsupported"):
        checked_scorer(PhiForCausalLM(PhiConfig(**{**SHAPE, "num_key_value_heads": 4})), packing=False)


def test_scorer_detects_an_unconfigured_logit_scale_before_training() -> None:
    model = tiny(tied=False)
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 1.1)
    with raises(ModelError, "logprobs_differ") as raised:
        checked_scorer(model, packing=True)
    assert raised.value.values["difference"] > 1e-3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reference_with_bfloat16_linear_layers_has_the_same_bits_under_autocast(name: str, tied: bool) -> None:
    """On CUDA the policy has float32 weights, so other numbers of the reference would be a penalty on nothing."""
    model = tiny(name, tied=tied)
    scorer, micro = Scorer(model, packing=True), micro_batch(sequences(RAGGED), packing=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = scorer(micro).logprobs
        cast_linear_weights(model, torch.bfloat16)
        after = scorer(micro).logprobs
    assert torch.equal(before, after)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["model.layers.0.mlp.down_proj.weight"] == torch.bfloat16
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.norm.weight"] == torch.float32
    assert tied or dtypes["lm_head.weight"] == torch.bfloat16


# --- Policies: the same log-probabilities in any micro-batch, and in any pass ----------------------------------------
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 4.0, 9.0, 20.0],
    "original_max_position_embeddings": 32,
}


def saved(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("longest", [32, 64])
def test_rotary_embedding_is_that_of_the_longest_served_sequence(tmp_path: Path, longest: int, packing: bool) -> None:
    """As in vLLM. transformers takes other frequencies for a row with a token beyond the original context."""
    config = Phi3Config(
        **SHAPE, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=LONG_ROPE
    )
    torch.manual_seed(0)
    folder = saved(Phi3ForCausalLM(config), tmp_path)
    scorer = Policy(ModelSource.of(str(folder), longest), "cpu", packing=packing).scorer
    short, long = sequences((20, longest))
    with torch.no_grad():
        together = scorer(micro_batch([short, long], packing=packing)).logprobs
        alone = [scorer(micro_batch([tokens], packing=packing)).logprobs for tokens in (short, long)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = Scorer(model, packing=False)(micro_batch([long], packing=False)).logprobs
    torch.testing.assert_close(alone[1], wanted, rtol=1e-4, atol=1e-4)


DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize(
    "model",
    [
        tiny("llama", **DYNAMIC),
        # Its embedding is one complex tensor.
        DeepseekV2ForCausalLM(
            DeepseekV2Config(**{**SHAPE, "num_key_value_heads": 4}, **DYNAMIC, q_lora_rank=None, kv_lora_rank=16,
                             qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=2)
        ),
    ],
    ids=["llama", "deepseek_v2"],
)  # fmt: skip
def test_rotary_embedding_that_depends_on_the_length_of_a_row_is_refused(model: Any, tmp_path: Path) -> None:
    folder = saved(model, tmp_path)
    Policy(ModelSource.of(str(folder), 32), "cpu", packing=False)
    with raises(ModelError, "rotary_depends_on_length", longest=33):
        Policy(ModelSource.of(str(folder), 33), "cpu")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        PhimoeForCausalLM(PhimoeConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.5, attention_dropout=0.5)),
        tiny("qwen2", attention_dropout=0.5),
        FalconForCausalLM(FalconConfig(**SHAPE, attention_dropout=0.5)),
        Starcoder2ForCausalLM(Starcoder2Config(**SHAPE, embedding_dropout=0.5, residual_dropout=0.5)),
        OPTForCausalLM(
            OPTConfig(**{**SHAPE, "intermediate_size": None}, ffn_dim=48, word_embed_proj_dim=32, dropout=0.5)
        ),
    ],
    ids=["router", "attention", "falcon", "starcoder2", "opt"],
)
def test_passes_draw_no_random_numbers(model: Any, tmp_path: Path, checkpointing: bool) -> None:
    folder = saved(model, tmp_path)
    policy = Policy(ModelSource.of(str(folder)), "cpu", packing=False, checkpointing=checkpointing)
    micro = micro_batch(sequences((9, 5)), packing=False)
    first, second = (policy.scorer(micro).logprobs for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()
    assert policy.model.get_input_embeddings().weight.grad is not None
