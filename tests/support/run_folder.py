"""Folders of runs as the services write them, for tests of their readers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from tests.support.groups import make_group

from gristmill import TrajectoryGroup
from gristmill.archive.drops import Drop, append_drops
from gristmill.archive.trained import TOKENIZER_FOLDER, TRAINED, TRAINED_SCHEMA, TrainedGroup, TrainedSequence
from gristmill.internal.archive_writer import RunWriter
from gristmill.internal.saved import SavedCompletion, SavedGroup

CREATED = 1_790_000_000_000


class RunFolderWriter:
    """Writes `root/run_id`. The writers flush at each call."""

    def __init__(self, root: Path, run_id: str = "test", created_ms: int = CREATED, max_bytes: int = 1 << 30) -> None:
        self.path = root / run_id
        self._run_id = run_id
        self.created_ms = created_ms
        self._archive = RunWriter(self.path / "rollouts", run_id, created_ms, max_bytes, on_removed=self._let_go)
        self._trained = RunWriter(self.path / "trained", run_id, created_ms, 1 << 30)

    def archive(self, *groups: TrajectoryGroup) -> None:
        for group in groups:
            self._archive.append(group.group_id, "group", group.encode())
        self._archive.sync()

    def archive_json(self, group_id: str, body: dict[str, object]) -> None:
        self._archive.append(group_id, "atropos", json.dumps(body).encode())
        self._archive.sync()

    def trained(self, *groups: TrainedGroup) -> None:
        for group in groups:
            self._trained.append(group.group_id, TRAINED_SCHEMA, group.encode())

    def drop(self, what: str, *group_ids: str, reason: str | None = None, time_ms: int | None = None) -> None:
        drops = [
            Drop(
                creation=self.created_ms,
                group_id=one,
                row=int(one[1:]),
                what=what,  # type: ignore[arg-type]
                reason=reason,
                time_ms=int(time.time() * 1000) if time_ms is None else time_ms,
            )
            for one in group_ids
        ]
        append_drops(self.path, drops)

    def metrics(self, rows: Sequence[dict[str, object]]) -> None:
        (self.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def evaluation(
        self, name: str, weights: str, prompts: int, *, finished: bool = True, creation: str | None = None
    ) -> None:
        folder = self.path / "evaluations" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evaluation.json").write_text(json.dumps({"weights": weights, "creation": creation}))
        completion = SavedCompletion(
            text="4", tokens=1, finish_reason="stop", scores={"accuracy": 1.0, "format": None}, total=1.0, right=True,
            extracted="4", versions=[weights],
        )  # fmt: skip
        groups = [
            SavedGroup(
                run=self.path.name, row=n, index=n, prompt="2+2", answer="4", prompt_tokens=3, completions=[completion]
            )
            for n in range(prompts)
        ]
        (folder / "groups.jsonl").write_bytes(b"".join(msgspec.json.encode(group) + b"\n" for group in groups))
        if finished:
            (folder / "results.json").write_text("{}")

    def tokenizer(self, vocabulary: int = 64) -> None:
        """Token n is the word "tn"."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(vocabulary)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        folder = self.path / "trained" / TOKENIZER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        words.save(str(folder / "tokenizer.json"))

    def _let_go(self, ids: Sequence[str], bound: str) -> None:
        self.drop("let_go", *ids, reason=bound)


def record_of(
    group: TrajectoryGroup, step: int, version: str | None = None, outcome: str = TRAINED, seed: int = 0
) -> TrainedGroup:
    """Returns a trainer's record: every sequence has this outcome, and log-probabilities near the sampler's."""
    rng = np.random.default_rng(seed)
    sequences = {}
    start = 0
    for index, length in enumerate(group.lengths.tolist()):
        mask = group.mask[start : start + length]
        sampler = group.logprobs[start : start + length][mask]
        sequences[index] = TrainedSequence(
            outcome=outcome,
            mask=mask,
            logprobs=(sampler + rng.normal(0, 0.01, len(sampler))).astype(np.float32),
            advantages=np.array([group.rewards[index] - group.rewards.mean()], np.float32),
            entropy=rng.exponential(size=len(sampler)).astype(np.float32),
        )
        start += length
    return TrainedGroup(group.group_id, step, version or f"1.{step}", None, sequences)


def synthetic_run(
    root: Path, *, steps: int, groups_per_step: int, group_size: int, tokens: int = 120, run_id: str = "synthetic"
) -> RunFolderWriter:
    """A whole run with rewards that grow. Some rows are dropped, and some groups are truncated or repeat themselves."""
    run = RunFolderWriter(root, run_id)
    run.tokenizer()
    rng = np.random.default_rng(0)
    row = 0
    metrics: list[dict[str, object]] = []
    for step in range(1, steps + 1):
        groups = []
        for _ in range(groups_per_step):
            if row % 10 == 9:
                run.drop("dropped", f"g{row:08d}", reason="same_scores")
                row += 1
            groups.append(_group(row, run_id, step, group_size, tokens, rng))
            row += 1
        run.trained(*(record_of(group, step, seed=step) for group in groups))
        run.archive(*groups)
        metrics.append({"step": step, "policy_version": f"1.{step}", "seconds": {"wait": 1.5, "train": 0.5}})
    run.metrics(metrics)
    run.evaluation(f"step-{steps:06d}", f"1.{steps}", 20)
    return run


def _group(row: int, run_id: str, step: int, size: int, tokens: int, rng: np.random.Generator) -> TrajectoryGroup:
    lengths = [(12, int(length)) for length in rng.integers(tokens // 2, tokens * 3 // 2, size)]
    right = (rng.random(size) < min(0.9, 0.2 + step / 200)).astype(np.float32)
    version = f"1.{max(0, step - 1 - row % 3)}"
    group = make_group(f"g{row:08d}", run_id, lengths, right.tolist(), version, seed=row)
    drawn = group.tokens.copy()
    start = 0
    for index, length in enumerate(group.lengths.tolist()):
        drawn[start : start + 12] = np.random.default_rng(row % 500).integers(0, 64, 12)  # Rows come again.
        if index == 0 and row % 50 == 0:
            drawn[start + 12 : start + length] = 7
        start += length
    parts = {"accuracy": right.tolist(), "format": [float(value) for value in rng.integers(0, 2, size)]}
    reasons = ["length" if length > tokens * 1.4 else "stop" for _, length in lengths]
    meta = {"answer": str(row), "extracted": [str(row)] * size, "seconds": float(rng.exponential(3)), "submitted_ms": 1}
    fields = {"tokens": drawn, "reward_parts": parts, "finish_reasons": reasons, "meta": meta}
    return TrajectoryGroup(**{name: getattr(group, name) for name in _FIELDS if name not in fields}, **fields)  # type: ignore[arg-type]


_FIELDS = tuple(TrajectoryGroup.__dataclass_fields__)
