"""Log-probabilities and entropies from hidden states, computed in chunks of rows: M x V logits never exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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
    compiled: bool = False,
) -> Scores:
    """Returns scores of tokens under softmax(scale * states @ weight.T).

    `states` [M, D], `weight` [V, D], `targets` int64[M], `scale` float32[M] (1 / temperature, times the model's own
    logit scale), `teacher_ids` int64[M, K] with -1 for absent entries. The product takes its factors in autocast's
    dtype if autocast is on. Later operations use float32, or float64 if states are float64. On CUDA the logits are
    never rounded to 16 bits. `compiled`: fuse the operations of a chunk with torch.compile.

    The backward pass recomputes each chunk's logits, which costs one product and saves memory for M x V numbers.
    """
    device = states.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    plan = _Plan(entropy, chunk_bytes or CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]), product, compiled)
    return Scores(*_HeadScores.apply(states, weight, targets, scale, teacher_ids, plan))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Plan:
    entropy: Entropy
    chunk_bytes: int
    product: torch.dtype
    """Dtype of the factors of the product of states and weight."""
    compiled: bool

    @property
    def softmax(self) -> torch.dtype:
        return torch.promote_types(self.product, torch.float32)

    def rows(self, columns: int) -> int:
        """Returns the number of rows with `columns` numbers that fit in a chunk."""
        return max(1, self.chunk_bytes // (columns * self.softmax.itemsize))

    def run(self, body: Callable[..., Any], *inputs: Any) -> Any:
        """Calls `body`, compiled once for all numbers of rows if the plan says so."""
        return (_compiled(body) if self.compiled else body)(*inputs, product=self.product, softmax=self.softmax)


@cache
def _compiled(body: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(body, dynamic=True)


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
                teacher = None if teacher_ids is None else teacher_ids[part]
                logprobs[part], normaliser[part], entropies, students = plan.run(
                    _chunk_scores, states[part], head, targets[part], scale[part], teacher, entropy is not None
                )
                if entropy is not None:
                    entropy[part] = entropies
                if student is not None:
                    student[part] = students
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
        if entropy is None or by_entropy is None:
            entropy = by_entropy = None
        states_grad = torch.empty_like(states) if wants_states else None
        # Chunks are summed in at least float32 for every dtype of the weight.
        exact = torch.promote_types(weight.dtype, plan.softmax)
        weight_grad = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        of_rows = (targets, scale, normaliser, by_logprob, entropy, by_entropy, teacher_ids, by_student)
        with torch.autocast(states.device.type, enabled=False):
            head = weight.to(plan.product)
            rows = plan.rows(len(weight))
            for start in range(0, len(states), rows):
                part = slice(start, start + rows)
                parts = (None if tensor is None else tensor[part] for tensor in of_rows)
                gradient = plan.run(_chunk_gradient, states[part], head.T, *parts)
                if states_grad is not None:
                    states_grad[part] = gradient @ head
                if weight_grad is not None:
                    _add_product(weight_grad, gradient.T, states[part].to(plan.product), plan)
        return states_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None, None


def _chunk_scores(
    states: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    teacher_ids: torch.Tensor | None,
    wants_entropy: bool,
    *,
    product: torch.dtype,
    softmax: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns log-probabilities, normalisers, entropies and the teacher's tokens' log-probabilities of a chunk's rows.

    `head`: product dtype[D, V].
    """
    logits = _logits(states, head, scale, product, softmax)
    highest = logits.amax(dim=1)
    logits.sub_(highest[:, None])
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    teacher = None if teacher_ids is None else logits.gather(1, teacher_ids.clamp(min=0))
    # The log-probabilities need exp and its sum too, so the entropy costs one dot product per row.
    powers = logits.exp() if wants_entropy else logits.exp_()
    total = powers.sum(dim=1)
    logs = total.log()
    entropy = logs - torch.linalg.vecdot(powers, logits) / total if wants_entropy else None
    student = None
    if teacher is not None and teacher_ids is not None:
        student = (teacher - logs[:, None]).masked_fill_(teacher_ids < 0, 0.0)
    return chosen - logs, highest + logs, entropy, student


def _chunk_gradient(
    states: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    normaliser: torch.Tensor,
    by_logprob: torch.Tensor,
    entropy: torch.Tensor | None,
    by_entropy: torch.Tensor | None,
    teacher_ids: torch.Tensor | None,
    by_student: torch.Tensor | None,
    *,
    product: torch.dtype,
    softmax: torch.dtype,
) -> torch.Tensor:
    """Returns product dtype[rows, V]: the gradient of the loss by a chunk's product of states and weight."""
    logits = _logits(states, head, scale, product, softmax).sub_(normaliser[:, None])
    towards = by_logprob if by_student is None else by_logprob + by_student.sum(dim=1)
    if entropy is None or by_entropy is None:
        gradient = logits.exp_().mul_(-towards[:, None])
    else:
        pull = logits.exp()
        logits.add_(entropy[:, None]).mul_(by_entropy[:, None]).add_(towards[:, None])
        gradient = logits.mul_(pull).neg_()
    if torch.compiler.is_compiling():  # This is fused into the pass above. A scatter would be another pass.
        columns = torch.arange(head.shape[1], device=head.device)
        gradient = gradient + by_logprob[:, None] * (columns == targets[:, None])
    else:
        gradient.scatter_add_(1, targets[:, None], by_logprob[:, None])
    if by_student is not None and teacher_ids is not None:
        gradient = gradient.scatter_add(1, teacher_ids.clamp(min=0), by_student)
    return gradient.mul_(scale[:, None]).to(product)


def _logits(
    states: torch.Tensor, head: torch.Tensor, scale: torch.Tensor, product: torch.dtype, softmax: torch.dtype
) -> torch.Tensor:
    """Returns softmax dtype[rows, V], a new tensor that the caller may modify."""
    states = states.to(product)
    if states.is_cuda and product != softmax:
        return torch.mm(states, head, out_dtype=softmax).mul_(scale[:, None])
    return (states @ head).to(softmax).mul_(scale[:, None])


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, plan: _Plan) -> None:
    """Computes into += left @ right without a temporary tensor of into's size."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
        return
    if into.is_cuda:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
        return
    # Sums over chunks stay in into's dtype; only the product of one block is in left's dtype.
    rows = plan.rows(into.shape[1])
    for start in range(0, len(into), rows):
        into[start : start + rows] += left[start : start + rows] @ right
