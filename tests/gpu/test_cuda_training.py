"""The trainer on a CUDA card: the same step as on a CPU, however it is computed, and its memory."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gristmill import PolicyVersion
from gristmill_trainer.data.types import Sample
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import ModelError
from gristmill_trainer.learner import Learner
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.memory import CHUNK_BYTES, Memory
from gristmill_trainer.model_state import LearnerState, shard
from gristmill_trainer.policy import ModelSource, attention
from gristmill_trainer.policy.model import gathered
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.settings import TrainerSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card here")
VOCABULARY = 4096
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    # Wide weights, so that attention to another sequence changes the scores.
    "initializer_range": 0.06,
}
BFLOAT16 = 0.03
"""Relative difference of a sum of many products in bfloat16."""


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    found = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=64, tie_word_embeddings=True))
    model.save_pretrained(found)
    return found


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    _limit(torch.cuda.get_device_properties(0).total_memory)


def build(folder: Path, weights: str | None = None, **settings: Any) -> tuple[Learner, LearnerState]:
    source = ModelSource(str(folder), str(folder), None, 16_384, served_dtype="bfloat16")
    defaults: dict[str, Any] = {"device": "cuda", "batch_size": 8, "compile": False, "max_grad_norm": 1e9}
    return build_learner(LearnerPlan(source, weights, TrainerSettings(**(defaults | settings)), None), DistContext())


def samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        trained = np.arange(length) >= max(1, length // 4)
        made.append(
            Sample(
                group_id=f"g{number // 4}",
                tokens=rng.integers(0, VOCABULARY, length, dtype=np.int32),
                trained=trained,
                rollout_logprobs=np.where(trained, -8.5 + 0.2 * rng.normal(size=length), 0).astype(np.float32),
                advantages=np.where(trained, rng.normal(), 0).astype(np.float32),
                temperature=0.9,
            )
        )
    return made


RAGGED = [300, 7, 128, 2, 511, 64, 33, 200]


def gradient(learner: Learner, batch: list[Sample]) -> tuple[float, torch.Tensor]:
    """Returns the loss and the whole gradient of one update, on the CPU."""
    update = learner._in_memory(batch, lambda: learner._update(batch, lambda: True, untouched=True))
    found = torch.cat(
        [gathered(one.grad).flatten() for one in learner.policy.trained_parameters() if one.grad is not None]
    ).float()
    learner.optimizer.zero_grad(set_to_none=True)
    return update.loss, found.cpu()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_fused_kernel_matches_one_call_per_sequence() -> None:
    attention.register()
    fused = attention._fused
    assert fused is not None, "this torch has no kernel for packed rows"
    torch.manual_seed(1)
    ends = torch.tensor([0, *np.cumsum(RAGGED)], device="cuda", dtype=torch.int32)
    for heads, keys, size in ((8, 8, 64), (8, 2, 128), (12, 4, 96)):
        q, k, v = (
            torch.randn(1, count, sum(RAGGED), size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for count in (heads, keys, keys)
        )
        slope = torch.linspace(-1, 1, size, device="cuda")
        row = [one[0].transpose(0, 1) for one in (q, k, v)]
        packed = fused(row[0], row[1], row[2], ends, max(RAGGED), None)[None]
        apart = attention._by_segment(q, k, v, ends, None)
        results = [[out, *torch.autograd.grad((out * slope).sum(), (q, k, v))] for out in (packed, apart)]
        for mine, other in zip(*results, strict=True):
            assert distance(mine.detach().float(), other.detach().float()) < 0.01, (heads, keys, size)


def test_step_on_the_card_is_the_step_on_a_cpu(folder: Path) -> None:
    batch = samples(RAGGED)
    loss, wanted = gradient(build(folder, device="cpu")[0], batch)
    learner, _ = build(folder)
    mine, found = gradient(learner, batch)
    assert mine == pytest.approx(loss, abs=2e-3)
    assert distance(found, wanted) < BFLOAT16


@pytest.mark.parametrize(
    "how",
    [
        {"packing": False},
        {"token_budget": 520},
        {"batch_size": 1, "gradient_accumulation_steps": 8},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": "offload"},
        {"compile": True},
        {"compile": True, "gradient_checkpointing": True, "token_budget": 520},
    ],
    ids=lambda how: " ".join(how),
)
def test_gradient_does_not_depend_on_how_it_is_computed(folder: Path, how: dict[str, Any]) -> None:
    batch = samples(RAGGED)
    for objective in ("dapo", "gspo"):
        loss, wanted = gradient(build(folder, objective=objective)[0], batch)
        mine, found = gradient(build(folder, objective=objective, **how)[0], batch)
        assert mine == pytest.approx(loss, abs=2e-3)
        assert distance(found, wanted) < BFLOAT16


@pytest.mark.parametrize(
    "how", [{}, {"compile": True}, {"gradient_checkpointing": True}], ids=lambda how: " ".join(how)
)
def test_gradient_of_a_sharded_policy_is_that_of_one_process(folder: Path, how: dict[str, Any]) -> None:
    """As each of several cards computes it, on a mesh of one over NCCL."""
    batch = samples(RAGGED)
    loss, wanted = gradient(build(folder)[0], batch)
    distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        learner, _ = build(folder, **how)
        shard(learner.policy, DistContext())
        mine, found = gradient(learner, batch)
        compiled = learner.policy.scorer.compiled
    finally:
        distributed.destroy_process_group()
    assert mine == pytest.approx(loss, abs=2e-3)
    assert distance(found, wanted) < BFLOAT16
    assert compiled == ("compile" in how), "no fallback"


def test_compiled_layers_serve_every_ragged_batch(folder: Path) -> None:
    learner, _ = build(folder, compile=None)
    assert learner.policy.scorer.compiled, "the default on CUDA"
    for seed, lengths in enumerate(([300, 7, 128], [20, 511])):
        learner.step(samples(lengths, seed), seed + 1)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for seed in range(4):
        batch = samples(list(np.random.default_rng(seed).integers(2, 600, 3 + seed)), seed)
        assert learner.step(batch, 3 + seed).skipped is None
    assert counters["stats"]["unique_graphs"] == graphs
    assert learner.policy.scorer.compiled, "no fallback"


def test_real_memory_runs_out_and_the_update_is_repeated_with_the_same_result(folder: Path) -> None:
    batch = samples([4000] * 6)
    learner, _ = build(folder)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, wanted = gradient(learner, batch)
    needed = torch.cuda.max_memory_allocated() - before
    _limit(before + 0.6 * needed)
    mine, found = gradient(learner, batch)
    assert learner._halved > 0
    assert mine == pytest.approx(loss, abs=2e-3)
    assert distance(found, wanted) < BFLOAT16
    weights = [one.detach().cpu() for one in learner.policy.trained_parameters()]
    _limit(torch.cuda.memory_allocated() + 0.2 * needed)
    assert learner.step(samples([16_000]), 2).skipped is not None
    assert all(torch.equal(a, b.cpu()) for a, b in zip(weights, learner.policy.trained_parameters(), strict=True))


def _limit(size: float) -> None:
    """Limits this process to `size` bytes of the card's memory."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)


def test_adapters_train_on_a_bfloat16_base(folder: Path) -> None:
    pytest.importorskip("peft")
    learner, _ = build(folder, lora_rank=8, learning_rate=1e-2)
    dtypes = {one.dtype for one in learner.policy.model.parameters() if not one.requires_grad}
    assert dtypes == {torch.bfloat16}
    assert {one.dtype for one in learner.policy.trained_parameters()} == {torch.float32}
    before = learner.policy.served_tensors()
    first = learner.step(samples(RAGGED), 1)
    second = learner.step(samples(RAGGED), 2)
    assert (first.skipped, second.skipped) == (None, None)
    assert second.loss < first.loss
    after = learner.policy.served_tensors()
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())


def test_checkpoint_continues_on_the_card(folder: Path, tmp_path: Path) -> None:
    batch = samples(RAGGED)
    one, state = build(folder, learning_rate=1e-3)
    one.step(batch, 1)
    state.save_model(tmp_path / "weights")
    torch.save(state.state(), tmp_path / "state")
    other, restored = build(folder, str(tmp_path / "weights"), learning_rate=1e-3)
    restored.load_state(torch.load(tmp_path / "state"))
    first, second = one.step(batch, 2), other.step(batch, 2)
    assert second.loss == pytest.approx(first.loss, abs=1e-4)
    # Sums on the card have no fixed order. Where a gradient is almost 0, as of Qwen2's key biases, AdamW takes the sign
    # of the noise, so the weights are compared as one vector. Without the moments, it would differ by 9e-3.
    mine, theirs = (
        torch.cat([weight.detach().flatten() for weight in each.policy.trained_parameters()]) for each in (other, one)
    )
    assert distance(mine, theirs) < 1e-3


def test_served_tensors_are_the_weights_in_the_servers_dtype(folder: Path) -> None:
    learner, _ = build(folder)
    served = learner.policy.served_tensors()
    assert {tensor.dtype for tensor in served.values()} == {torch.bfloat16}
    for name, tensor in learner.policy.model.state_dict().items():
        if name in served:
            assert torch.equal(served[name].cpu(), tensor.bfloat16().cpu())


MAP = """
import sys
from pathlib import Path
import torch
from gristmill_model.device_memory import weights_of
device = torch.device(sys.argv[1])
with weights_of(Path(sys.argv[2]), device) as tensors:
    found = {name: tensor.clone() for name, tensor in tensors}
torch.save({name: tensor.cpu() for name, tensor in found.items()}, sys.argv[3])
"""


def test_another_process_copies_the_published_weights_from_the_cards_memory(folder: Path, tmp_path: Path) -> None:
    """As a model server does with publisher: ipc. The buffer is written and exported again for each version."""
    learner, _ = build(folder)
    device = torch.device("cuda", torch.cuda.current_device())
    loaded: list[dict[str, torch.Tensor]] = []

    class Servers:
        in_use: frozenset[Path] = frozenset()

        def load(self, path: Path, version: PolicyVersion) -> None:
            command = [sys.executable, "-c", MAP, str(device), str(path), str(tmp_path / "loaded")]
            subprocess.run(command, check=True, timeout=120)
            loaded.append(torch.load(tmp_path / "loaded"))

    transport = DeviceMemoryTransport(cast("ModelServers", Servers()), tmp_path / "weights", None, device=device)
    for step in range(3):
        served = {name: tensor + step for name, tensor in learner.policy.served_tensors(on_device=True).items()}
        assert {tensor.device for tensor in served.values()} == {device}
        transport.publish(served, PolicyVersion(1, step))
        assert loaded[step].keys() == served.keys()
        assert all(torch.equal(loaded[step][name], tensor.cpu()) for name, tensor in served.items())


def test_kernel_that_mixes_sequences_is_found_before_the_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention.register()
    real = attention._fused
    assert real is not None

    def leaks(q: Any, k: Any, v: Any, ends: torch.Tensor, longest: int, scale: float | None) -> torch.Tensor:
        return real(q, k, v, ends[[0, -1]].contiguous(), len(q), scale)

    monkeypatch.setattr(attention, "_fused", leaks)
    with pytest.raises(ModelError) as raised:
        build(folder)
    assert raised.value.code == "logprobs_differ"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True, "offload"])
def test_computed_memory_is_enough_and_not_much_too_large(folder: Path, recompute: bool | str, compiled: bool) -> None:
    settings: dict[str, Any] = {"gradient_checkpointing": recompute, "compile": compiled, "token_budget": 1 << 17}
    learner, _ = build(folder, **settings)
    config, parameters = learner.policy.model.config, learner.policy.model.num_parameters()
    memory = Memory.of(config, parameters, TrainerSettings(**settings), cuda=True)
    assert memory is not None
    learner.step(samples([512]), 1)  # The optimizer allocates its moments.
    peaks = []
    counts = (24, 32)  # Both have more trained tokens than one chunk of logits, so that the head adds nothing.
    assert CHUNK_BYTES["cuda"] // (4 * VOCABULARY) < 24 * 2048 * 3 // 4
    for count in counts:
        torch.cuda.reset_peak_memory_stats()
        learner.step(samples([2048] * count), 2)
        peaks.append(torch.cuda.max_memory_allocated())
    measured = (peaks[1] - peaks[0]) / (8 * 2048)
    assert 0.6 * memory.per_token <= measured <= 1.1 * memory.per_token
    assert peaks[1] <= 1.1 * (memory.fixed + memory.per_token * counts[1] * 2048)
