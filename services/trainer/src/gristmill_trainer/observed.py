"""Values of a step's trained tokens, and the metrics computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from gristmill_trainer.objectives import Ratios, TrainedTokens

F32 = npt.NDArray[np.float32]
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, eq=False)
class Observed:
    """Values of an update's trained tokens: f32[M] each."""

    logprobs: F32
    """log pi, before the update."""
    old_logprobs: F32
    rollout_logprobs: F32
    advantages: F32
    entropy: F32
    ref_logprobs: F32
    """NaN without a reference."""
    ratio: F32
    """The objective's ratio, per token or per sequence. The following fields have the same level."""
    clipped_low: F32
    """1 if the lower clip bounded the ratio, else 0."""
    clipped_high: F32
    importance: F32
    """Importance weight before the cap."""
    capped: F32
    """1 if the weight is above the cap, else 0."""

    @classmethod
    def rows(cls, tokens: TrainedTokens, ratios: Ratios) -> torch.Tensor:
        """Returns float32[fields, M] on the tokens' device, for `of`, without waiting for the device."""
        reference = torch.full_like(tokens.old_logprobs, torch.nan)
        columns = {
            "logprobs": tokens.logprobs,
            "old_logprobs": tokens.old_logprobs,
            "rollout_logprobs": tokens.rollout_logprobs,
            "advantages": tokens.advantages,
            "entropy": reference if tokens.entropy is None else tokens.entropy,
            "ref_logprobs": reference if tokens.ref_logprobs is None else tokens.ref_logprobs,
            **ratios._asdict(),
        }
        return torch.stack([columns[field.name].detach().float() for field in fields(cls)])

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> Observed:
        """Joins the `rows` of micro-batches; without rows, the arrays are empty."""
        whole = torch.cat(list(rows), dim=1).cpu().numpy() if rows else np.zeros((len(fields(cls)), 0), np.float32)
        return cls(*whole)

    @classmethod
    def join(cls, pieces: Sequence[Observed]) -> Observed:
        """Concatenates all pieces."""
        return cls(
            *(
                np.concatenate([np.zeros(0, np.float32), *(getattr(piece, field.name) for piece in pieces)])
                for field in fields(cls)
            )
        )


@dataclass(frozen=True)
class TokenMeasures:
    """Means, shares and quantiles over trained tokens. gristmill.metrics.StepMetrics documents the fields."""

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


def measure(seen: Observed) -> TokenMeasures:
    """Computes the measures of a step's tokens; without tokens, the defaults."""
    if not len(seen.logprobs):
        return TokenMeasures()
    new, old, rollout = (a.astype(np.float64) for a in (seen.logprobs, seen.old_logprobs, seen.rollout_logprobs))
    positive, negative = seen.advantages > 0, seen.advantages < 0
    ref = seen.ref_logprobs.astype(np.float64)
    return TokenMeasures(
        rollout_logprob_diff_mean=float(np.abs(old - rollout).mean()),
        rollout_logprob_diff_max=float(np.abs(old - rollout).max()),
        entropy_mean=_mean(seen.entropy),
        logprob_mean=_mean(new),
        pos_logp=_mean(new[positive]) if positive.any() else None,
        neg_logp=_mean(new[negative]) if negative.any() else None,
        kl_rollout=_k3(old - rollout),
        # Groups with and without reference log-probabilities may be in one step.
        kl_ref=None if np.isnan(ref).any() else _k3(ref - new),
        ratio=_quantiles(seen.ratio),
        clip_low_share=_mean(seen.clipped_low),
        clip_high_share=_mean(seen.clipped_high),
        importance=_quantiles(seen.importance),
        importance_capped_share=_mean(seen.capped),
    )


def _mean(values: npt.NDArray[np.floating]) -> float:
    return float(values.mean(dtype=np.float64))


def _k3(difference: npt.NDArray[np.float64]) -> float:
    return float((np.expm1(difference) - difference).mean())


def _quantiles(values: F32) -> dict[str, float]:
    found = np.quantile(values.astype(np.float64), list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, map(float, found), strict=True))
