"""The trainer's benchmark on small shapes: both backends compute the same, and every case is reported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from benchmarks.trainer import backends, gpu_cases
from benchmarks.trainer import batch as batches
from benchmarks.trainer.backends import Setting, Stepped
from benchmarks.trainer.batch import Load
from benchmarks.trainer.cpu_cases import DisagreementError, check
from benchmarks.trainer.gpu_cases import Case
from benchmarks.trainer.report import Results, page
from benchmarks.trainer.shapes import SHAPES, TINY, TINY_LORA, Shape, save
from benchmarks.trainer.subprocess_run import Found, Job, Skipped, in_own_process, run

LOAD = Load(sequences=4, micro_batch=2, tokens=120, group=2)


def _found(
    backend: backends.Name, shape: Shape, folder: Path, load: Load = LOAD, *, checkpointing: bool = False
) -> Found:
    setting = Setting(shape, str(folder), load, "cpu", checkpointing)
    (found,) = run(Job(backend, [setting], steps=1))
    assert isinstance(found, Found)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save(TINY, made, "cpu")
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(LOAD, id="two micro-batches"),
        *(
            pytest.param(load, id=name, marks=pytest.mark.long)
            for name, load in zip(("eight ragged", "one long"), gpu_cases.loads(64), strict=True)
        ),
    ],
)
def test_ours_and_trl_take_the_same_step(folder: Path, load: Load) -> None:
    ours, theirs = (_found(backend, TINY, folder, load) for backend in ("ours", "trl"))
    assert theirs.first.grad_norm > 0.01
    check(ours.first, theirs.first, 1e-4)
    assert ours.flops == theirs.flops > 0
    assert min(ours.peak, ours.before) > 1e8


@pytest.mark.long
def test_checkpointing_changes_no_step(folder: Path) -> None:
    plain = _found("trl", TINY, folder)
    for backend in ("ours", "trl"):
        check(_found(backend, TINY, folder, checkpointing=True).first, plain.first, 1e-4)


@pytest.mark.long
def test_adapters_are_trained_by_both_backends(tmp_path: Path) -> None:
    save(TINY_LORA, tmp_path, "cpu")
    ours, theirs = (_found(backend, TINY_LORA, tmp_path) for backend in ("ours", "trl"))
    assert ours.first.loss == pytest.approx(theirs.first.loss, abs=1e-5)
    assert ours.first.grad_norm > 0
    assert theirs.first.grad_norm > 0
    assert ours.flops == theirs.flops


def test_check_refuses_steps_with_different_results() -> None:
    check(Stepped(0.5, 2.0), Stepped(0.50001, 2.0001), 1e-4)
    for other in (Stepped(0.5, 2.01), Stepped(0.51, 2.0), Stepped(0.5, float("nan"))):
        with pytest.raises(DisagreementError):
            check(Stepped(0.5, 2.0), other, 1e-4)


def test_batch_has_the_requested_tokens_and_about_half_padding() -> None:
    batch = batches.make(Load(32, 8, 4096), 100)
    assert sum(batches.lengths(batch)) == 4096
    assert 0.4 < batches.real_share(batch) < 0.6
    inputs = batches.padded(batch, pad=2)
    assert int(inputs["completion_mask"].sum()) == batches.trained_tokens(batch)
    assert int(inputs["prompt_mask"].sum()) + batches.trained_tokens(batch) == 4096
    assert sum(sample.trained_tokens for sample in batches.samples(batch)) == batches.trained_tokens(batch)


def test_backend_without_its_package_is_skipped_and_reported_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find(name))
    assert backends.missing("trl", TINY) == "trl"
    assert backends.missing("ours", TINY) is None
    setting = Setting(TINY, "gone", LOAD, "cpu")
    (found,) = in_own_process(Job("trl", [setting], 1))
    assert found == Skipped("trl is not installed")
    measured = Found(
        first=Stepped(0.1, 0.2), checkpointing=False, seconds=[2.0], before=10, peak=20, computed=30_000_000_000,
        publish=(0.25, 0.5), publish_ipc=0.05, tokens=120, trained_tokens=90, real_share=0.5, flops=989_000_000_000_000,
    )  # fmt: skip
    results = Results(
        {"device": "NVIDIA H100 80GB HBM3"}, cases=[Case("ours", setting, measured), Case("trl", setting, found)]
    )
    assert "| 60 | 0.0 | 30.0 | 50.0% |" in page(results)
    assert "| tiny | 0.25 | 0.50 | 0.05 |" in page(results)
    assert "**skipped**: trl is not installed" in page(results)
    assert json.loads(results.json())["cases"][1]["found"]["why"] == "trl is not installed"


def test_model_shapes_have_the_parameter_counts_of_their_models() -> None:
    wanted = {"qwen3-0.6b": 0.596e9, "qwen2.5-1.5b": 1.544e9, "qwen3-4b-lora": 4.022e9}
    for name, count in wanted.items():
        shape = SHAPES[name]
        attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
        layer = attention + 3 * shape.hidden * shape.intermediate
        tables = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
        assert shape.layers * layer + tables == pytest.approx(count, rel=2e-3)
