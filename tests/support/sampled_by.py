"""Compares recorded log-probabilities of completions with those under the weights that are recorded as their
sampler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from gristmill import PolicyVersion, TrajectoryGroup


def furthest_from_its_weights(
    groups: Iterable[TrajectoryGroup], weights: Callable[[PolicyVersion], Path]
) -> dict[PolicyVersion, float]:
    """Returns by version the largest |recorded log-probability - log-probability under the version's weights|, in nats.

    `weights`: the model folder of a version. The trainer's rollout_logprob_diff compares with the weights in training,
    which optimizer steps since the sampling have changed. This difference is only rounding, whatever the staleness.
    Sequences during which the weights changed are left out, because their later tokens saw keys and values of the older
    weights.
    """
    sampled: dict[PolicyVersion, list[tuple[TrajectoryGroup, slice]]] = defaultdict(list)
    for group in groups:
        ends = np.cumsum(group.lengths)
        for start, end, spans in zip(ends - group.lengths, ends, group.versions, strict=True):
            if len(spans) == 1:
                sampled[PolicyVersion.parse(spans[0].version)].append((group, slice(start, end)))
    furthest = {}
    for version, sequences in sorted(sampled.items()):
        model = AutoModelForCausalLM.from_pretrained(weights(version))
        furthest[version] = max(_apart(model, group, place) for group, place in sequences)
    return furthest


def _apart(model: torch.nn.Module, group: TrajectoryGroup, place: slice) -> float:
    tokens = torch.from_numpy(group.tokens[place]).long()
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].double() / group.sampling.temperature
    given: npt.NDArray[np.float64] = (
        torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None]).squeeze(1).numpy()
    )
    mask = group.mask[place][1:]
    return float(np.abs(group.logprobs[place][1:] - given)[mask].max(initial=0.0))
