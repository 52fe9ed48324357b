"""The metrics of a step: clips, weights, log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.learner.learning import Build, make_samples
from transformers import AutoModelForCausalLM

from gristmill_trainer.metrics import measure


def test_reported_clips_match_the_clips_of_the_objective(build: Build) -> None:
    """Ratios that moved far, because the old log-probabilities are far away: the share of tokens without a gradient."""
    samples = make_samples()
    now = build().logprobs(samples)
    moved = [
        replace(one, old_logprobs=np.where(one.trained, row - 2.0, 0).astype(np.float32))
        for one, row in zip(samples, now, strict=True)
    ]
    positive = np.concatenate([one.advantages[one.trained] > 0 for one in samples])
    for objective, share in (("dapo", positive.mean()), ("cispo", 1.0), ("gspo", positive.mean())):
        found = measure(build(objective=objective).step(moved, 1).token_stats)
        assert found.clip_high_share == pytest.approx(share), objective
        assert found.clip_low_share == 0.0
        assert found.ratio is not None
        assert found.ratio["p50"] == pytest.approx(math.exp(2.0), rel=1e-3)
    assert measure(build(objective="cispo", clip_epsilon_high=8.0).step(moved, 1).token_stats).clip_high_share == 0.0


def test_sequence_weights_are_reported_if_the_objective_uses_them(build: Build) -> None:
    samples = make_samples()
    now = build().logprobs(samples)
    known = [
        replace(one, rollout_logprobs=np.where(one.trained, row - 0.1, 0).astype(np.float32))
        for one, row in zip(samples, now, strict=True)
    ]
    token = measure(build(importance_cap=1.5).step(known, 1).token_stats)
    sequence = measure(build(importance_cap=1.5, importance_level="sequence").step(known, 1).token_stats)
    lengths = np.repeat([one.trained_tokens for one in samples], [one.trained_tokens for one in samples])
    assert token.importance is not None
    assert sequence.importance is not None
    assert token.importance["max"] == pytest.approx(math.exp(0.1), rel=1e-3)
    assert token.importance_capped_share == 0.0
    assert sequence.importance["max"] == pytest.approx(math.exp(0.1 * lengths.max()), rel=1e-3)
    assert sequence.importance_capped_share == pytest.approx((np.exp(0.1 * lengths) > 1.5).mean())


def test_reported_logprobs_match_the_models_own_logits(build: Build, model_dir: Path) -> None:
    learner, samples = build(token_budget=24), make_samples()
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    for sample, found in zip(samples, learner.logprobs(samples), strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1].double() / 0.8
        wanted = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1).numpy()
        assert found[1:][sample.trained[1:]] == pytest.approx(wanted[sample.trained[1:]], abs=1e-5)
        assert not found[~sample.trained].any()
