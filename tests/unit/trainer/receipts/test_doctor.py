"""The doctor's comparison of trainer and model server, with the faults of the receipts, and its check of the room."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.groups import make_group
from tests.unit.trainer.receipts.torch_server import TorchServer
from transformers import AutoModelForCausalLM

from gristmill import Deployment, PolicyVersion, RunRecord, RunState, SamplingParams, TrajectoryGroup
from gristmill.archive.run_file import write_run_file
from gristmill.folders import RunFolder
from gristmill.internal.archive_writer import RunWriter
from gristmill.internal.check import Check
from gristmill_trainer import doctor
from gristmill_trainer.doctor import (
    PublishedWeights,
    _groups_of,
    after_run,
    before_run,
    check_room,
    check_server,
    check_weights,
    samples_of,
    scored_samples,
)
from gristmill_trainer.errors import PublishError
from gristmill_trainer.memory import Memory
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.publish.servers import ModelServer
from gristmill_trainer.receipts.diagnosis import Cause
from gristmill_trainer.settings import TrainerSettings

Serve = Callable[..., TorchServer]


def states(checks: Iterator[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


# --- Before a run ----------------------------------------------------------------------------------------------
def compared(server: TorchServer, model: Path) -> Check:
    policy = Policy(ModelSource.of(str(model)), "cpu")
    probes = doctor.made_up_probes(policy.vocabulary, 0.5)
    return check_server(ModelServer(server.url, patience=0.0), policy, probes, adapters=False)


def test_server_of_the_same_weights_agrees(serve: Serve, model: Path) -> None:
    assert compared(serve(), model).state == "ok"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("temperature", Cause.TEMPERATURE),
        ("raw_logprobs", Cause.RAW),
        ("top_p", Cause.TRUNCATION),
        ("tokenizes_again", Cause.TOKENIZED_AGAIN),
        ("bfloat16", Cause.DTYPE),
    ],
)
def test_disagreement_has_the_cause_of_the_diagnosis(serve: Serve, model: Path, fault: str, cause: Cause) -> None:
    found = compared(serve(fault, since=0), model)
    assert (found.name, found.state) == ("trainer and server", "failed")
    assert f"[{cause}]" in found.text


def test_server_of_another_model_is_unexplained(serve: Serve, model: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(2.0)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(model / "tokenizer.json", tmp_path / "other")
    shutil.copy(model / "tokenizer_config.json", tmp_path / "other")
    found = compared(serve(), tmp_path / "other")
    assert found.state == "failed"
    assert f"[{Cause.UNKNOWN}]" in found.text


def test_server_with_the_first_version_of_a_fork_is_not_compared(serve: Serve, model: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(model)
    weights = {name: 2.0 * tensor for name, tensor in other.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    server = ModelServer(serve().url, patience=0.0)
    server.publish(tmp_path, PolicyVersion(1, 0))
    (check,) = doctor._check_servers(TrainerSettings(device="cpu"), ModelSource.of(str(model)), [server], 1.0)
    assert check.state == "warning"


def test_server_without_probes_cannot_be_compared(serve: Serve, model: Path) -> None:
    server = serve()
    server._generate = lambda body: {"choices": []}  # type: ignore[method-assign]
    with pytest.raises(PublishError) as caught:
        compared(server, model)
    assert caught.value.code == "probe_refused"


def test_too_little_disk_and_memory_fail(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, place = ModelSource.of(str(model)), replace(Deployment.read({}), runs_dir=tmp_path)
    settings = TrainerSettings(device="cpu")
    assert states(check_room(settings, source, place)) == {"memory of trainer": "ok", "disk of trainer": "ok"}
    many = TrainerSettings(device="cpu", checkpoints_kept=10**9)
    assert states(check_room(many, source, place)) == {"memory of trainer": "ok", "disk of trainer": "failed"}
    parameters = doctor.count_parameters(model)
    assert parameters is not None
    memory = Memory.of(json.loads((model / "config.json").read_text()), parameters, settings, cuda=False)
    assert memory is not None
    assert memory.weights + memory.gradients + memory.moments == 16 * parameters
    batch = memory.per_token * settings.batch_size * source.max_model_len
    for there, state in ((memory.fixed, "failed"), (memory.fixed + batch - 1, "warning"), (memory.fixed + batch, "ok")):
        monkeypatch.setattr(doctor, "read_memory", lambda there=there: there)
        assert states(check_room(settings, source, place))["memory of trainer"] == state
    late = settings.model_copy(update={"max_staleness": 1})
    cases = ((memory.state, settings, "ok"), (memory.state - 1, settings, "failed"), (memory.state, late, "failed"))
    for there, chosen, state in cases:
        monkeypatch.setattr(doctor, "read_memory", lambda there=there: there)
        assert states(check_room(chosen, replace(source, sleep=True), place))["memory of trainer"] == state


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"num_attention_heads": None, "num_key_value_heads": None}, "ok"),  # the defaults of Qwen2
        ({"intermediate_size": [64, 128]}, "warning"),
        ({"hidden_size": "many"}, "warning"),
        ({"model_type": "of_a_later_version"}, "warning"),
        (None, "warning"),
    ],
    ids=str,
)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_config_of_another_form_is_no_error(
    model: Path, tmp_path: Path, changes: dict[str, object] | None, state: str, lora_rank: int
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    config = json.loads((model / "config.json").read_text()) | (changes or {})
    kept = {name: value for name, value in config.items() if value is not None}
    (odd / "config.json").write_text("{" if changes is None else json.dumps(kept))
    place = replace(Deployment.read({}), runs_dir=tmp_path)
    settings = TrainerSettings(device="cpu", token_budget=64, lora_rank=lora_rank)
    found = states(check_room(settings, ModelSource.of(str(odd)), place))
    assert found == {"memory of trainer": state, "disk of trainer": "ok"}


# --- After a run -----------------------------------------------------------------------------------------------
@pytest.fixture
def weights(model: Path, tmp_path: Path) -> list[PublishedWeights]:
    """The initial model, and the model after two steps."""
    trained = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    trained.save_pretrained(tmp_path / "trained")
    return [
        PublishedWeights("1.0", ModelSource.of(str(model))),
        PublishedWeights("1.2", ModelSource.of(str(tmp_path / "trained"))),
    ]


def adapted(source: ModelSource, folder: Path | None = None) -> Policy:
    return Policy(source, "cpu", None if folder is None else str(folder), lora=Lora(2, 8.0))


def sampled_by(
    weights: PublishedWeights, label: str, temperature: float = 0.8, scored_at: float = 0.8
) -> TrajectoryGroup:
    """Returns a group under a label, with log-probabilities of some weights and some temperature."""
    adapters = weights.adapters
    policy = Policy(weights.source, "cpu") if adapters is None else adapted(weights.source, adapters)
    group = make_group(lengths=((8, 12), (8, 9)), version=label)
    group = replace(group, sampling=SamplingParams(temperature=scored_at, max_tokens=64))
    logprobs = group.logprobs.copy()
    logprobs[group.mask] = np.concatenate([one.sampled for one in scored_samples(policy, samples_of(group))])
    return replace(group, logprobs=logprobs, sampling=SamplingParams(temperature=temperature, max_tokens=64))


def test_groups_of_their_weights_pass(weights: list[PublishedWeights]) -> None:
    groups = {one.label: [sampled_by(one, one.label)] for one in weights}
    assert states(check_weights(weights, groups, proven=9e-6)) == {"weights 1.0": "ok", "weights 1.2": "ok"}
    assert states(check_weights(weights, groups, proven=None)) == {"weights 1.0": "ok", "weights 1.2": "ok"}


@pytest.mark.parametrize("proven", [None, 9e-6])
def test_groups_of_other_weights_fail_with_the_cause(weights: list[PublishedWeights], proven: float | None) -> None:
    first, second = weights
    groups = {"1.0": [sampled_by(first, "1.0")], "1.2": [sampled_by(first, "1.2")]}
    found = {check.name: check for check in check_weights(weights, groups, proven)}
    assert found["weights 1.0"].state == "ok"
    assert found["weights 1.2"].state == "failed"
    assert f"[{Cause.LABEL_WITHOUT_WEIGHTS}]" in found["weights 1.2"].text
    raw = {"1.2": [sampled_by(second, "1.2", scored_at=1.0)]}
    (check,) = check_weights(weights, raw, proven)
    assert check.state == "failed"
    assert f"[{Cause.RAW}]" in check.text


def test_groups_of_adapters_are_compared_with_their_checkpoint(weights: list[PublishedWeights], tmp_path: Path) -> None:
    first = weights[0]
    policy = adapted(first.source)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.save(tmp_path / "adapters")
    weights = [first, PublishedWeights("1.4", first.source, tmp_path / "adapters")]
    groups = {"1.0": [sampled_by(first, "1.0")], "1.4": [sampled_by(weights[1], "1.4")]}
    assert states(check_weights(weights, groups, None)) == {"weights 1.0": "ok", "weights 1.4": "ok"}
    groups["1.4"] = [sampled_by(first, "1.4")]
    assert states(check_weights(weights, groups, None)) == {"weights 1.0": "ok", "weights 1.4": "failed"}


@pytest.mark.parametrize(
    ("change", "compared"),
    [
        ({}, 2),
        ({"meta": {"no_logprobs": True}}, 1),
        ({"sampling": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=64)}, 1),
    ],
    ids=["", "no log-probabilities", "top_p"],
)
def test_groups_without_the_whole_distribution_are_left_out(
    weights: list[PublishedWeights], tmp_path: Path, change: dict[str, Any], compared: int
) -> None:
    group = sampled_by(weights[1], "1.2")
    with closing(RunWriter(tmp_path / "rollouts", "run", 0, 1 << 30)) as archive:
        for number, one in enumerate((group, replace(group, **change))):
            archive.append(f"g{number}", "group", replace(one, group_id=f"g{number}").encode())
        archive.sync()
    assert len(_groups_of(tmp_path / "rollouts", {"1.2"})["1.2"]) == compared


@pytest.mark.parametrize(
    ("env", "changed"),
    [
        ({"dataset": {}}, ""),
        ({"dataset": {"top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}}, ""),
        ({"dataset": {"top_k": 20, "min_p": 0.1}}, "top_k, min_p"),
        ({"dataset": {}, "sources": {"a": {"dataset": {}}, "b": {"dataset": {"min_p": 0.1}}}}, "min_p"),
    ],
)
def test_runs_with_a_changed_distribution_are_not_compared(tmp_path: Path, env: dict[str, Any], changed: str) -> None:
    run = RunRecord(run_id="r", state=RunState.FINISHED, digest="0", group_size=2, env=env, created_at=0.0)
    write_run_file(tmp_path, run)
    (tmp_path / "rollouts").mkdir()
    (check,) = after_run(RunFolder.open(tmp_path), "", {"GRISTMILL_MODELS_DIR": str(tmp_path)})
    assert check.state == "warning"
    assert (f"not checked: {changed} changed" in check.text) == bool(changed)


def test_checkpoint_of_an_earlier_run_of_the_id_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (folder := tmp_path / "checkpoints" / "step-000004-of-1a2b3c4d").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (check,) = after_run(RunFolder.open(tmp_path), "", {"GRISTMILL_MODELS_DIR": str(tmp_path)})
    assert check.state == "warning"


@pytest.mark.parametrize(
    "text",
    ["dataset: {temperature: null}", "dataset: {temperature: hot}", "dataset: [a]", "trainer: [1]", "trainer: {a: 1}"],
)
def test_wrong_configuration_is_a_check_and_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    checks = list(before_run("wrong", {"GRISTMILL_CONFIG_DIR": str(tmp_path), "GRISTMILL_MODELS_DIR": str(tmp_path)}))
    assert checks
    assert text.startswith("dataset") or [check.state for check in checks] == ["failed"]


def test_groups_of_no_weights_are_unexplained(weights: list[PublishedWeights]) -> None:
    (check,) = check_weights(weights, {"1.2": [make_group(lengths=((8, 12),), version="1.2")]}, None)
    assert check.state == "failed"
    assert f"[{Cause.UNKNOWN}]" in check.text
