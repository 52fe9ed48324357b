"""A micro-batch contains exactly the data of its samples."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill_trainer.data.micro_batches import collate, dummy
from gristmill_trainer.data.types import MicroBatch, Sample, Teacher

CPU = torch.device("cpu")


def make_sample(rng: np.random.Generator, length: int, teacher: int = 0) -> Sample:
    """`teacher`: K."""
    trained = rng.random(length) < 0.6
    trained[0] = False

    def floats() -> npt.NDArray[np.float32]:
        return rng.normal(size=length).astype(np.float32)

    return Sample(
        group_id="g",
        tokens=rng.integers(0, 100, length, dtype=np.int32),
        trained=trained,
        rollout_logprobs=np.where(trained, floats(), np.float32(0)),
        advantages=floats(),
        temperature=float(rng.choice([0.5, 1.0])),
        old_logprobs=floats(),
        ref_logprobs=floats(),
        teacher=Teacher(
            rng.integers(0, 100, (length, teacher), dtype=np.int32),
            rng.normal(size=(length, teacher)).astype(np.float32),
        )
        if teacher
        else None,
    )


def sequences(micro: MicroBatch) -> list[npt.NDArray[np.int64]]:
    """Returns the token sequences, read from the layout alone."""
    layout = micro.layout
    if layout.starts is not None:
        row = layout.tokens[0].numpy()
        starts = layout.starts.tolist()
        return [row[start:end] for start, end in itertools.pairwise(starts)]
    assert layout.attention is not None
    return [row[there.bool()].numpy() for row, there in zip(layout.tokens, layout.attention, strict=True)]


@pytest.mark.parametrize("packing", [True, False])
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=6), widths=st.lists(st.integers(0, 3), min_size=6),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_micro_batch_contains_its_samples(packing: bool, lengths: list[int], widths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [make_sample(rng, length, width) for length, width in zip(lengths, widths, strict=False)]
    weights = rng.random(len(samples))
    index = rng.permutation(len(samples))[: rng.integers(1, len(samples) + 1)].tolist()
    micro = collate(samples, index, weights, packing=packing, device=CPU)
    assert micro.index == tuple(index)
    assert micro.sequences == len(index)
    assert micro.tokens == sum(lengths[place] for place in index)
    assert micro.layout.longest == max(lengths[place] for place in index)
    for place, found in zip(index, sequences(micro), strict=True):
        np.testing.assert_array_equal(found, samples[place].tokens)

    flat_tokens, flat_positions = micro.layout.tokens.reshape(-1), micro.layout.positions.reshape(-1)
    for number, place in enumerate(index):
        sample, own = samples[place], micro.sequence == number
        trained = np.flatnonzero(sample.trained)
        np.testing.assert_array_equal(micro.targets[own], sample.tokens[trained])
        # The logits that predict a token are the logits of its predecessor, in the same sequence.
        np.testing.assert_array_equal(flat_tokens[micro.sources[own]], sample.tokens[trained - 1])
        np.testing.assert_array_equal(flat_positions[micro.sources[own]], trained - 1)
        np.testing.assert_array_equal(micro.rollout_logprobs[own], sample.rollout_logprobs[trained])
        np.testing.assert_array_equal(micro.advantages[own], sample.advantages[trained])
        np.testing.assert_array_equal(micro.temperatures[own], np.full(len(trained), sample.temperature))
        np.testing.assert_array_equal(micro.weights[own], np.full(len(trained), np.float32(weights[place])))
        assert micro.old_logprobs is not None
        assert micro.ref_logprobs is not None
        assert sample.old_logprobs is not None
        assert sample.ref_logprobs is not None
        np.testing.assert_array_equal(micro.old_logprobs[own], sample.old_logprobs[trained])
        np.testing.assert_array_equal(micro.ref_logprobs[own], sample.ref_logprobs[trained])
        _same_teacher(micro, own, sample, trained)


def _same_teacher(micro: MicroBatch, own: torch.Tensor, sample: Sample, trained: npt.NDArray[np.int64]) -> None:
    if micro.teacher_ids is None or micro.teacher_logprobs is None:
        assert sample.teacher is None
        return
    width = 0 if sample.teacher is None else sample.teacher.ids.shape[1]
    assert (micro.teacher_ids[own][:, width:] == -1).all()
    if sample.teacher is not None:
        np.testing.assert_array_equal(micro.teacher_ids[own][:, :width], sample.teacher.ids[trained])
        np.testing.assert_array_equal(micro.teacher_logprobs[own][:, :width], sample.teacher.logprobs[trained])


@pytest.mark.parametrize("packing", [True, False])
def test_micro_batch_dtypes_match_the_type(packing: bool) -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 6, 2), make_sample(rng, 4, 2)]
    micro = collate(samples, (0, 1), np.ones(2), packing=packing, device=CPU)
    for name in ("sources", "targets", "sequence", "teacher_ids"):
        assert getattr(micro, name).dtype == torch.int64, name
    for name in ("rollout_logprobs", "advantages", "temperatures", "weights", "old_logprobs", "teacher_logprobs"):
        assert getattr(micro, name).dtype == torch.float32, name
    layout = micro.layout
    assert layout.tokens.dtype == layout.positions.dtype == torch.int64
    assert layout.tokens.shape == layout.positions.shape == ((1, 10) if packing else (2, 6))
    if packing:
        assert layout.starts is not None
        assert layout.starts.dtype == torch.int32
        assert layout.starts.tolist() == [0, 6, 10]
        assert layout.attention is None


def test_micro_batch_omits_logprobs_that_one_sequence_lacks() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 5), replace(make_sample(rng, 5), ref_logprobs=None)]
    both = collate(samples, (0, 1), np.ones(2), packing=True, device=CPU)
    assert both.ref_logprobs is None
    assert both.old_logprobs is not None
    assert collate(samples, (0,), np.ones(2), packing=True, device=CPU).ref_logprobs is not None


def test_sequences_without_trained_tokens_can_be_collated() -> None:
    sample = make_sample(np.random.default_rng(0), 5)
    sample = replace(sample, trained=np.zeros(5, np.bool_))
    micro = collate([sample], (0,), np.ones(1), packing=True, device=CPU)
    assert micro.sequences == 1
    assert len(micro.targets) == len(micro.sources) == 0


@pytest.mark.parametrize("packing", [True, False])
def test_dummy_micro_batch_has_no_weight_and_no_sample(packing: bool) -> None:
    micro = dummy(CPU, packing=packing)
    assert micro.index == ()
    assert micro.sequences == 1
    assert micro.tokens == 2
    assert micro.weights.tolist() == [0.0]
    assert (micro.layout.starts is None) is not packing
