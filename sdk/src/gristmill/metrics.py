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
    """Tokens that the step's updates put through the model, prompts included: each of num_epochs counts."""
    trained_tokens: int = 0
    """Those that the loss counts."""
    seconds: dict[str, float]
    """Wall time by phase since the row before: checkpoint and publish (of the step before), wait, pack, train."""
    learning_rate: float = 0.0
    skipped: str | None = None
    """Why the step changed nothing: its loss or gradient was not finite, or nothing was left of its groups."""
    updates_left_out: int = 0
    """Of several updates a step, those whose loss or gradient was not finite."""
    reward_parts: dict[str, float] = msgspec.field(default_factory=dict)
    """Mean of each reward, over the sequences that it did not skip."""
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    """What was not trained on, by reason: sequences, and whole groups, which count once."""
    staleness: dict[str, int] = msgspec.field(default_factory=dict)
    """Groups by staleness in steps."""
    zero_advantage_share: float = 0.0
    """Share of groups whose advantages are all 0: they teach nothing."""
    cut_off_share: float = 0.0
    """Share of completions that ended at max_tokens."""
    seq_len_cuts: int = 0
    """Sequences that lost their tail to seq_len."""
    overlong_filtered: int = 0
    """Sequences that were not trained on because they were cut off; `overlong_punished`: whose reward was lowered."""
    overlong_punished: int = 0
    advantages_zeroed: int = 0
    """Sequences whose advantage an override of their group set to 0."""
    unknown_overrides: dict[str, int] = msgspec.field(default_factory=dict)
    """Overrides of groups that nothing is known of, by key."""
    entropy_mean: float | None = None
    """Of the policy, in nats a trained token."""
    logprob_mean: float | None = None
    """Mean log-probability of trained tokens under the policy; `pos_logp` and `neg_logp`: of those with a positive
    and of those with a negative advantage. Tokens with advantage 0 are in neither."""
    pos_logp: float | None = None
    neg_logp: float | None = None
    kl_rollout: float | None = None
    """KL(rollout policy || trainer's policy before the step), estimated as the mean of e^d - d - 1 over trained tokens,
    d the difference of their log-probabilities (k3 of Schulman 2020)."""
    kl_ref: float | None = None
    """The same against the reference model, of which the policy is the first argument."""
    ratio: dict[str, float] = msgspec.field(default_factory=dict)
    """Quantiles (p01, p50, p99, max) over trained tokens of the policy ratio, as the objective has it: of the token, or
    of its sequence."""
    clip_low_share: float | None = None
    """Share of trained tokens whose ratio the objective's lower clip stopped; `clip_high_share`: the upper one."""
    clip_high_share: float | None = None
    importance: dict[str, float] = msgspec.field(default_factory=dict)
    """Quantiles of the importance weight against the rollout policy, before its cap; of the token or its sequence."""
    importance_capped_share: float | None = None
    """Share of trained tokens above the cap."""
    tokens_per_second: float = 0.0
    """Trained and prompt tokens a second of the train phase."""
    mfu: float | None = None
    """Model FLOPs utilisation of the train phase: model FLOPs / (seconds x peak x devices). None: no peak is known."""
    peak_tflops: float | None = None
    """The peak that `mfu` assumes, a device."""
    memory_mb: float | None = None
    """Most memory that the process held so far: of the device, on CUDA; else resident."""

    def values(self) -> dict[str, Any]:
        """The metrics by name that there are, without the step they belong to."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        del values["step"]
        return {name: value for name, value in values.items() if value is not None and value != {}}


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
    with path.open(newline="\n") as file:
        return [json.loads(text) for text in file if text.endswith("\n")]
