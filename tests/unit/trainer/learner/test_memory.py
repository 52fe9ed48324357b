"""Memory: the computed bytes are the bytes that autograd saves, and an update that runs out of memory is repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.grids import part_of_grid
from tests.unit.trainer.learner.learning import Build, assert_same_bits, farthest, make_samples, weights
from transformers import AutoConfig, AutoModelForCausalLM

from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.types import MicroBatch, Sample
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import ModelError, OutOfMemoryError, TrainerError
from gristmill_trainer.learner import Learner
from gristmill_trainer.memory import Memory
from gristmill_trainer.out_of_memory import FILE, MemoryLimits
from gristmill_trainer.policy import Policy
from gristmill_trainer.policy.attention import packed_arguments
from gristmill_trainer.policy.lora import Lora, attach, merged_tensors
from gristmill_trainer.policy.scoring import Scorer
from gristmill_trainer.receipts.probes import ANY_PROBES, distance, own_scores
from gristmill_trainer.settings import TrainerSettings

from_config: Callable[..., Any] = AutoModelForCausalLM.from_config

SHAPE = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2,
}  # fmt: skip


def saved_bytes(model: Any, inputs: dict[str, Any], *, autocast: bool = False) -> int:
    """Returns the bytes of the tensors that the decoder saves for its backward pass, without its weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # so that no two tensors have one address
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model.get_decoder()(**inputs, use_cache=False)
    return sum(saved.values())


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
def test_computed_activations_are_the_bytes_that_autograd_saves(kind: str, autocast: bool) -> None:
    config = AutoConfig.for_model(kind, **SHAPE, **({"head_dim": 64} if kind == "qwen3" else {}))
    model = from_config(config, attn_implementation="sdpa")
    few, many = (
        saved_bytes(model, {"input_ids": torch.zeros(1, tokens, dtype=torch.int64)}, autocast=autocast)
        for tokens in (32, 96)
    )
    memory = Memory.of(config, model.num_parameters(), TrainerSettings(compile=False), cuda=autocast)
    assert memory is not None
    assert memory.per_token == pytest.approx((many - few) / 64, rel=0.1)


def test_computed_copies_of_keys_are_the_bytes_that_autograd_saves_for_shared_prompts() -> None:
    config = AutoConfig.for_model("qwen2", **SHAPE)
    scorer = Scorer(from_config(config), packing=True)
    memory = Memory.of(config, scorer.model.num_parameters(), TrainerSettings(), cuda=False)
    assert memory is not None

    def saved(answers: list[int]) -> int:
        samples = []
        for number, length in enumerate(answers):
            tokens = np.array([*range(40), *[41 + number] * length], np.int32)
            nothing = np.zeros(len(tokens), np.float32)
            samples.append(Sample("", tokens, nothing > 0, nothing, nothing, 1.0))
        micro = collate(samples, range(len(samples)), nothing, packing=True, sharing=True, device=torch.device("cpu"))
        layout = micro.layout
        inputs = {"input_ids": layout.tokens, "position_ids": layout.positions, **packed_arguments(layout)}
        return saved_bytes(scorer.model, inputs)

    wanted = 56 * memory.per_token + (4 * 40 + 4 + 8 + 12 + 32) * memory.per_copied_key
    assert saved([4, 8, 12, 32]) - saved([0]) == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("results", ["trainer-cuda", "trainer-cuda-lora"])
def test_computed_memory_is_within_a_tenth_of_the_peaks_on_a_card(results: str) -> None:
    measured = json.loads(Path(f"benchmarks/results/{results}.json").read_text(encoding="utf-8"))["cases"]
    cases = [case for case in measured if case["backend"] in ("ours", "eager")]
    assert cases
    for case in cases:
        shape, found = case["setting"]["shape"], case["found"]
        config = {
            "model_type": shape["family"].lower(),
            "vocab_size": shape["vocabulary"],
            "hidden_size": shape["hidden"],
            "intermediate_size": shape["intermediate"],
            "num_hidden_layers": shape["layers"],
            "num_attention_heads": shape["heads"],
            "num_key_value_heads": shape["kv_heads"],
            "head_dim": shape["head_dim"],
        }
        settings = TrainerSettings(lora_rank=shape["lora_rank"], compile=False if case["backend"] == "eager" else None)
        with torch.device("meta"):
            model = from_config(AutoConfig.for_model(**config, tie_word_embeddings=shape["tied"]))
        memory = Memory.of(config, model.num_parameters(), settings, cuda=True)
        assert memory is not None
        assert found["peak"] == pytest.approx(memory.fixed + memory.per_token * found["tokens"], rel=0.1), case


def test_memory_leaves_out_what_is_on_other_gpus_or_in_main_memory() -> None:
    config = AutoConfig.for_model("qwen2", **SHAPE)

    def memory(*, gpus: int = 1, **settings: Any) -> Memory:
        found = Memory.of(config, 10**6, TrainerSettings(**settings), cuda=True, gpus=gpus)
        assert found is not None
        return found

    inputs = 4 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"]
    kept, offloaded = memory(gradient_checkpointing=True), memory(gradient_checkpointing="offload")
    assert kept.per_token - offloaded.per_token == inputs
    assert memory(kl_beta=0.1, gpus=4).reference == 4 * 10**6 // 4, "float32, divided"
    table = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert memory(kl_beta=0.1).reference == 2 * 10**6 + 2 * table


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "gemma3", "mixtral"])
def test_memory_of_architectures_with_other_names_in_their_config(kind: str) -> None:
    memory = Memory.of(AutoConfig.for_model(kind), 10**9, TrainerSettings(lora_rank=4), cuda=False)
    assert memory is not None
    assert memory.per_token > 0


def test_memory_counts_the_buffer_for_a_server_on_the_same_gpu() -> None:
    found = {
        (publisher, rank): Memory.of(SHAPE, 10**6, TrainerSettings(publisher=publisher, lora_rank=rank), cuda=True)
        for publisher in ("filesystem", "ipc")
        for rank in (0, 8)
    }
    sizes = {key: memory.state for key, memory in found.items() if memory is not None}
    assert sizes["ipc", 0] - sizes["filesystem", 0] == 2 * 10**6, "bfloat16"
    assert sizes["ipc", 8] == sizes["filesystem", 8], "adapters are published as files"


def test_memory_counts_the_widest_layer_and_is_unknown_without_a_shape() -> None:
    lists: dict[str, Any] = {**SHAPE, "intermediate_size": [64, 384, 128], "num_key_value_heads": [2, 1, 2]}
    settings = TrainerSettings()
    assert Memory.of(lists, 10**6, settings, cuda=False) == Memory.of(SHAPE, 10**6, settings, cuda=False)
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        for value in (None, 0, "8", [], [8, None], True):
            assert Memory.of({**SHAPE, name: value}, 10**6, settings, cuda=False) is None
    assert Memory.of(None, 10**6, settings, cuda=False) is None


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


def small_memory(
    learner: Learner,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    error: type[Exception],
    text: str = OUT_OF_MEMORY,
) -> list[int]:
    """Makes micro-batches of more than `most` tokens fail, or of four times as many without a backward pass.

    Returns the tokens of each micro-batch with a backward pass from now on.
    """
    seen: list[int] = []
    real: Callable[..., Any] = learner.policy.scorer

    def scored(micro: MicroBatch, **options: Any) -> Any:
        tokens = micro.layout.tokens.numel()
        if torch.is_grad_enabled():
            seen.append(tokens)
        if tokens > (most if torch.is_grad_enabled() else 4 * most):
            raise error(text)
        return real(micro, **options)

    monkeypatch.setattr(learner.policy, "scorer", scored)
    return seen


def longer(sample: Sample, length: int) -> Sample:
    """Returns a sample of the same group with `length` tokens."""
    return replace(
        sample, tokens=np.ones(length, np.int32), trained=np.arange(length) >= 5,
        rollout_logprobs=np.zeros(length, np.float32), advantages=np.ones(length, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "error"),
    part_of_grid([{}, {"token_budget": 80}, {"minibatches": 2}], [torch.OutOfMemoryError, MemoryError], every=3),
)
def test_update_without_memory_is_repeated_in_halves_with_the_same_result(
    build: Build, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], error: type[Exception]
) -> None:
    samples = make_samples()
    expected, learner = build(plain=True, packing=True, **settings), build(plain=True, packing=True, **settings)
    longest = max(map(len, samples))
    seen = small_memory(learner, monkeypatch, longest + 8, error)
    whole, split = expected.step(samples, 1), learner.step(samples, 1)
    assert (whole.halved, split.skipped, split.left_out) == (0, None, 0)
    assert split.halved > 0
    assert split.loss == pytest.approx(whole.loss, abs=1e-6)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert farthest(weights(learner), weights(expected)) <= 1e-6
    assert sorted(split.order) == sorted(whole.order)
    seen.clear()
    assert learner.step(samples, 2).halved == 0, "the smaller budget stays"
    assert max(seen) <= longest + 8


def test_longer_sequence_after_a_halved_budget_has_a_micro_batch_alone(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, samples = build(packing=True), make_samples()
    seen = small_memory(learner, monkeypatch, 60, torch.OutOfMemoryError)
    assert learner.step(samples, 1).halved == 1
    smaller = max(seen[1:])
    long = longer(samples[0], 58)
    assert smaller < len(long)
    seen.clear()
    result = learner.step([long, *samples[1:]], 2)
    assert (result.skipped, result.left_out, result.halved) == (None, 0, 0)
    assert max(seen) == len(long)


def test_sequence_that_does_not_fit_alone_is_left_out_and_changes_no_bit(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, samples = build(packing=True, minibatches=4), make_samples()
    long = longer(samples[0], 64)
    small_memory(learner, monkeypatch, 48, torch.OutOfMemoryError)
    before = weights(learner)
    result = learner.step([long], 1)
    assert result.skipped is not None
    assert result.left_out == 1
    assert_same_bits(weights(learner), before)
    result = learner.step([long, *samples[1:]], 2)
    assert (result.skipped, result.left_out) == (None, 1), "the other updates are taken"
    assert result.problem is not None
    assert result.tokens == sum(map(len, samples[2:])), "one update has the two samples of the long one's group"
    assert farthest(weights(learner), before) > 0


def test_sequence_that_did_not_fit_in_an_earlier_start_is_left_out(build: Build) -> None:
    """Also without a second attempt, and other updates are taken."""
    samples = make_samples()
    long = longer(samples[0], 64)
    learner = build(packing=True, minibatches=4, limits=MemoryLimits(too_long=64))
    before = weights(learner)
    result = learner.step([long, *samples[1:]], 1)
    assert (result.skipped, result.left_out) == (None, 1)
    assert farthest(weights(learner), before) > 0
    assert learner.step([longer(samples[0], 63), *samples[1:]], 2).left_out == 0


def test_sequence_that_could_not_be_scored_leaves_out_a_step_that_scores(build: Build) -> None:
    samples = make_samples()
    samples = [longer(samples[0], 64), *samples[1:]]
    limits = MemoryLimits(too_long_to_score=64)
    assert build(packing=True, minibatches=4, limits=limits).step(samples, 1).skipped is not None
    assert build(packing=True, limits=limits).step(samples, 1).skipped is None, "one update needs no scores before it"


def test_smaller_budget_of_an_earlier_start_stays_below_the_settings(build: Build) -> None:
    samples = make_samples()
    longest = max(map(len, samples))
    learner = build(packing=True, token_budget=10 * longest, limits=MemoryLimits(token_budget=longest))
    plan = learner._plan(samples)[0]
    assert len(plan) > 1
    assert all(learner._tokens(samples, micro or ()) <= longest for micro in plan)


def test_limits_count_for_the_same_settings_and_ranks_only(tmp_path: Path) -> None:
    settings, limits = TrainerSettings(batch_size=4), MemoryLimits(token_budget=512, too_long=300)
    assert MemoryLimits.read(tmp_path / "run", settings, 2) == MemoryLimits()
    limits.write(tmp_path / "run", settings, 2)
    assert MemoryLimits.read(tmp_path / "run", TrainerSettings(batch_size=4), 2) == limits
    assert MemoryLimits.read(tmp_path / "run", settings, 4) == MemoryLimits()
    recomputed = TrainerSettings(batch_size=4, gradient_checkpointing=True)
    assert MemoryLimits.read(tmp_path / "run", recomputed, 2) == MemoryLimits()
    for damaged in (b"{", b'{"of": "\xff"}'):
        (tmp_path / "run" / FILE).write_bytes(damaged)
        with raises(TrainerError, "memory_limits_unreadable", path=tmp_path / "run" / FILE):
            MemoryLimits.read(tmp_path / "run", settings, 2)


ERRORS = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "NCCL error in: NCCLUtils.cpp:98, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
]


@pytest.mark.long
def test_error_of_cublas_counts_as_out_of_memory(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other errors of the list are tried below, without a step for each."""
    learner, samples = build(plain=True, packing=True), make_samples()
    small_memory(learner, monkeypatch, max(map(len, samples)) + 8, RuntimeError, ERRORS[3])
    result = learner.step(samples, 1)
    assert result.skipped is None
    assert result.halved > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(OUT_OF_MEMORY), MemoryError(), *map(RuntimeError, ERRORS)])
def test_optimizer_without_memory_for_its_moments_ends_the_training_with_a_named_error(
    build: Build, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    learner = build(packing=True)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(learner.optimizer, "step", fail)
    with raises(OutOfMemoryError, "optimizer_out_of_memory"):
        learner.step(make_samples(), 1)


def compile_without_compiler(policy: Policy) -> None:
    def fails(*_: object) -> Callable[..., Any]:
        raise RuntimeError("no C compiler")

    policy.scorer.compile_layers()
    for layer in policy.scorer.layers():
        layer.compile(backend=fails)


@pytest.mark.parametrize("several", [False, True])
def test_first_scores_without_a_compiler_are_computed_without_it(
    build: Build, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """They are a run's first pass through the compiled layers. Several ranks cannot repeat a collective."""
    policy = build().policy
    expected = own_scores(policy, ANY_PROBES)
    compile_without_compiler(policy)
    monkeypatch.setattr(policy, "_dist", DistContext(0, 2 if several else 1, 0))
    with raises(ModelError, "compile_failed") if several else nullcontext():
        assert distance(own_scores(policy, ANY_PROBES), expected) == 0
    assert policy.scorer.compiled == several


@pytest.mark.long
def test_step_whose_compilation_fails_is_repeated_without_it(build: Build) -> None:
    samples = make_samples()
    expected, learner = build(plain=True), build(plain=True)
    scorer = learner.policy.scorer
    compile_without_compiler(learner.policy)
    whole, repeated = expected.step(samples, 1), learner.step(samples, 1)
    assert repeated.skipped is None
    assert not scorer.compiled
    assert repeated.loss == whole.loss
    assert_same_bits(weights(learner), weights(expected))


def test_other_errors_of_a_step_are_raised(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build(packing=True)
    small_memory(learner, monkeypatch, 1, RuntimeError)
    with pytest.raises(RuntimeError, match="Tried"):
        learner.step(make_samples(), 1)


def test_adapters_on_a_bfloat16_base_are_float32_and_merge_without_loss() -> None:
    config = AutoConfig.for_model("qwen2", **SHAPE)
    model = from_config(config, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach(model, Lora(4, 8.0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1e-4)
    delta = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(dict(merged_tensors(model))[name], before[name].float() + delta, atol=1e-7, rtol=0)
