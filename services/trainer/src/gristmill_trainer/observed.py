"""What the trained tokens of a step looked like, and the metrics that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, eq=False)
class Observed:
    """Trained tokens as an update met them: f32[M] each."""

    logprobs: F32
    """log pi, before the update."""
    old_logprobs: F32
    rollout_logprobs: F32
    advantages: F32
    entropy: F32
    ref_logprobs: F32 | None = None

    @classmethod
    def of(
        cls,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        rollout_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        entropy: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
    ) -> Observed:
        """From the tensors of a micro-batch, float32[M]."""
        return cls(
            _array(logprobs),
            _array(old_logprobs),
            _array(rollout_logprobs),
            _array(advantages),
            _array(entropy),
            None if ref_logprobs is None else _array(ref_logprobs),
        )

    @classmethod
    def join(cls, pieces: Sequence[Observed]) -> Observed:
        """All of them, one after the other; none give empty arrays. `ref_logprobs` is there when every piece has it:
        groups may bring it that lie beside others that do not."""
        joined: dict[str, F32 | None] = {}
        for field in fields(cls):
            found = [values for piece in pieces if (values := getattr(piece, field.name)) is not None]
            if field.name == "ref_logprobs" and (not pieces or len(found) < len(pieces)):
                joined[field.name] = None
            else:
                joined[field.name] = np.concatenate([np.zeros(0, np.float32), *found])
        return cls(**joined)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Bounds:
    """What the objective clips, for the shares of clipped tokens."""

    low: float
    """The ratio is stopped below 1 - low where the advantage is negative."""
    high: float
    """And above 1 + high where it is positive."""
    importance_cap: float


@dataclass(frozen=True)
class TokenMeasures:
    """Means, shares and quantiles over trained tokens; see gristmill.metrics.StepMetrics for what they are."""

    rollout_logprob_diff_mean: float = 0.0
    rollout_logprob_diff_max: float = 0.0
    entropy_mean: float | None = None
    logprob_mean: float | None = None
    pos_logp: float | None = None
    neg_logp: float | None = None
    kl_rollout: float | None = None
    kl_ref: float | None = None
    ratio: dict[str, float] | None = None
    clip_low_share: float | None = None
    clip_high_share: float | None = None
    importance: dict[str, float] | None = None
    importance_capped_share: float | None = None


def measure(seen: Observed, bounds: Bounds) -> TokenMeasures:
    """The measures of a step's tokens; without any there is nothing to tell."""
    if not len(seen.logprobs):
        return TokenMeasures()
    new, old, rollout = (a.astype(np.float64) for a in (seen.logprobs, seen.old_logprobs, seen.rollout_logprobs))
    ratio, importance = np.exp(new - old), np.exp(old - rollout)
    positive = seen.advantages > 0
    ref = None if seen.ref_logprobs is None else seen.ref_logprobs.astype(np.float64)
    return TokenMeasures(
        rollout_logprob_diff_mean=float(np.abs(old - rollout).mean()),
        rollout_logprob_diff_max=float(np.abs(old - rollout).max()),
        entropy_mean=float(seen.entropy.mean(dtype=np.float64)),
        logprob_mean=float(new.mean()),
        pos_logp=float(new[positive].mean()) if positive.any() else None,
        neg_logp=float(new[~positive].mean()) if not positive.all() else None,
        kl_rollout=_k3(old - rollout),
        kl_ref=None if ref is None else _k3(ref - new),
        ratio=_quantiles(ratio),
        clip_low_share=float(((ratio < 1 - bounds.low) & (seen.advantages < 0)).mean()),
        clip_high_share=float(((ratio > 1 + bounds.high) & positive).mean()),
        importance=_quantiles(importance),
        importance_capped_share=float((importance > bounds.importance_cap).mean()),
    )


def _k3(difference: npt.NDArray[np.float64]) -> float:
    return float((np.expm1(difference) - difference).mean())


def _quantiles(values: npt.NDArray[np.float64]) -> dict[str, float]:
    found = np.quantile(values, list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, map(float, found), strict=True))


def _array(tensor: torch.Tensor) -> F32:
    return tensor.detach().float().cpu().numpy()
