"""Exact comparison of the served tensors with the published ones, by one integer per tensor.

A model server of `gristmill_model` computes the sums on its device (`gristmill_model.worker`), in milliseconds on a
GPU. They show a change of any size in any dtype, which log-probabilities in bfloat16 do not. The sums are additive, so
tensors that vLLM joins (query, key and value; gate and up) are compared by the sums of their parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.servers import ModelServer

_PART: Final = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Elements at a time. A part on a CPU fits in its cache, and is too small for torch to share among threads."""
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_JOINED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""vLLM's names for tensors that it joins from several."""

Sums = Mapping[str, tuple[str, int]]
"""Dtype and sum of each tensor, by name."""


@dataclass(frozen=True)
class Comparison:
    """The tensors of a server that are published too."""

    equal: frozenset[str]
    """Names of the tensors that are bit for bit as published, except with a chance of about 2^-64."""
    other: frozenset[str]
    """Names of those that are not."""
    dtype: str = ""
    """Dtype of a tensor that is published in another dtype; empty if there is none."""


def weight_sum(tensor: torch.Tensor) -> int:
    """Returns the sum of 31 x^2 + x over the elements, modulo 2^64 and signed, with x the bits of an element as an
    integer. The same function is in gristmill_model.worker."""
    flat = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = _PART.get(flat.device.type, _PART["cuda"])
    for start in range(0, len(flat), size):
        part = flat[start : start + size].long()
        total += (31 * part * part + part).sum()
    return int(total)


class PublishedSums(dict[str, tuple[str, int]]):
    """The sums of published tensors, by their own names and by vLLM's names of joined tensors."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor, whose sum its device computes."""
        dtype, own = str(tensor.dtype).removeprefix("torch."), weight_sum(tensor)
        self[name] = (dtype, own)
        joined = ".".join(_JOINED.get(part, part) for part in name.split("."))
        if joined != name:
            self[joined] = (dtype, _wrapped(own + self.get(joined, (dtype, 0))[1]))


def served_sums(server: ModelServer) -> list[dict[str, tuple[str, int]]]:
    """Returns the sums of the server's tensors by each worker; an empty list if one does not compute them."""
    try:
        sums = server.weight_sums()
        return sums if all(sums) else []
    except PublishError as error:
        if error.code == "not_a_model_server" or error.values.get("status") is not None:
            return []
        raise


def compare(served: Sequence[Sums], published: Sums) -> Comparison:
    """Compares the sums of each worker of a server with the published ones. Tensors of another dtype only name it.

    With several workers, each has the whole tensor or a part of it. A difference then shows nothing, because a worker
    may also have a copy of another worker's part.
    """
    equal, other = set(), set()
    another = ""
    for name in served[0] if served else ():
        values = [worker[name] for worker in served if name in worker]
        if name not in published:
            continue
        if differ := [dtype for dtype, _ in values if dtype != published[name][0]]:
            another = differ[0]
            continue
        own, numbers = published[name][1], [number for _, number in values]
        if _wrapped(sum(numbers)) == own or set(numbers) == {own}:
            equal.add(name)
        elif len(served) == 1:
            other.add(name)
    return Comparison(frozenset(equal), frozenset(other), another)


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
