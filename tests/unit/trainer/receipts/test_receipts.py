"""Receipts of model servers: no alarm without a fault, and the right cause with a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from benchmarks import wrong_weights
from tests.support.errors import raises
from tests.support.grids import rest_is_long
from tests.unit.trainer.receipts.torch_server import FAULTS, NAME, TorchServer
from tests.unit.trainer.receipts.training import Run

from gristmill import PolicyVersion
from gristmill.internal.receipts import Proven, ReceiptState, failing, proven
from gristmill_model import worker
from gristmill_trainer.errors import PublishError
from gristmill_trainer.loop import publish
from gristmill_trainer.publish.servers import ModelServer
from gristmill_trainer.receipts import sums
from gristmill_trainer.receipts.diagnosis import Case, Cause, Diagnosis, diagnose
from gristmill_trainer.receipts.probes import Probes, distance, own_scores
from gristmill_trainer.receipts.receipts import receipt_metrics

Serve = Callable[..., TorchServer]
Begin = Callable[..., Run]

CAUSES = {
    "stale_version": Cause.VERSION_0,
    "swallowed_update": Cause.VERSION_BEFORE,
    "missing_kind": Cause.TENSORS,
    "stale_head": Cause.TIED_HEAD,
    "no_adapter": Cause.ADAPTER,
    "temperature": Cause.TEMPERATURE,
    "raw_logprobs": Cause.RAW,
    "top_p": Cause.TRUNCATION,
    "tokenizes_again": Cause.TOKENIZED_AGAIN,
    "stale_prefix_cache": Cause.PREFIX_CACHE,
    "label_only": Cause.LABEL_WITHOUT_WEIGHTS,
    "bfloat16": Cause.DTYPE,
    "no_numbers": Cause.NOT_FINITE,
}
WHOLE = [(fault, "") for fault in FAULTS if fault != "no_adapter"]
MERGED = [(fault, "merged") for fault in ("stale_version", "swallowed_update", "label_only", "missing_kind")]
ADAPTERS = [(fault, "adapters") for fault in ("no_adapter", "swallowed_update", "label_only", "temperature")]
OFTEN = [*WHOLE, ("missing_kind", "merged"), ("no_adapter", "adapters"), ("swallowed_update", "adapters")]


@pytest.mark.parametrize(
    ("fault", "lora"),
    [pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.long) for case in (*WHOLE, *MERGED, *ADAPTERS)],
)
def test_diagnosis_names_the_fault_of_a_server(serve: Serve, begin: Begin, fault: str, lora: str) -> None:
    server = serve(fault, sums=torch.float32)
    run = begin([server], lora=lora)
    with raises(PublishError, "receipt_failed", cause=CAUSES[fault], version="1.2", url=server.url):
        run.train(4)
    states = [(row.version, row.state, row.attempt) for row in run.rows()]
    assert states == [("1.0", "ok", 1), ("1.1", "ok", 1), ("1.2", "failed", 1), ("1.2", "failed", 2)]
    assert [row.cause for row in run.rows()[2:]] == [CAUSES[fault]] * 2
    assert server.label == "unproven", "an environment samples only under the label of a version"
    assert server.loads == ["1.0", "1.1", "1.2", "1.2"]
    assert run.announced == ["1.0", "1.1", "1.2"]


@pytest.mark.parametrize("seed", rest_is_long(*range(10)))
def test_clean_runs_prove_every_publication(serve: Serve, begin: Begin, seed: int) -> None:
    run = begin([serve()], seed=seed, lora=("", "merged", "adapters")[seed % 3])
    run.train(6)
    rows = run.rows()
    assert [row.state for row in rows] == [ReceiptState.OK] * 7
    assert proven(rows) == Proven(7, 7)
    assert all(row.difference is not None and row.difference <= row.bound < 1e-4 for row in rows)
    assert all(row.bound >= 64 * torch.finfo(torch.float32).eps for row in rows), "sums in float32 lose many units"
    for row in rows[1:]:
        assert row.change is not None
        assert row.wanted_change is not None
        assert abs(row.change - row.wanted_change) <= 2 * row.bound
        assert row.change > 2 * row.bound


@pytest.mark.parametrize(
    ("share", "fault", "state"),
    rest_is_long(
        (0.5, None, "unproven"),
        (1.5, None, "ok"),
        (1.5, "label_only", "failed"),
        (2.5, None, "ok"),
        (0.5, "label_only", "unproven"),
        (2.5, "label_only", "failed"),
        first=3,
    ),
)
def test_receipt_proves_each_change_that_is_larger_than_the_bound(
    serve: Serve, begin: Begin, share: float, fault: str | None, state: str
) -> None:
    """A server that kept the version before never has an `ok` receipt, however small the change is."""
    run = begin([serve(fault)])
    run.train(1)
    chosen, policy = run.training.probes, run.learner.policy
    assert chosen is not None
    head, probes = policy.model.lm_head.weight, chosen.each_time()
    published, before = head.detach().clone(), own_scores(policy, probes)
    direction = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.add_(direction, alpha=1e-3)
        wanted = share * run.rows()[-1].bound * 1e-3 / distance(own_scores(policy, probes), before)
        head.copy_(published + wanted * direction)
    publish(run.training, 2)
    if state == "failed":
        with raises(PublishError, "receipt_failed"):
            run.publisher.settle()
    else:
        run.publisher.settle()
    row = run.rows()[2]
    assert row.wanted_change == pytest.approx(share * row.bound, rel=0.1)
    assert (row.version, row.state) == ("1.2", state)


def test_receipts_name_the_model_as_environments_do(serve: Serve, begin: Begin) -> None:
    """A server of adapters chooses between model and adapter by the name."""
    server = serve("label_only")
    with raises(PublishError, "receipt_failed"):
        begin([server]).train(4)
    assert len(server.asked) > 4
    assert {body["model"] for body in server.asked} == {NAME}


@pytest.mark.parametrize("probes", rest_is_long(wrong_weights.sampled, wrong_weights.made_up))
def test_bfloat16_accepts_the_right_weights_and_no_wrong_ones(model: Path, probes: Any) -> None:
    """By the bound of first receipts and of the doctor. 1024 rounding units of bfloat16 would accept any weights."""
    accepted = [one.weights for one in wrong_weights.measure(model, probes) if not one.rejected]
    assert accepted == ["right"]


@pytest.mark.parametrize("since", rest_is_long(0, 2))
@pytest.mark.parametrize(
    "name", rest_is_long(None, "logits half as large", "random, never trained weights", "all logits equal", first=2)
)
def test_receipts_in_bfloat16_reject_wrong_weights_of_any_version(
    serve: Serve, begin: Begin, name: str | None, since: int
) -> None:
    change = (lambda model: None) if name is None else wrong_weights.WRONG[name]
    run = begin([serve(since=since, change=change)], dtype="bfloat16")
    with wrong_weights.autocast():
        if name is None:
            run.train(4)
        else:
            with raises(PublishError, "receipt_failed", version=f"1.{since}"):
                run.train(4)
    assert ReceiptState.FAILED not in {row.state for row in run.rows() if name is None or row.step < since}
    assert max(row.bound for row in run.rows()) < 0.5, "the cap also bounds later receipts"


HIDDEN = 1e-5
"""A learning rate whose steps the log-probabilities of a bfloat16 server hide."""


@pytest.mark.parametrize(("sums", "state"), [(None, "unproven"), (torch.bfloat16, "ok"), (torch.float16, "unproven")])
def test_exact_comparison_proves_steps_that_bfloat16_hides(
    serve: Serve, begin: Begin, sums: torch.dtype | None, state: str
) -> None:
    """A server that serves another dtype than the published one has no comparable tensor."""
    run = begin([serve(change=lambda model: None, sums=sums)], dtype="bfloat16", learning_rate=HIDDEN)
    with wrong_weights.autocast():
        run.train(3)
    assert [row.state for row in run.rows()] == ["ok", state, state, state]
    assert {row.compared for row in run.rows()} == ({0} if state == "unproven" else {len(_names(run))})


def _names(run: Run) -> set[str]:
    """Returns vLLM's names of the model's tensors, with a separate head."""
    own = [name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
           for name in (*run.weights(), "lm_head.weight")]  # fmt: skip
    return set(own)


@pytest.mark.parametrize("fault", ["label_only", "missing_kind", "swallowed_update", "stale_version", "stale_head"])
def test_exact_comparison_names_stale_tensors_in_bfloat16(serve: Serve, begin: Begin, fault: str) -> None:
    server = serve(fault, change=lambda model: None, sums=torch.bfloat16)
    run = begin([server], dtype="bfloat16", learning_rate=HIDDEN)
    with wrong_weights.autocast(), raises(PublishError, "receipt_failed", cause=CAUSES[fault], version="1.2"):
        run.train(4)
    failed = run.rows()[-1]
    assert failed.difference is not None
    assert failed.difference <= failed.bound, "the log-probabilities agree"
    if fault == "missing_kind":
        assert "model.layers.*.mlp.down_proj.weight" in failed.detail
    assert server.label == "unproven"


@pytest.mark.parametrize("fault", ["", "label_only", "missing_kind"])
@pytest.mark.parametrize("transforms", [False, True], ids=["", "transforms"])
def test_first_receipt_of_a_resumed_training_finds_stale_tensors(
    serve: Serve, begin: Begin, fault: str, transforms: bool
) -> None:
    """The trainer was killed before it published step 2, and the server does not load it."""
    server = serve(fault, since=2, change=lambda model: None, sums=torch.bfloat16)
    sums = server.weight_sums
    if transforms:
        server.weight_sums = lambda: sums() | {"model.norm.weight": ["bfloat16", 1]}  # type: ignore[method-assign]
    run = begin([server], dtype="bfloat16", learning_rate=HIDDEN)
    with wrong_weights.autocast():
        run.train(1)
        run.learner.step(run.samples(), 2)
        if fault:
            with raises(PublishError, "receipt_failed", version="1.2"):
                run.resume(2)
        else:
            run.resume(2)
            assert [(row.state, row.compared) for row in run.rows()] == [("ok", len(_names(run)) - transforms)] * 3


def test_server_that_joins_and_keeps_its_first_weights_fails(serve: Serve, begin: Begin) -> None:
    first = serve(change=lambda model: None, sums=torch.bfloat16)
    joins = serve("label_only", since=0, change=lambda model: None, sums=torch.bfloat16)
    run = begin([first], dtype="bfloat16", learning_rate=HIDDEN)
    with wrong_weights.autocast():
        run.train(2)
        version = PolicyVersion(1, 2)
        joined = ModelServer(joins.url, "token", 30)
        assert run.receipts is not None
        failed = run.receipts.check(joined, version, 1)
        assert failed is not None
        assert failed.values["cause"] is Cause.VERSION_0


def test_bound_of_a_receipt_does_not_depend_on_the_sizes_before(
    serve: Serve, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The floor of a bound in float32 grows with the log-probabilities."""
    sizes = iter([1.0, 1.0, 30.0, 1.0])
    monkeypatch.setattr("gristmill_trainer.receipts.receipts.scale", lambda scores: next(sizes))
    run = begin([serve()])
    run.train(3)
    bounds = [row.bound for row in run.rows()]
    assert bounds[2] > bounds[1] == bounds[3]


def test_tensor_that_a_server_transforms_is_not_compared(serve: Serve, begin: Begin) -> None:
    server = serve(change=lambda model: None, sums=torch.bfloat16)
    sums = server.weight_sums
    server.weight_sums = lambda: sums() | {"model.norm.weight": ["bfloat16", 1]}  # type: ignore[method-assign]
    run = begin([server], dtype="bfloat16")
    with wrong_weights.autocast():
        run.train(2)
    assert [(row.state, row.compared) for row in run.rows()] == [("ok", len(_names(run)) - 1)] * 3


def test_step_that_bfloat16_rounds_away_needs_no_change(serve: Serve, begin: Begin) -> None:
    server = serve(change=lambda model: None, sums=torch.bfloat16)
    run = begin([server], dtype="bfloat16")
    with wrong_weights.autocast():
        run.train(1)
        publish(run.training, 2)
        run.publisher.settle()
    assert run.rows()[-1].state is ReceiptState.OK, "the publication has the same bits as the one before"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_sums_of_worker_and_trainer_are_additive_and_equal(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, generator=generator).to(dtype) for size in ((3, 5), (4, 5), (0, 5), (1 << 22, 2))]
    found = [sums.weight_sum(part) for part in parts]
    assert found == [worker.weight_sum(part) for part in parts]
    small = torch.cat([part.float() for part in parts[:3]]).to(dtype)
    assert sums.weight_sum(small) == sum(found[:3])
    padded = torch.cat([small.float(), torch.zeros(2, 5)]).to(dtype)
    assert sums.weight_sum(padded) == sum(found[:3])
    changed = small.clone()
    changed[0, 0], changed[0, 1] = 1, 2
    swapped = changed.clone()
    swapped[0, 0], swapped[0, 1] = 1.5, 1.5
    assert len({sums.weight_sum(one) for one in (small, changed, swapped)}) == 3


@pytest.mark.parametrize(
    ("workers", "equal", "other"),
    [
        ([{"a": ("bfloat16", 5)}], {"a"}, set()),
        ([{"a": ("bfloat16", 6)}], set(), {"a"}),
        ([{"a": ("float32", 5)}, {"b": ("bfloat16", 5)}], set(), set()),
        ([{"a": ("bfloat16", 5)}, {"a": ("bfloat16", 5)}], {"a"}, set()),
        ([{"a": ("bfloat16", 2)}, {"a": ("bfloat16", 3)}], {"a"}, set()),
        ([{"a": ("bfloat16", 2)}, {"a": ("bfloat16", 2)}], set(), set()),
        ([], set(), set()),
    ],
)
def test_comparison_of_the_workers_of_a_server(workers: Any, equal: set[str], other: set[str]) -> None:
    """With several workers, a tensor is whole in each or divided, and other numbers show nothing."""
    found = sums.compare(workers, {"a": ("bfloat16", 5), "c": ("bfloat16", 5)})
    assert (set(found.equal), set(found.other)) == (equal, other)


def test_second_publication_heals_a_server_that_lost_one(serve: Serve, begin: Begin) -> None:
    server = serve("label_only", times=1)
    run = begin([server])
    run.train(4)
    rows = [row for row in run.rows() if row.version == "1.2"]
    assert [(row.state, row.attempt) for row in rows] == [("failed", 1), ("ok", 2)]
    assert rows[0].cause == Cause.LABEL_WITHOUT_WEIGHTS
    assert proven(run.rows()) == Proven(5, 5)
    assert not failing(run.rows())


@pytest.mark.parametrize(
    ("fault", "background"),
    rest_is_long(("label_only", True), ("stale_head", False), ("label_only", False), ("stale_head", True)),
)
def test_training_continues_with_the_other_server(serve: Serve, begin: Begin, fault: str, background: bool) -> None:
    """The cause is known at later versions too."""
    good, bad = serve(), serve(fault, sums=torch.float32)
    run = begin([good, bad], background=background)
    run.train(4)
    run.close()
    assert good.label == "1.4"
    assert bad.label == "unproven"
    assert {row.cause for row in run.rows() if row.state is ReceiptState.FAILED} == {CAUSES[fault]}
    assert {row.server for row in failing(run.rows())} == {bad.url}
    assert all(row.state is ReceiptState.OK for row in run.rows() if row.server == good.url)


def test_diagnosis_that_fails_leaves_the_server_out_and_training_continues(
    serve: Serve, begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(100))

    def fails_first(case: Case) -> Diagnosis:
        if next(calls) == 0:
            raise MemoryError("no memory")
        return diagnose(case)

    monkeypatch.setattr("gristmill_trainer.receipts.receipts.diagnose", fails_first)
    good, bad = serve(), serve("label_only")
    run = begin([good, bad])
    run.train(4)
    run.close()
    assert (good.label, bad.label) == ("1.4", "unproven")
    first, *later = [row for row in run.rows() if row.state is ReceiptState.FAILED]
    assert (first.server, first.cause) == (bad.url, Cause.UNKNOWN)
    assert "MemoryError" in (first.detail or "")
    assert {(row.server, row.cause) for row in later} == {(bad.url, Cause.LABEL_WITHOUT_WEIGHTS)}
    assert any(record.exc_info for record in caplog.records), "the log has the traceback"


@pytest.mark.long
def test_diagnosis_that_takes_many_steps_does_not_end_the_training(
    serve: Serve, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's scores for its version are removed meanwhile."""
    over = threading.Event()

    def waits(case: Case) -> Diagnosis:
        assert over.wait(60)
        return diagnose(case)

    monkeypatch.setattr("gristmill_trainer.receipts.receipts.diagnose", waits)
    monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.2)
    good, bad = serve(), serve("swallowed_update")
    run = begin([good, bad])
    run.train(8)
    assert good.label == "1.8"
    over.set()
    while not any(row.version == "1.8" and row.server == bad.url for row in run.rows()):
        time.sleep(0.05)
    run.servers.ensure()
    run.close()
    assert proven([row for row in run.rows() if row.server == good.url]) == Proven(9, 9)


def test_training_has_the_same_bits_with_and_without_receipts(serve: Serve, begin: Begin) -> None:
    weights = []
    for receipts in (True, False):
        torch.manual_seed(7)
        run = begin([serve()], receipts=receipts)
        run.train(3)
        weights.append((run.weights(), torch.get_rng_state(), run.learner.policy.model.training))
    (with_receipts, state, mode), (without, other_state, other_mode) = weights
    assert all(torch.equal(with_receipts[name], tensor) for name, tensor in without.items())
    assert torch.equal(state, other_state)
    assert mode == other_mode


def test_restarted_server_proves_the_same_version_again(serve: Serve, begin: Begin) -> None:
    server = serve()
    run = begin([server])
    run.train(2)
    server.label = "default"
    deadline = time.monotonic() + 30
    while len(run.rows()) == 3:
        assert time.monotonic() < deadline, "the server published again, and no receipt followed"
        run.publisher.ensure()
        time.sleep(0.05)
    assert [(row.version, row.state) for row in run.rows()[2:]] == [("1.2", "ok"), ("1.2", "ok")]


def test_environments_sample_while_a_server_answers_the_probes(serve: Serve, begin: Begin) -> None:
    server, asked, go = serve(), threading.Event(), threading.Event()
    run = begin([server])
    run.train(1)
    answers = server._generate

    def late(body: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        assert go.wait(30)
        return answers(body)

    server._generate = late  # type: ignore[method-assign]
    publish(run.training, 2)
    assert run.announced[-1] == "1.2"
    assert asked.wait(30)
    assert run.rows()[-1].version == "1.1"
    go.set()
    run.publisher.settle()
    assert run.rows()[-1].version == "1.2"


def test_trainer_that_waits_for_a_batch_learns_that_no_server_is_left(serve: Serve, begin: Begin) -> None:
    """Environments sample nothing from a server that is left out, so the batch would never arrive."""
    server = serve("label_only")
    run = begin([server])
    run.train(1)
    run.learner.step(run.samples(), 2)
    publish(run.training, 2)
    deadline = time.monotonic() + 30
    with raises(PublishError, "receipt_failed", version="1.2"):
        while time.monotonic() < deadline:
            run.publisher.ensure()
            time.sleep(0.05)


def test_metrics_have_the_largest_difference_and_the_smallest_change_since_the_last_row(
    serve: Serve, begin: Begin
) -> None:
    run = begin([serve()])
    run.train(2)
    assert run.receipts is not None
    taken = run.receipts.take()
    assert taken == run.rows()
    assert receipt_metrics(taken) == {
        "receipts": {"ok": 3},
        "receipt_difference": max(row.difference or 0.0 for row in taken),
        "receipt_change": min(row.change for row in taken if row.change is not None),
        "receipt_seconds": max(row.seconds for row in taken),
    }
    assert receipt_metrics(run.receipts.take()) == {}


def test_step_that_changes_no_weight_needs_no_change(serve: Serve, begin: Begin) -> None:
    """A step without a gradient may change weights too, by AdamW's momentum."""
    run = begin([serve()])
    run.train(1)
    for step, change in ((2, 0.0), (3, 1e-7)):
        with torch.no_grad():
            run.learner.policy.model.lm_head.weight[0, 0].add_(change)
        publish(run.training, step)
        run.publisher.settle()
    assert [row.state for row in run.rows()[-2:]] == [ReceiptState.OK, ReceiptState.UNPROVEN]
    assert proven(run.rows()) == Proven(3, 4)


def test_probes_come_from_the_first_batch_and_stay_in_the_run_folder(
    serve: Serve, begin: Begin, tmp_path: Path
) -> None:
    run = begin([serve()])
    run.train(1)
    probes = Probes.read(run.folder)
    assert probes is not None
    assert probes == msgspec.structs.replace(run.training.probes, first=probes.first)  # type: ignore[type-var]
    assert [probe.prompt for probe in probes.probes] == [False, True, True]
    assert probes.temperature == 0.8
    assert [len(row) for row in probes.first] == [
        len(probe.ids) + (len(probe.tokens) - 1 if probe.prompt else 0) for probe in probes.probes
    ]


def test_server_without_probes_is_unproven_and_training_continues(serve: Serve, begin: Begin) -> None:
    server = serve()
    server._generate = lambda body: {"choices": []}  # type: ignore[method-assign]
    run = begin([server])
    run.train(2)
    assert [row.state for row in run.rows()] == [ReceiptState.UNPROVEN] * 3
    assert proven(run.rows()) == Proven(0, 3)
