"""Log-probabilities and entropies from hidden states, computed in chunks of rows: M x V logits never exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from gristmill_trainer.memory import CHUNK_BYTES

Entropy = Literal["none", "value", "gradient"]


class Scores(NamedTuple):
    """The policy's scores of M trained tokens. A named tuple, so that FSDP finds its tensors."""

    logprobs: torch.Tensor
    """float32[M]: log pi(target) at the sampling temperature."""
    entropy: torch.Tensor | None
    """float32[M]: entropy of the distribution that the target was drawn from, in nats; None if not requested."""
    student_logprobs: torch.Tensor | None
    """float32[M, K]: log-probabilities of the teacher's tokens; 0 for an id of -1. None without a teacher."""


def head_scores(
    states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    teacher_ids: torch.Tensor | None = None,
    *,
    entropy: Entropy = "none",
    chunk_bytes: int | None = None,
) -> Scores:
    """Returns scores of tokens under softmax(scale * states @ weight.T).

    `states` [M, D], `weight` [V, D], `targets` int64[M], `scale` float32[M] (1 / temperature, times the model's own
    logit scale), `teacher_ids` int64[M, K] with -1 for absent entries. The product uses autocast's dtype if autocast is
    on. Later operations use float32, or float64 if states are float64.

    The backward pass recomputes each chunk's logits, which costs one product and saves memory for M x V numbers.
    """
    device = states.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    plan = _Plan(entropy, chunk_bytes or CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]), product)
    return Scores(*_HeadScores.apply(states, weight, targets, scale, teacher_ids, plan))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Plan:
    entropy: Entropy
    chunk_bytes: int
    product: torch.dtype
    """Dtype of the product of states and weight."""

    @property
    def softmax(self) -> torch.dtype:
        return torch.promote_types(self.product, torch.float32)

    def rows(self, columns: int) -> int:
        """Returns the number of rows with `columns` numbers that fit in a chunk."""
        return max(1, self.chunk_bytes // (columns * self.softmax.itemsize))


class _HeadScores(torch.autograd.Function):
    """Autograd function of `head_scores`. With z = scale W h, p = softmax(z):

    d log p_t / dz = 1_t - p          dH / dz = -p (log p + H),    H = -sum p log p
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        teacher_ids: torch.Tensor | None,
        plan: _Plan,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        count = len(states)
        logprobs, normaliser = (states.new_empty(count, dtype=plan.softmax) for _ in range(2))
        entropy = None if plan.entropy == "none" else torch.empty_like(logprobs)
        student = None if teacher_ids is None else states.new_empty(teacher_ids.shape, dtype=plan.softmax)
        with torch.autocast(states.device.type, enabled=False):
            head = weight.to(plan.product).T
            rows = plan.rows(len(weight))
            for start in range(0, count, rows):
                part = slice(start, start + rows)
                logits = _logits(states[part], head, scale[part], plan)
                highest = logits.amax(dim=1)
                logits.sub_(highest[:, None])
                chosen = logits.gather(1, targets[part, None]).squeeze(1)
                teacher = None if teacher_ids is None else logits.gather(1, teacher_ids[part].clamp(min=0))
                # The log-probabilities need exp and its sum too, so the entropy costs one dot product per row.
                powers = logits.exp_() if entropy is None else logits.exp()
                total = powers.sum(dim=1)
                logs = total.log()
                if entropy is not None:
                    entropy[part] = logs - torch.linalg.vecdot(powers, logits) / total
                logprobs[part] = chosen - logs
                normaliser[part] = highest + logs
                if student is not None and teacher is not None and teacher_ids is not None:
                    student[part] = (teacher - logs[:, None]).masked_fill_(teacher_ids[part] < 0, 0.0)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if entropy is not None and plan.entropy == "value":
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(
            states, weight, targets, scale, teacher_ids, normaliser, entropy if plan.entropy == "gradient" else None
        )
        return logprobs, entropy, student

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        by_logprob: torch.Tensor | None,
        by_entropy: torch.Tensor | None,
        by_student: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        states, weight, targets, scale, teacher_ids, normaliser, entropy = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wants_states, wants_weight = ctx.needs_input_grad[:2]
        if by_logprob is None:
            by_logprob = torch.zeros_like(normaliser)
        if by_student is not None:
            by_student = by_student.masked_fill(teacher_ids < 0, 0.0)
        towards = by_logprob if by_student is None else by_logprob + by_student.sum(dim=1)
        states_grad = torch.empty_like(states) if wants_states else None
        # Chunks are summed in at least float32 for every dtype of the weight.
        exact = torch.promote_types(weight.dtype, plan.softmax)
        weight_grad = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        with torch.autocast(states.device.type, enabled=False):
            head = weight.to(plan.product)
            rows = plan.rows(len(weight))
            for start in range(0, len(states), rows):
                part = slice(start, start + rows)
                logits = _logits(states[part], head.T, scale[part], plan).sub_(normaliser[part, None])
                if entropy is None or by_entropy is None:
                    gradient = logits.exp_().mul_(-towards[part, None])
                else:
                    pull = logits.exp()
                    logits.add_(entropy[part, None]).mul_(by_entropy[part, None]).add_(towards[part, None])
                    gradient = logits.mul_(pull).neg_()
                gradient.scatter_add_(1, targets[part, None], by_logprob[part, None])
                if by_student is not None:
                    gradient.scatter_add_(1, teacher_ids[part].clamp(min=0), by_student[part])
                gradient = gradient.mul_(scale[part, None]).to(plan.product)
                if states_grad is not None:
                    states_grad[part] = gradient @ head
                if weight_grad is not None:
                    _add_product(weight_grad, gradient.T, states[part].to(plan.product), plan)
        return states_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None, None


def _logits(states: torch.Tensor, head: torch.Tensor, scale: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Returns softmax dtype[rows, V], a new tensor that the caller may modify."""
    return (states.to(plan.product) @ head).to(plan.softmax).mul_(scale[:, None])


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, plan: _Plan) -> None:
    """Computes into += left @ right without a temporary tensor of into's size."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
        return
    # Sums over chunks stay in into's dtype; only the product of one block is in left's dtype.
    rows = plan.rows(into.shape[1])
    for start in range(0, len(into), rows):
        into[start : start + rows] += left[start : start + rows] @ right
