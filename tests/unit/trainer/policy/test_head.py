"""The chunked head: the same numbers and gradients as with all logits at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill_trainer.policy.head import Entropy, Scores, head_scores

DIM, VOCABULARY, TEACHER = 8, 23, 3


def test_chunked_head_sums_bfloat16_gradients_without_rounding_each_chunk() -> None:
    """As FSDP passes it on a GPU."""
    states, weight, targets, scale, _ = inputs(600, 3, torch.float32)
    low = weight.detach().to(torch.bfloat16).requires_grad_()
    given = states.detach().to(torch.bfloat16)

    def gradient(chunk_rows: int) -> torch.Tensor:
        scores = head_scores(given, low, targets, scale, chunk_bytes=chunk_rows * VOCABULARY * 4)
        (found,) = torch.autograd.grad(scores.logprobs.sum(), [low])
        return found.double()

    whole, chunks = gradient(600), gradient(1)
    assert float((chunks - whole).norm() / whole.norm()) <= 0.003


def plain(
    states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, teacher: torch.Tensor
) -> Scores:
    """Returns the scores by autograd, from all logits."""
    logprobs = (states @ weight.T * scale[:, None]).log_softmax(dim=1)
    student = logprobs.gather(1, teacher.clamp(min=0)).masked_fill(teacher < 0, 0.0)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1)
    return Scores(logprobs.gather(1, targets[:, None]).squeeze(1), entropy, student)


def inputs(rows: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, DIM, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (rows,), generator=generator)
    scale = 0.3 + 2 * torch.rand(rows, generator=generator, dtype=dtype)
    teacher = torch.randint(-1, VOCABULARY, (rows, TEACHER), generator=generator)
    return states, weight, targets, scale, teacher


def gradients(scores: Scores, states: torch.Tensor, weight: torch.Tensor, entropy: bool) -> list[torch.Tensor]:
    assert scores.entropy is not None
    assert scores.student_logprobs is not None
    generator = torch.Generator().manual_seed(5)
    total = states.new_zeros(())
    for values in (scores.logprobs, scores.student_logprobs, *([scores.entropy] if entropy else [])):
        total = total + (values * torch.randn(values.shape, generator=generator, dtype=values.dtype)).sum()
    return list(torch.autograd.grad(total, [states, weight]))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    chunk_rows=st.integers(1, 10),
    seed=st.integers(0, 99),
    wide=st.booleans(),
    mode=st.sampled_from(["value", "gradient"]),
)
def test_chunked_head_matches_all_logits_at_once(
    rows: int, chunk_rows: int, seed: int, wide: bool, mode: Entropy
) -> None:
    dtype, tolerance = (torch.float64, 1e-12) if wide else (torch.float32, 2e-5)
    states, weight, targets, scale, teacher = inputs(rows, seed, dtype)
    chunk_bytes = chunk_rows * VOCABULARY * dtype.itemsize
    ours = head_scores(states, weight, targets, scale, teacher, entropy=mode, chunk_bytes=chunk_bytes)
    theirs = plain(states, weight, targets, scale, teacher)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    with_entropy = mode == "gradient"
    for mine, other in zip(
        gradients(ours, states, weight, with_entropy), gradients(theirs, states, weight, with_entropy), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.long  # it compiles C++ for half a minute
def test_compiled_chunks_have_the_same_scores_and_gradients() -> None:
    for rows in (9, 14):  # chunks of 4 rows, and a last chunk that is smaller
        states, weight, targets, scale, teacher = inputs(rows, 1, torch.float32)
        ours, theirs = (
            head_scores(
                states, weight, targets, scale, teacher, entropy="gradient", chunk_bytes=16 * VOCABULARY, compiled=which
            )
            for which in (True, False)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for mine, other in zip(
            *(gradients(scores, states, weight, entropy=True) for scores in (ours, theirs)), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_chunked_head_entropy_as_a_value_has_no_gradient() -> None:
    states, weight, targets, scale, _ = inputs(4, 0, torch.float32)
    scores = head_scores(states, weight, targets, scale, entropy="value")
    assert scores.entropy is not None
    assert scores.logprobs.requires_grad
    assert not scores.entropy.requires_grad
    assert head_scores(states, weight, targets, scale).entropy is None


def test_frozen_head_gets_no_gradient_and_the_states_do() -> None:
    states, weight, targets, scale, _ = inputs(4, 0, torch.float32)
    torch.autograd.backward([head_scores(states, weight.detach(), targets, scale).logprobs.sum()])
    assert states.grad is not None


def test_chunked_head_with_large_logits_does_not_overflow() -> None:
    states = torch.tensor([[1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.999], [-1.0]])
    scores = head_scores(states, weight, torch.tensor([1]), torch.ones(1), entropy="gradient")
    torch.testing.assert_close(scores.logprobs, torch.tensor([-1.3132617]))
    torch.autograd.backward([scores.logprobs.sum()])
    torch.testing.assert_close(states.grad, torch.tensor([[-0.001 * 0.7310586]]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk_rows", [1, 3, 64])
def test_under_autocast_only_the_products_are_in_bfloat16(chunk_rows: int) -> None:
    states, weight, targets, scale, teacher = inputs(9, 3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = head_scores(
            states, weight, targets, scale, teacher, entropy="gradient", chunk_bytes=chunk_rows * VOCABULARY * 4
        )
    logits = (states.bfloat16() @ weight.bfloat16().T).float() * scale[:, None]
    wanted = logits.log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
    assert ours.logprobs.dtype == torch.float32
    torch.testing.assert_close(ours.logprobs, wanted, rtol=1e-6, atol=1e-6)
    theirs = gradients(plain(states, weight, targets, scale, teacher), states, weight, entropy=True)
    for mine, other in zip(gradients(ours, states, weight, entropy=True), theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.15)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation, also in the backward pass, for the largest number of elements in a result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


def test_chunked_head_never_stores_all_logits() -> None:
    rows, chunk_rows = 2000, 16
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, DIM, generator=generator, requires_grad=True)
    weight = torch.randn(900, DIM, generator=generator, requires_grad=True)
    targets = torch.randint(900, (rows,), generator=generator)
    with LargestTensor() as largest:
        scores = head_scores(
            states, weight, targets, torch.ones(rows), entropy="gradient", chunk_bytes=chunk_rows * 900 * 4
        )
        assert scores.entropy is not None
        torch.autograd.backward([scores.logprobs.sum() + scores.entropy.sum()])
    # The states themselves are the largest: 16000 numbers against 1.8 million logits.
    assert largest.numbers == states.numel()
    with LargestTensor() as largest:
        (states @ weight.T).log_softmax(dim=1)
    assert largest.numbers == rows * 900
