"""A ragged batch, in the form that each backend needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gristmill_trainer.data.types import F32, I32, Sample


@dataclass(frozen=True)
class Load:
    """The size of a step's batch. Lengths are lognormal."""

    sequences: int
    micro_batch: int
    """Number of sequences that go through the model at once."""
    tokens: int
    """Tokens of all prompts and completions together, without padding."""
    spread: float = 0.6
    """Standard deviation of a length's logarithm."""
    group: int = 8
    """Completions per prompt."""
    prompt_share: float = 0.25
    """Median length of a prompt, as a multiple of a completion's median length."""


@dataclass(frozen=True, eq=False)
class Sequence:
    group_id: str
    prompt: I32
    completion: I32
    advantage: float
    old_logprobs: F32
    """f32[completion]: log pi_old."""


def make(load: Load, vocabulary: int, seed: int = 0) -> list[Sequence]:
    """Returns the same batch at each call. The sequences of a group have one prompt.

    The old log-probabilities scatter around the log-probabilities of an untrained policy, so that the objective clips
    only some ratios.
    """
    rng = np.random.default_rng(seed)
    groups = -(-load.sequences // load.group)
    prompts = np.repeat(rng.lognormal(np.log(load.prompt_share), load.spread, groups), load.group)[: load.sequences]
    completions = rng.lognormal(0.0, load.spread, load.sequences)
    scale = load.tokens / (prompts.sum() + completions.sum())
    prompt_lengths = np.maximum(1, np.rint(prompts * scale)).astype(int)
    lengths = np.maximum(1, np.rint(completions * scale)).astype(int)
    # Corrects the rounding error in the longest completion, on which the correction has the least effect.
    lengths[lengths.argmax()] += load.tokens - int(prompt_lengths.sum() + lengths.sum())
    made: list[Sequence] = []
    for number, (before, length) in enumerate(zip(prompt_lengths, lengths, strict=True)):
        first = number % load.group == 0
        made.append(
            Sequence(
                group_id=f"g{number // load.group:04}",
                prompt=rng.integers(0, vocabulary, before, dtype=np.int32) if first else made[-1].prompt,
                completion=rng.integers(0, vocabulary, length, dtype=np.int32),
                advantage=float(rng.normal()),
                old_logprobs=rng.normal(-np.log(vocabulary), 0.2, length).clip(max=0).astype(np.float32),
            )
        )
    return made


def lengths(batch: list[Sequence]) -> list[int]:
    """Returns the number of tokens of each sequence."""
    return [len(one.prompt) + len(one.completion) for one in batch]


def trained_tokens(batch: list[Sequence]) -> int:
    return sum(len(one.completion) for one in batch)


def real_share(batch: list[Sequence]) -> float:
    """Returns tokens / places if every sequence is padded to the longest prompt and the longest completion."""
    places = max(len(one.prompt) for one in batch) + max(len(one.completion) for one in batch)
    return sum(lengths(batch)) / (places * len(batch))


def samples(batch: list[Sequence]) -> list[Sample]:
    """Returns the batch in the form of Gristmill's learner."""
    made = []
    for one in batch:
        before = np.zeros(len(one.prompt), np.float32)
        old = np.concatenate([before, one.old_logprobs])
        made.append(
            Sample(
                group_id=one.group_id,
                tokens=np.concatenate([one.prompt, one.completion]),
                trained=np.arange(len(old)) >= len(before),
                rollout_logprobs=old,
                advantages=np.full(len(old), one.advantage, np.float32),
                temperature=1.0,
                old_logprobs=old,
            )
        )
    return made


def padded(batch: list[Sequence], pad: int) -> dict[str, torch.Tensor]:
    """Returns the batch as TRL pads a generation batch.

    Prompts are padded on the left and completions on the right, to the longest of the whole batch.
    """
    width = max(len(one.prompt) for one in batch)
    length = max(len(one.completion) for one in batch)
    made = {
        "prompt_ids": torch.full((len(batch), width), pad),
        "prompt_mask": torch.zeros(len(batch), width, dtype=torch.long),
        "completion_ids": torch.full((len(batch), length), pad),
        "completion_mask": torch.zeros(len(batch), length, dtype=torch.long),
        "old_per_token_logps": torch.zeros(len(batch), length),
    }
    for row, one in enumerate(batch):
        made["prompt_ids"][row, width - len(one.prompt) :] = torch.from_numpy(one.prompt)
        made["prompt_mask"][row, width - len(one.prompt) :] = 1
        made["completion_ids"][row, : len(one.completion)] = torch.from_numpy(one.completion)
        made["completion_mask"][row, : len(one.completion)] = 1
        made["old_per_token_logps"][row, : len(one.completion)] = torch.from_numpy(one.old_logprobs)
    made["advantages"] = torch.tensor([one.advantage for one in batch])
    return made
