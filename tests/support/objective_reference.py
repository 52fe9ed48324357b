"""A second implementation of the objectives in plain float64 arithmetic: loops over sequences and tokens, as in the
formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gristmill.hyperparameters import Hyperparameters

CLIPS = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "bnpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "cispo": (0.2, 5.0),
    "gspo": (3e-4, 4e-4),
}


@dataclass
class Token:
    logprob: float
    old: float
    rollout: float
    advantage: float
    ref: float
    entropy: float
    still: float
    """log pi under a stop-gradient, as a constant."""
    teacher: list[tuple[float, float]] = field(default_factory=list)
    """Log-probabilities of one of the teacher's tokens: the teacher's, the policy's."""


Sequence = list[Token]


def reference_loss(
    settings: Hyperparameters,
    sequences: list[Sequence],
    local_batch: int,
    max_completion_length: int,
    rollouts: list[int] | None = None,
) -> float:
    """`rollouts`: the rollout of each sequence, from 0. The branches of a rollout are one sequence of the formulas."""
    if rollouts is not None:
        branches = list(zip(rollouts, sequences, strict=True))
        sequences = [
            [token for rollout, branch in branches if rollout == number for token in branch]
            for number in range(max(rollouts) + 1)
        ]
    losses = [[_token_loss(settings, token, sequence) for token in sequence] for sequence in sequences]
    everything = [loss for sequence in losses for loss in sequence]
    match settings.objective:
        case "dapo" | "cispo":
            loss = sum(everything) / len(everything)
        case "grpo" | "gspo":
            loss = _mean([_mean(sequence) for sequence in losses])
        case "bnpo":
            batches = [losses[first : first + local_batch] for first in range(0, len(losses), local_batch)]
            loss = _mean([_mean([loss for sequence in batch for loss in sequence]) for batch in batches])
        case "dr_grpo":
            loss = sum(everything) / (len(losses) * max_completion_length)
    return loss - settings.entropy_coef * _mean([token.entropy for sequence in sequences for token in sequence])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _token_loss(settings: Hyperparameters, token: Token, sequence: Sequence) -> float:
    loss = _importance(settings, token, sequence) * _surrogate(settings, token, sequence)
    if settings.kl_beta:
        ratio = _ratio(settings, token, sequence) if settings.kl_bias_correction else 1.0
        loss += settings.kl_beta * ratio * _kl(settings.kl_estimator, token)
    return loss + settings.distill_coef * _divergence(settings.distill_divergence, token.teacher)


def _importance(settings: Hyperparameters, token: Token, sequence: Sequence) -> float:
    if settings.ratio_policy == "rollout":
        return 1.0
    of = [token] if settings.importance_level == "token" else sequence
    weight = math.prod(math.exp(each.old) / math.exp(each.rollout) for each in of)
    if settings.importance_level == "geometric":
        weight **= 1 / len(sequence)
    low, high = settings.importance_floor, settings.importance_cap
    match settings.importance_correction:
        case "none":
            return 1.0
        case "truncate":
            return max(low, min(weight, high))
        case "mask":
            return weight if low <= weight <= high else 0.0


def _surrogate(settings: Hyperparameters, token: Token, sequence: Sequence) -> float:
    default_low, default_high = CLIPS[settings.objective]
    low = settings.clip_epsilon or default_low
    high = settings.clip_epsilon_high or default_high
    if settings.objective == "cispo":
        return -min(math.exp(token.still - _old(settings, token)), high) * token.advantage * token.logprob
    ratio = _ratio(settings, token, sequence)
    clipped = max(1 - low, min(ratio, 1 + high))
    return -min(ratio * token.advantage, clipped * token.advantage)


def _ratio(settings: Hyperparameters, token: Token, sequence: Sequence) -> float:
    if settings.objective == "gspo":
        return math.exp(_mean([each.logprob - _old(settings, each) for each in sequence]))
    return math.exp(token.logprob - _old(settings, token))


def _old(settings: Hyperparameters, token: Token) -> float:
    return token.rollout if settings.ratio_policy == "rollout" else token.old


def _kl(estimator: str, token: Token) -> float:
    r = math.exp(token.ref) / math.exp(token.logprob)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r)}[estimator]


def _divergence(direction: str, teacher: list[tuple[float, float]]) -> float:
    if not teacher:
        return 0.0
    p = [math.exp(of_teacher) for of_teacher, _ in teacher]
    q = [math.exp(of_student) for _, of_student in teacher]
    p.append(1 - sum(p))
    q.append(1 - sum(q))
    over, other = (p, q) if direction == "forward" else (q, p)
    return sum(a * math.log(a / b) for a, b in zip(over, other, strict=True))
