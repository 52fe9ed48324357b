"""A run that cannot be trained is refused before the first step."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.learner.learning import make_samples
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gristmill_trainer import learner_factory, memory
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import ModelError, OutOfMemoryError, TrainerError
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.settings import TrainerSettings


def test_dr_grpo_needs_a_longest_completion() -> None:
    """Environments of Atropos' do not report a longest completion."""
    plan = LearnerPlan(ModelSource.of("nowhere"), None, TrainerSettings(objective="dr_grpo"), None)
    with raises(TrainerError, "max_completion_length_missing", objective="dr_grpo"):
        build_learner(plan, DistContext())


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"objective": "dr_grpo"}, True),
        ({"objective": "dr_grpo", "advantage_scale": "batch"}, True),
        ({"objective": "dr_grpo", "advantage_scale": "none"}, False),
        ({"objective": "dapo"}, False),
    ],
)
def test_dr_grpo_with_scaled_advantages_warns(
    model_dir: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warns: bool
) -> None:
    plan = LearnerPlan(ModelSource.of(str(model_dir)), None, TrainerSettings(device="cpu", **settings), 16)
    build_learner(plan, DistContext())
    assert any("advantage_scale" in record.getMessage() for record in caplog.records) == warns


def test_model_whose_config_names_its_shape_differently_can_be_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 writes n_embd, n_head and n_layer."""
    caplog.set_level(logging.INFO)
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    plan = LearnerPlan(ModelSource.of(str(tmp_path), 32), None, TrainerSettings(device="cpu"), 16)
    build_learner(plan, DistContext())
    assert "per token of a micro-batch" in caplog.text
    monkeypatch.setattr(memory, "_number", lambda config, name: None)
    build_learner(plan, DistContext())
    assert "does not give its shape" in caplog.text


def test_micro_batches_are_as_large_as_the_gpus_free_memory_allows(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def largest(room: float, **settings: Any) -> int:
        monkeypatch.setattr(learner_factory, "free_memory", lambda device: room)
        chosen = TrainerSettings(device="cpu", **settings)
        learner, _ = build_learner(LearnerPlan(ModelSource.of(str(model_dir)), None, chosen, 16), DistContext())
        samples = make_samples(64)
        return max(sum(len(samples[number]) for number in micro or ()) for micro in learner._plan(samples)[0])

    model = Policy(ModelSource.of(str(model_dir)), "cpu").model
    needed = memory.Memory.of(model.config, model.num_parameters(), TrainerSettings(), cuda=False)
    assert needed is not None
    room = (needed.fixed + 200 * needed.per_token) / 0.92
    everything = sum(map(len, make_samples(64)))
    assert 100 < largest(room) <= 200
    assert largest(room, token_budget=64) <= 64
    assert largest(10 * room) == everything
    with raises(OutOfMemoryError, "model_too_large"):
        largest(100_000)


def test_micro_batches_use_the_memory_that_a_model_server_frees_before_the_first_step(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Policy(ModelSource.of(str(model_dir)), "cpu").model
    needed = memory.Memory.of(model.config, model.num_parameters(), TrainerSettings(), cuda=False)
    assert needed is not None
    samples = make_samples(64)

    def largest(awake: float, asleep: float) -> int:
        monkeypatch.setattr(learner_factory, "free_memory", lambda device: awake)
        plan = LearnerPlan(ModelSource.of(str(model_dir)), None, TrainerSettings(device="cpu"), 16)
        learner, _ = build_learner(plan, DistContext())
        monkeypatch.setattr(learner_factory, "free_memory", lambda device: asleep)
        return max(sum(len(samples[number]) for number in micro or ()) for micro in learner._plan(samples)[0])

    room = (needed.fixed + 200 * needed.per_token) / 0.92
    longest = max(map(len, samples))
    assert largest(needed.state + 1, needed.state + 1) <= longest
    assert 100 < largest(needed.state + 1, room) <= 200


def test_micro_batches_are_planned_for_layers_whose_compilation_failed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes are scored before the first step, and may find that torch.compile does not work here."""
    planned = []

    def of(config: object, parameters: int, settings: TrainerSettings, **options: Any) -> memory.Memory | None:
        planned.append(settings.compile)
        return _MEMORY_OF(config, parameters, settings, **options)

    monkeypatch.setattr(memory.Memory, "of", of)
    monkeypatch.setattr(learner_factory, "free_memory", lambda device: 10**12)
    settings = TrainerSettings(device="cpu", compile=True)
    learner, _ = build_learner(LearnerPlan(ModelSource.of(str(model_dir)), None, settings, 16), DistContext())
    learner.policy.scorer.run_eagerly()
    learner._plan(make_samples(4))
    assert planned == [True, False]


_MEMORY_OF = memory.Memory.of


def test_sleeping_servers_and_device_memory_need_room_for_the_copies_of_a_publication(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the buffer takes no device memory, so the test sets its bytes."""
    settings = TrainerSettings(device="cpu", publisher="ipc")
    source = ModelSource.of(str(model_dir))
    model = Policy(source, "cpu").model
    found = memory.Memory.of(model.config, model.num_parameters(), settings, cuda=False)
    assert found is not None
    needed = replace(found, published=1000)
    monkeypatch.setattr(memory.Memory, "of", lambda *arguments, **options: needed)
    monkeypatch.setattr(learner_factory, "free_memory", lambda device: needed.state)
    build_learner(LearnerPlan(source, None, settings, 16), DistContext())
    late = settings.model_copy(update={"max_staleness": 1})
    build_learner(LearnerPlan(replace(source, sleep=True), None, late, 16), DistContext())
    with raises(OutOfMemoryError, "model_too_large", needed=needed.state + 1000):
        build_learner(LearnerPlan(replace(source, sleep=True), None, settings, 16), DistContext())


@pytest.mark.parametrize(("device", "size"), [("cpu", 4), ("cuda", 2)])
def test_reference_is_frozen_and_takes_the_memory_that_is_reported(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, device: str, size: int
) -> None:
    settings = TrainerSettings(device="cpu", kl_beta=0.1)
    monkeypatch.setattr(Policy, "freeze", lambda policy: freeze(policy, device))
    learner, _ = build_learner(LearnerPlan(ModelSource.of(str(model_dir)), None, settings, 16), DistContext())
    reference = learner._reference
    assert reference is not None
    weights = list(reference.model.parameters())
    assert not any(weight.requires_grad for weight in weights)
    assert reference.model.model.layers[0].self_attn.q_proj.weight.element_size() == size
    count = sum(weight.numel() for weight in weights)
    needed = memory.Memory.of(reference.model.config, count, settings, cuda=device == "cuda")
    assert needed is not None
    assert needed.reference == pytest.approx(sum(weight.nbytes for weight in weights), rel=0.02)


def freeze(policy: Policy, device: str) -> None:
    policy.device = torch.device(device)
    _FREEZE(policy)
    policy.device = torch.device("cpu")


_FREEZE = Policy.freeze


@pytest.mark.parametrize("served_rank", [0, 2])
@pytest.mark.parametrize("learning_rate", [1e-6, 1e-4])
def test_unusual_settings_of_lora_are_logged(
    model_dir: Path, caplog: pytest.LogCaptureFixture, served_rank: int, learning_rate: float
) -> None:
    caplog.set_level(logging.INFO)
    source = ModelSource(str(model_dir), str(model_dir), None, 64, lora_rank=served_rank)
    settings = TrainerSettings(device="cpu", lora_rank=2, learning_rate=learning_rate)
    build_learner(LearnerPlan(source, None, settings, None), DistContext())
    assert ("low for LoRA" in caplog.text) == (learning_rate == 1e-6)
    assert ("LORA_RANK=2" in caplog.text) == (served_rank == 0)


def test_reference_without_some_of_the_policys_tokens_is_refused(model_dir: Path, tmp_path: Path) -> None:
    small = AutoModelForCausalLM.from_pretrained(model_dir)
    small.resize_token_embeddings(48)
    small.save_pretrained(tmp_path)
    settings = TrainerSettings(device="cpu", kl_beta=0.1, ref_model=str(tmp_path))
    with raises(ModelError, "reference_vocabulary", vocabulary=48, of_policy=64):
        build_learner(LearnerPlan(ModelSource.of(str(model_dir)), None, settings, 16), DistContext())
