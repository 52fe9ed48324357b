"""The trainer's metrics: one JSON object a step in the run folder's metrics.jsonl."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

METRICS_FILE = "metrics.jsonl"


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. The field names are the metric names everywhere: file, display, trackers."""

    step: int
    """Optimizer steps done, 1 for the first."""
    policy_version: str
    """Label of the weights this step produced ("1.20")."""
    reward_mean: float
    reward_std: float
    """Over all sequences of the step."""
    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    staleness_mean: float
    """Steps between the weights that sampled a group (its oldest token) and the weights trained; mean over groups."""
    completion_tokens_mean: float
    rollout_logprob_diff_mean: float
    rollout_logprob_diff_max: float
    """|log-probability by the trainer - by the model server| on sampled tokens. On policy it is rounding
    error; anything more means wrong tokens, masks, temperature or weights."""
    tokens: int
    """All tokens of the step, prompts included."""
    seconds: dict[str, float]
    """Wall time by phase: wait, pack, train, checkpoint, publish."""

    def values(self) -> dict[str, Any]:
        """The metrics by name, without the step they belong to."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        del values["step"]
        return values


class JsonlWriter:
    """Appends objects to a file, one line each, on disk before `append` returns."""

    def __init__(self, path: Path, keep: Callable[[Mapping[str, Any]], bool] | None = None) -> None:
        """Open `path` for appending. Lines already there for which `keep` is false go, as does a torn last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [row for row in read_jsonl(path) if keep is None or keep(row)]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            temporary.replace(path)
        self._file = path.open("a")

    def append(self, row: msgspec.Struct | Mapping[str, Any]) -> None:
        self._file.write(msgspec.json.encode(row).decode() + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The file's objects. A last line without its newline was torn by a kill and is left out."""
    return [json.loads(text) for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]
