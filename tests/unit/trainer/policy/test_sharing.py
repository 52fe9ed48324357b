"""A prefix that sequences of a group share is computed once, with the scores and gradients of whole sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.trainer.policy.models import ARCHITECTURES, VOCABULARY, checked_scorer, tiny
from tests.unit.trainer.policy.test_scoring import SHAPE, assert_same, learn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.types import MicroBatch, Sample, Teacher
from gristmill_trainer.policy.head import Scores
from gristmill_trainer.policy.lora import Lora, attach
from gristmill_trainer.policy.scoring import Scorer


def sample(tokens: Sequence[int], prompt: int, group_id: str = "g") -> Sample:
    """A teacher and all tokens from `prompt` on are in the loss."""
    length = len(tokens)
    nothing = np.zeros(length, np.float32)
    ids = np.arange(2 * length, dtype=np.int32).reshape(length, 2) % VOCABULARY
    return Sample(
        group_id=group_id,
        tokens=np.array(tokens, np.int32),
        trained=np.arange(length) >= max(prompt, 1),
        rollout_logprobs=nothing,
        advantages=nothing,
        temperature=0.8,
        teacher=Teacher(ids, np.full((length, 2), -1.0, np.float32)),
    )


def tokens_of(length: int, seed: int) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, VOCABULARY, length)))


PROMPT, OTHER, TURN = tokens_of(19, 0), tokens_of(11, 1), tokens_of(7, 2)
CASES: dict[str, list[Sample]] = {
    "group": [sample([*PROMPT, *tokens_of(length, length)], 19) for length in (1, 6, 3, 9)],
    "two groups and one alone": [
        sample([*PROMPT, *tokens_of(4, 3)], 19, "a"),
        sample([*OTHER, *tokens_of(9, 4)], 11, "b"),
        sample([*PROMPT, *tokens_of(2, 5)], 19, "a"),
        sample(tokens_of(13, 6), 5, "c"),
        sample([*OTHER, *tokens_of(1, 7)], 11, "b"),
    ],
    "prefix of another": [sample([*PROMPT, *TURN], 19), sample(PROMPT, 12), sample([*PROMPT, *TURN, 5, 6], 19)],
    "part of the prompt": [sample([*PROMPT, *tokens_of(5, seed), *TURN], 24) for seed in range(3)],
    "branches": [
        sample([*PROMPT, *TURN, *tokens_of(3, 8)], 19),
        sample([*PROMPT, *TURN, *tokens_of(5, 9)], 26),
        sample([*PROMPT, *OTHER], 19),
        sample([*PROMPT, *TURN, *tokens_of(5, 9), *OTHER], 31),
    ],
    "equal sequences": [sample([*PROMPT, *TURN], 19), sample([*PROMPT, *TURN], 22), sample([*PROMPT, 3], 19)],
    "trained prompt": [sample([*PROMPT, *tokens_of(4, seed)], 0) for seed in range(4)],
}


def batch(samples: Sequence[Sample], *, sharing: bool) -> MicroBatch:
    return collate(
        samples, range(len(samples)), np.ones(len(samples)), packing=True, sharing=sharing, device=torch.device("cpu")
    )


def assert_equal(mine: tuple[Scores, dict[str, Any]], wanted: tuple[Scores, dict[str, Any]]) -> None:
    """To 1e-6, relative to the length of all scores of a kind and of the whole gradient."""

    def check(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
        found, expected = (torch.cat([tensor.flatten().double() for tensor in side]) for side in (one, other))
        assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())

    for one, other in zip(mine[0], wanted[0], strict=True):
        assert one is not None
        assert other is not None
        check([one], [other])
    assert mine[1].keys() == wanted[1].keys()
    check([mine[1][name] for name in wanted[1]], list(wanted[1].values()))


SMALL = SHAPE | {"initializer_range": 0.1}


def auto(kind: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(kind, **(SMALL | {"head_dim": 8, "tie_word_embeddings": True} | changes))
    build: Any = AutoModelForCausalLM.from_config
    return build(config)


MODELS: dict[str, Callable[[], Any]] = {
    **{name: partial(tiny, name, initializer_range=0.1) for name in ARCHITECTURES},
    "gemma": lambda: auto("gemma"),
    "gemma3": lambda: auto("gemma3_text", sliding_window=64),
    "mixtral": lambda: auto("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.4)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0)),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


@pytest.mark.parametrize("name", MODELS)
def test_shared_prompt_gives_the_scores_and_gradients_of_whole_sequences(name: str) -> None:
    scorer = checked_scorer(build(name), packing=True)
    assert scorer.sharing
    for case, samples in CASES.items():
        shared, whole = batch(samples, sharing=True), batch(samples, sharing=False)
        assert shared.tokens < whole.tokens, case
        assert_equal(learn(scorer, shared), learn(scorer, whole))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shared_prompt_gives_each_gradient_in_float64(name: str) -> None:
    scorer = Scorer(build(name, torch.float64), packing=True)
    for samples in CASES.values():
        found, wanted = (learn(scorer, batch(samples, sharing=sharing)) for sharing in (True, False))
        assert_same(found, wanted, 1e-6)


@settings(max_examples=15, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=7),
    seed=st.integers(0, 99),
)
def test_any_shared_parts_give_the_scores_of_whole_sequences(parts: list[tuple[int, int, int]], seed: int) -> None:
    samples = []
    for number, (group, shared, own) in enumerate(parts):
        tokens = [*tokens_of(31, seed + group)[: shared + 1], *tokens_of(own, 1000 + seed + number)]
        samples.append(sample(tokens, shared // 2, f"g{group}"))
    scorer = Scorer(build("qwen3"), packing=True)
    if any(one.trained_tokens for one in samples):
        assert_equal(*(learn(scorer, batch(samples, sharing=sharing)) for sharing in (True, False)))


def test_shared_prompt_with_adapters_and_recomputed_layers_gives_the_same_scores_and_gradients() -> None:
    model = build("qwen2")
    attach(model, Lora(4, 8.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    scorer = Scorer(model, packing=True)
    scorer.checkpoint_layers()
    for samples in CASES.values():
        assert_equal(*(learn(scorer, batch(samples, sharing=sharing)) for sharing in (True, False)))


def test_shared_prompt_is_one_row_of_the_model_whose_bits_a_repetition_gives_again() -> None:
    scorer = Scorer(build("qwen3"), packing=True)
    micro = batch(CASES["group"], sharing=True)
    assert micro.layout.tokens.shape == (1, 19 + 1 + 6 + 3 + 9)
    assert_same(learn(scorer, micro), learn(scorer, batch(CASES["group"], sharing=True)), 0.0)


def test_tokens_after_a_shared_prompt_see_no_other_sequence() -> None:
    scorer = Scorer(build("qwen2"), packing=True)
    before = batch(CASES["group"], sharing=True)
    changed = batch([*CASES["group"][:3], sample([*PROMPT, *tokens_of(9, 77)], 19)], sharing=True)
    mine, other = scorer(before).logprobs, scorer(changed).logprobs
    assert torch.equal(mine[:10], other[:10])
    assert not torch.equal(mine[10:], other[10:])


def shift_within_sequences(model: Any) -> None:
    """Adds to each token the state of the token before it, as a short convolution does that knows where each packed
    sequence begins."""

    def mix(_module: Any, _inputs: Any, keywords: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
        begins = keywords["position_ids"][..., None] == 0
        return hidden + hidden.roll(1, dims=1).masked_fill(begins, 0.0)

    model.get_decoder().layers[0].register_forward_hook(mix, with_kwargs=True)


def test_model_that_mixes_tokens_without_attention_computes_each_prompt_and_logs_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build("qwen2")
    shift_within_sequences(model)
    with caplog.at_level(logging.INFO):
        scorer = checked_scorer(model, packing=True)
    assert not scorer.sharing
    assert "Qwen2ForCausalLM after a shared prompt differ" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert checked_scorer(build("qwen2"), packing=True).sharing
        assert not checked_scorer(build("qwen2"), packing=False).sharing
    assert "prompt" not in caplog.text
