"""Two processes that share the policy (FSDP2 over gloo) train as one process does."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.errors import raises
from tests.support.ports import free_port
from tests.unit.trainer.distributed.training import RESUMED, SETTINGS, STEPS, Job, run
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from gristmill_trainer.checkpoint.contents import verify
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.settings import TrainerSettings

BOTH_WAYS = ("passes with penalties", "checkpointed", "image tower")
"""Settings whose checkpoints are loaded by the other number of processes."""
OFTEN = "plain"
"""The settings that `make test` trains, with an abandoned step."""


def start(what: str, folder: Path, program: Sequence[str], output: IO[str], **environ: str) -> subprocess.Popen[bytes]:
    """Starts the module of the worker with the Python options `program`."""
    return subprocess.Popen(
        [sys.executable, *program, "-m", "tests.unit.trainer.distributed.worker", what, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environ},
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def train(folder: Path, jobs: Sequence[Job]) -> None:
    """Runs the jobs with two processes, without torchrun, whose own process imports torch too.

    Rank 1 finds only the config of its model.
    """
    for rank in range(2):
        (folder / f"jobs{rank}").write_bytes(pickle.dumps([_of_rank(job, rank) for job in jobs]))
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (folder / "output").open("w+") as output:
        ranks = [start("train", folder, [], output, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
        try:
            codes = [process.wait(timeout=240) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        output.seek(0)
        assert codes == [0, 0], output.read()


def _of_rank(job: Job, rank: int) -> Job:
    if rank == 0:
        return job
    folder = job.folder / f"model{rank}"
    folder.mkdir(parents=True)
    shutil.copy((job.resume or job.model) / "config.json", folder)
    return replace(job, model=folder, resume=job.resume and folder)


@dataclass(frozen=True)
class Trainings:
    """The same jobs with one process and with two, by name."""

    one: dict[str, Job]
    two: dict[str, Job]


@pytest.fixture(scope="module")
def trainings(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trainings:
    folder = tmp_path_factory.mktemp("trainings")
    selected = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in SETTINGS if name == OFTEN or name in selected]
    resumed = [name for name in BOTH_WAYS if name in names]
    models = dict.fromkeys(names, model_dir)
    if "image tower" in names:
        models["image tower"] = save_with_image_tower(folder / "with image tower")
    one = {name: Job(name, models[name], folder / "one" / name) for name in names}
    two = {name: Job(name, models[name], folder / "two" / name) for name in names}
    for job in one.values():
        run(job, DistContext())
    for name in resumed:
        two[f"{name}, resumed"] = Job(name, models[name], folder / "two" / f"{name}, resumed", one[name].checkpoint)
    train(folder, list(two.values()))
    for name in resumed:
        job = Job(name, models[name], folder / "one" / f"{name}, resumed", two[name].checkpoint)
        run(job, DistContext())
        one[f"{name}, resumed"] = job
    return Trainings(one, two)


def save_with_image_tower(folder: Path) -> Path:
    """Writes a model of text and images, of which a training of text uses a part."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 72, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 512,
    }  # fmt: skip
    images = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    tokens = {"image_token_index": 69, "boi_token_index": 70, "eoi_token_index": 71, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=text, vision_config=images, **tokens)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def step_rows(job: Job) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((job.folder / "steps.json").read_text())
    return rows


def served(job: Job) -> dict[str, torch.Tensor]:
    return load_file(job.folder / "served.safetensors")


def assert_same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Except for the biases of keys: they add the same value to all of a query's scores, which does not change the
    softmax. Their gradients are only rounding errors, and Adam scales these errors up to full step size."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name.endswith("k_proj.bias"):
            continue
        assert (found[name].double() - tensor.double()).abs().max() <= 1e-6, name


def assert_same_rows(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert _flat(value) == pytest.approx(_flat(other[name]), rel=1e-5, abs=1e-5), (row["step"], name)


def _flat(value: Any) -> dict[str, float]:
    """Returns numbers by their path; None values are left out."""
    if isinstance(value, dict):
        return {f"{name}.{key}": item for name, inner in value.items() for key, item in _flat(inner).items()}
    if isinstance(value, list):
        return {str(number): item for number, item in enumerate(value)}
    return {} if value is None else {"": value}


@pytest.mark.parametrize(
    "name", [name if name == OFTEN else pytest.param(name, marks=pytest.mark.long) for name in SETTINGS]
)
def test_two_processes_train_like_one_process(trainings: Trainings, name: str) -> None:
    one, two = trainings.one[name], trainings.two[name]
    rows = step_rows(one)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len({row["loss"] for row in rows}) == STEPS
    assert_same_rows(step_rows(two), rows)
    assert_same_tensors(served(two), served(one))


@pytest.mark.long
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_checkpoint_is_resumed_by_another_number_of_processes(trainings: Trainings, name: str) -> None:
    """From one to two processes, and from two to one: the next step is the same as without the change."""
    for jobs in (trainings.one, trainings.two):
        resumed = jobs[f"{name}, resumed"]
        assert_same_rows(step_rows(resumed), step_rows(trainings.one[name])[RESUMED:])
        assert_same_tensors(served(resumed), served(trainings.one[name]))


def test_checkpoints_of_one_and_two_processes_are_equal(trainings: Trainings) -> None:
    one, two = (jobs["plain"].checkpoint for jobs in (trainings.one, trainings.two))
    verify(two)
    assert {file.name for file in two.iterdir()} == {file.name for file in one.iterdir()}
    assert_same_tensors(load_file(two / "model.safetensors"), load_file(one / "model.safetensors"))
    states = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (one, two)]
    groups = [state["optimizer"]["param_groups"] for state in states]
    assert groups[0] == groups[1]
    by_number = [state["optimizer"]["state"] for state in states]
    assert by_number[0].keys() == by_number[1].keys()
    for number, wanted in by_number[0].items():
        assert_same_tensors(by_number[1][number], wanted)


def test_whole_model_of_two_processes_loads_in_transformers(trainings: Trainings) -> None:
    job = trainings.two["plain"]
    loaded = AutoModelForCausalLM.from_pretrained(job.folder / "whole", dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight, "it is tied as the original is"
    assert_same_tensors({name: tensor.detach() for name, tensor in loaded.state_dict().items()}, served(job))


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "error"])
def test_other_ranks_end_with_rank_0_and_report_the_reason(how: str, model_dir: Path, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"jobs{rank}").write_bytes(pickle.dumps([Job("plain", model_dir, tmp_path / "job")]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "output").open("w+") as output:
        code = start(how, tmp_path, torchrun, output).wait(timeout=240)
        output.seek(0)
        told = output.read()
    assert code != 0
    assert "ERROR on rank 1: [rank_lost] {'rank': 1, 'size': 2}" in told, told
    if how == "error":
        assert "ERROR on rank 0: [model_server_unreachable] {'url': 'http://nowhere'}" in told


def test_lora_is_refused_with_several_processes(tmp_path: Path) -> None:
    nowhere = ModelSource(str(tmp_path / "none"), "none", None, 512)
    plan = LearnerPlan(nowhere, None, TrainerSettings(device="cpu", lora_rank=4), None)
    for rank in range(2):
        with raises(TrainerError, "one_process_only", setting="lora_rank"):
            build_learner(plan, DistContext(rank, 2, rank))
