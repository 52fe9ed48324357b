"""The metrics of a step: the learner's result, statistics of the trained tokens, MFU, and the row of metrics.

MFU (model FLOPs utilisation) follows PaLM (Chowdhery et al. 2022, appendix B): the FLOPs of the model's mathematics,
divided by the device's peak. Recomputation to save memory does not count.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gristmill import PolicyVersion
from gristmill.internal.metrics import StepMetrics
from gristmill_trainer.data.samples import Statistics
from gristmill_trainer.memory import Shape
from gristmill_trainer.objectives import Ratios, TrainedTokens

F32 = npt.NDArray[np.float32]
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class StepResult:
    """Result of one step. The defaults are of a step without an update."""

    loss: float = math.nan
    """Mean over the applied updates; if no update was applied, over the updates left out. NaN without any update."""
    grad_norm: float = math.nan
    """Global L2 norm before clipping, averaged over the same updates."""
    token_stats: TokenStats = field(default_factory=lambda: TokenStats.of([]))
    tokens: int = 0
    """Tokens that the model processed for training, without padding."""
    trained_tokens: int = 0
    flops: int | None = None
    """Model FLOPs of all updates on all ranks; None if the model's FLOPs are unknown."""
    skipped: str | None = None
    """Why the step changed no weights: nothing was left to train on, or no update was finite."""
    left_out: int = 0
    """Updates whose loss or gradient was not finite, or of which a sequence did not fit in memory."""
    problem: str | None = None
    """The non-finite value of the last update left out."""
    halved: int = 0
    """How often the token budget was halved, because the memory ran out."""
    learning_rate: float = 0.0
    order: tuple[int, ...] = ()
    """Index, among the step's samples, of each sequence in `token_stats`. With several epochs a sample comes again."""


def step_metrics(
    version: PolicyVersion,
    known: Statistics,
    result: StepResult,
    seconds: dict[str, float],
    *,
    device: torch.device,
    devices: int = 1,
    peak: float | None = None,
) -> StepMetrics:
    """Builds the metrics. `seconds`: by phase. `peak`: TFLOPS per device."""
    measures = measure(result.token_stats)
    spent = seconds.get("train", 0.0)
    return StepMetrics(
        step=version.step,
        policy_version=str(version),
        reward_mean=known.reward_mean,
        reward_std=known.reward_std,
        loss=result.loss,
        grad_norm=result.grad_norm,
        staleness_mean=sum(known.staleness) / len(known.staleness) if known.staleness else math.nan,
        staleness={str(steps): groups for steps, groups in sorted(Counter(known.staleness).items())},
        completion_tokens_mean=known.completion_tokens_mean,
        tokens=result.tokens,
        trained_tokens=result.trained_tokens,
        seconds=seconds,
        finished_at=time.time(),
        learning_rate=result.learning_rate,
        skipped=result.skipped,
        updates_left_out=result.left_out,
        token_budget_halved=result.halved,
        rejected={str(reason): count for reason, count in known.rejected.items()},
        reward_parts=known.reward_parts,
        source_rewards=known.source_rewards,
        seq_len_cuts=known.seq_len_cuts,
        overlong_filtered=known.overlong_filtered,
        overlong_punished=known.overlong_punished,
        advantages_zeroed=known.zeroed,
        unknown_overrides=known.unknown_overrides,
        zero_advantage_share=known.zero_advantage_share,
        cut_off_share=known.cut_off_share,
        tokens_per_second=result.tokens / spent if spent else 0.0,
        mfu=_mfu(result, spent, devices, peak),
        peak_tflops=peak,
        memory_mb=memory_mb(device),
        **{name: value for name, value in asdict(measures).items() if value is not None},
    )


def _mfu(result: StepResult, seconds: float, devices: int, peak: float | None) -> float | None:
    if result.flops is None or peak is None or not seconds:
        return None
    return result.flops / (seconds * devices * peak * 1e12)


@dataclass(frozen=True, eq=False)
class TokenStats:
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
    clipped_high: F32
    importance: F32
    capped: F32

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
        return torch.stack([columns[one.name].detach().float() for one in fields(cls)])

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> TokenStats:
        """Joins the `rows` of micro-batches; without rows, the arrays are empty."""
        whole = torch.cat(list(rows), dim=1).cpu().numpy() if rows else np.zeros((len(fields(cls)), 0), np.float32)
        return cls(*whole)

    @classmethod
    def join(cls, pieces: Sequence[TokenStats]) -> TokenStats:
        return cls(
            *(
                np.concatenate([np.zeros(0, np.float32), *(getattr(piece, one.name) for piece in pieces)])
                for one in fields(cls)
            )
        )


@dataclass(frozen=True)
class TokenMeasures:
    """Means, shares and quantiles over trained tokens. gristmill.internal.metrics.StepMetrics documents the fields."""

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


def measure(token_stats: TokenStats) -> TokenMeasures:
    """Computes the measures of a step's tokens; without tokens, the defaults."""
    if not len(token_stats.logprobs):
        return TokenMeasures()
    new, old, rollout = (
        a.astype(np.float64) for a in (token_stats.logprobs, token_stats.old_logprobs, token_stats.rollout_logprobs)
    )
    positive, negative = token_stats.advantages > 0, token_stats.advantages < 0
    ref = token_stats.ref_logprobs.astype(np.float64)
    return TokenMeasures(
        rollout_logprob_diff_mean=float(np.abs(old - rollout).mean()),
        rollout_logprob_diff_max=float(np.abs(old - rollout).max()),
        entropy_mean=_mean(token_stats.entropy),
        logprob_mean=_mean(new),
        pos_logp=_mean(new[positive]) if positive.any() else None,
        neg_logp=_mean(new[negative]) if negative.any() else None,
        kl_rollout=_k3(old - rollout),
        # Groups with and without reference log-probabilities may be in one step.
        kl_ref=None if np.isnan(ref).any() else _k3(ref - new),
        ratio=_quantiles(token_stats.ratio),
        clip_low_share=_mean(token_stats.clipped_low),
        clip_high_share=_mean(token_stats.clipped_high),
        importance=_quantiles(token_stats.importance),
        importance_capped_share=_mean(token_stats.capped),
    )


def _mean(values: npt.NDArray[np.floating]) -> float:
    return float(values.mean(dtype=np.float64))


def _k3(difference: npt.NDArray[np.float64]) -> float:
    return float((np.expm1(difference) - difference).mean())


def _quantiles(values: F32) -> dict[str, float]:
    quantiles = np.quantile(values.astype(np.float64), list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, quantiles), strict=True))


# Dense bfloat16 TFLOPS from the makers' data sheets (without sparsity). The first entry whose name is in the device's
# name counts, so longer names come first.
PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 150.0),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.0),
    ("RTX A6000", 155.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)


def peak_of(device: torch.device, set_by_user: float | None) -> float | None:
    """Returns the peak TFLOPS of one device, the denominator of MFU; None if unknown."""
    if set_by_user is not None:
        return set_by_user
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def memory_mb(device: torch.device) -> float:
    """Returns peak memory in MB: allocated memory on a CUDA device since the last call, else the resident memory of the
    process so far."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 1e6
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def peak_tflops(device_name: str) -> float | None:
    """Returns the peak of a device by its torch.cuda.get_device_name; None if the table does not contain it."""
    return next((peak for name, peak in PEAK_TFLOPS if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True)
class ModelFlops:
    """Floating point operations of a forward and backward pass.

        sum_s [ (6 N_trained + 4 N_frozen) L_s  +  6 layers heads head_dim L_s^2 ]  +  6 V D M   (4 if frozen)

    L_s: tokens of sequence s; M: trained tokens, the only tokens that reach the head. A multiply-add is 2 operations.
    A prefix of p tokens that sequences share counts once: each sequence that continues it has L_s - p and L_s^2 - p^2.
    Forward pass, input gradient and weight gradient make 6 per weight and token; without the weight gradient, 4.
    PaLM's attention term has the factor 12 instead of 6, because it includes the half that a causal mask removes. The
    kernels here do not compute that half.
    """

    trained: int
    """Weights with a gradient between embedding table and head. The table needs lookups, not multiplications."""
    frozen: int
    head: int
    """V x D, for tied and separate heads."""
    head_is_trained: bool
    attention: int
    """layers x heads x head_dim."""

    @classmethod
    def of(cls, model: Any) -> ModelFlops | None:
        """Reads a transformers causal LM.

        Returns None for mixtures of experts, which do not use every weight, and for a config without a known shape.
        """
        config = model.config.get_text_config()  # The trained part of a model that also reads images.
        shape = Shape.of(config)
        experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        if shape is None or experts:
            return None
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        between = [parameter for parameter in model.parameters() if parameter is not table and parameter is not head]
        return cls(
            trained=sum(parameter.numel() for parameter in between if parameter.requires_grad),
            frozen=sum(parameter.numel() for parameter in between if not parameter.requires_grad),
            head=head.numel(),
            head_is_trained=bool(head.requires_grad),
            attention=shape.layers * shape.queries,
        )

    def step(self, tokens: int, squares: int, trained_tokens: int) -> int:
        """Returns the FLOPs for sequences of `tokens` tokens together, with `trained_tokens` tokens in the loss.

        `squares`: the sum of the squared lengths (`Layout.squares`).
        """
        body = (6 * self.trained + 4 * self.frozen) * tokens
        attention = 6 * self.attention * squares
        return body + attention + (6 if self.head_is_trained else 4) * self.head * trained_tokens
