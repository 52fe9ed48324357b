"""The processes that train together: one, or as many as torchrun starts.

Rank 0 talks to everybody outside; the others get from it what they need. All ranks call the same methods here in the
same order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# The others wait in a collective for as long as rank 0 waits for groups. One that dies ends them all at once, by its
# closed connections and by torchrun.
_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class World:
    """This process' place among `size` of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Place on its own machine; its GPU's number."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks to API and model server."""
        return self.rank == 0

    def share(self, value: T | None) -> T:
        """Rank 0's value, on every rank. It goes by pickle; the ranks trust each other."""
        if self.size == 1:
            assert value is not None
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        found: T = box[0]
        return found

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(environ: Mapping[str, str], device: str) -> World:
    """The world that torchrun's variables tell of, joined; a world of one without them. `device`: "cpu" or "cuda"."""
    size = int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    world = World(int(environ["RANK"]), size, int(environ["LOCAL_RANK"]))
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    # Objects go by gloo, tensors of the GPU by NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
    _LOG.info("rank %d of %d, process %d", world.rank, world.size, os.getpid())
    return world
