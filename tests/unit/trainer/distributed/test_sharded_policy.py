"""A policy that FSDP2 shards computes in bfloat16 as one process does, in the computed memory. On a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.trainer.policy.models import micro_batch, sequences, tiny
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.memory import CHUNK_BYTES, Memory
from gristmill_trainer.model_state import shard, shard_parameters
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.policy.model import gathered
from gristmill_trainer.policy.scoring import Scorer
from gristmill_trainer.settings import TrainerSettings

Gradient = tuple[torch.Tensor, dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies compute as on CUDA."""
    monkeypatch.setattr(Policy, "arithmetic", torch.bfloat16)


@pytest.fixture
def mesh_of_one() -> Iterator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    distributed.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[DistContext]:
    """This process is rank 0, and gets zeros from the others."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield DistContext(0, 4)
    distributed.destroy_process_group()


def saved(folder: Path, name: str, *, tied: bool = False, norms: torch.dtype = torch.bfloat16) -> Path:
    """Writes a model whose norms have random weights in `norms`."""
    model = tiny(name, tied=tied)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.weight.data.add_(0.3 * torch.randn_like(module.weight)).copy_(module.weight.to(norms))
    model.save_pretrained(folder)
    return folder


def policy(folder: Path, *, sharded: bool, packing: bool = True, checkpointing: bool = False) -> Policy:
    found = Policy(ModelSource.of(str(folder)), "cpu", packing=packing, checkpointing=checkpointing)
    if sharded:
        shard(found, DistContext())
    return found


def gradient(policy: Policy, lengths: tuple[int, ...] = (7, 2, 19)) -> Gradient:
    """Returns the log-probabilities and the gradient of their sum."""
    temperatures = [0.7] * len(lengths)
    micro = micro_batch(sequences(lengths), packing=policy.scorer.packing, temperatures=temperatures)
    with policy.compute():
        logprobs = policy.scorer(micro).logprobs
        logprobs.sum().backward()
    found = {name: gathered(one.grad) for name, one in policy.model.named_parameters() if one.grad is not None}
    policy.model.zero_grad()
    return logprobs.detach(), found


def difference(one: Gradient, other: Gradient) -> dict[str, float]:
    """Returns the largest differences that are not 0, by parameter; of the log-probabilities by ''."""
    found = {"": float((one[0] - other[0]).abs().max())}
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert tensor.dtype == other[1][name].dtype == torch.float32
        found[name] = float((tensor - other[1][name]).abs().max() / tensor.abs().max())
    return {name: value for name, value in found.items() if value > 0}


@pytest.mark.usefixtures("mesh_of_one")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_sharded_policy_has_the_gradient_of_one_process(
    name: str, tied: bool, checkpointing: bool, tmp_path: Path
) -> None:
    """Bit for bit, with norms that bfloat16 can represent; except for the gradients of these norms."""
    folder = saved(tmp_path / "model", name, tied=tied)
    one, two = (gradient(policy(folder, sharded=sharded, checkpointing=checkpointing)) for sharded in (False, True))
    assert one[0].std() > 0.1
    rounded = difference(one, two)
    assert rounded
    for parameter, value in rounded.items():
        assert parameter.endswith("layernorm.weight"), rounded
        assert value <= torch.finfo(torch.bfloat16).eps


@pytest.mark.usefixtures("mesh_of_one")
def test_weights_of_norms_lose_the_digits_that_the_model_server_does_not_have_either(tmp_path: Path) -> None:
    exact, served = (saved(tmp_path / str(norms), "llama", norms=norms) for norms in (torch.float32, torch.bfloat16))
    sharded = gradient(policy(exact, sharded=True))
    of_exact, of_served = (gradient(policy(folder, sharded=False)) for folder in (exact, served))
    assert float((sharded[0] - of_served[0]).norm()) < 0.5 * float((sharded[0] - of_exact[0]).norm())


@pytest.mark.usefixtures("mesh_of_one")
@pytest.mark.long
def test_compiled_layers_of_a_sharded_policy_are_one_graph(tmp_path: Path) -> None:
    """FSDP gathers a layer outside of its graph. A break would leave recomputed layers without any graph."""
    folder = saved(tmp_path / "model", "qwen2")
    compiled = Policy(ModelSource.of(str(folder)), "cpu")
    for layer in compiled.scorer.layers():
        layer.compile(dynamic=True, backend="aot_eager")
    shard(compiled, DistContext())
    plain = policy(folder, sharded=True, packing=False)
    for lengths in ((7, 2, 19), (3, 21)):
        assert max(difference(gradient(compiled, lengths), gradient(plain, lengths)).values(), default=0) < 0.02
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 1, "the layers are alike"


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("wide", ["layers", "vocabulary"])
def test_computed_memory_of_several_gpus_holds_a_sharded_update(
    wide: str, tied: bool, four_ranks: DistContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches, so that the second has the gradients of the first. The moments are not allocated yet."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(CHUNK_BYTES, "cuda", 1 << 20)
    hidden, vocabulary = (256, 512) if wide == "layers" else (64, 8192)
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 6,
        "vocab_size": vocabulary,
    }
    scorer = Scorer(tiny(tied=tied, initializer_range=0.02, **shape), packing=True)
    parameters = sum(one.numel() for one in scorer.parameters())
    memory = Memory.of(scorer.model.config, parameters, TrainerSettings(compile=False), cuda=True, gpus=4)
    assert memory is not None
    shard_parameters(scorer, four_ranks, torch.bfloat16)
    micro = micro_batch(sequences([200, 312]), packing=True)
    with FSDPMemTracker(scorer, torch.optim.SGD(scorer.parameters())) as tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            with torch.autocast("cpu", torch.bfloat16):
                scorer(micro).logprobs.sum().backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    computed = memory.fixed - memory.moments + 512 * memory.per_token
    assert 0.85 * computed < peak <= computed
