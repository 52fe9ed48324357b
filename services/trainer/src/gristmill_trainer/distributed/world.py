"""The processes that train together: one, or as many as torchrun starts.

Rank 0 talks to everybody outside; the others get from it what they need. All ranks call the same methods here in the
same order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gristmill_trainer.errors import RankLostError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# The others wait for an order for as long as rank 0 waits for groups. One that dies is noticed all the same: its
# connections close.
_PATIENCE = timedelta(days=365)


@dataclass(frozen=True)
class World:
    """This process' place among `size` of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Place on its own machine; its GPU's number."""
    objects: dist.ProcessGroup | None = None
    """What `share` and `gather` go by, apart from the tensors: its waits may be long. None with one rank."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks to API and model server."""
        return self.rank == 0

    def share(self, value: T | None) -> T:
        """Rank 0's value, on every rank. It goes by pickle; the ranks trust each other. Raises RankLostError."""
        if self.size == 1:
            assert value is not None
            return value
        box: list[Any] = [value]
        with _noticing_losses(self):
            dist.broadcast_object_list(box, src=0, group=self.objects)
        found: T = box[0]
        return found

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank. Raises RankLostError."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _noticing_losses(self):
            dist.all_gather_object(found, value, group=self.objects)
        return found

    def close(self) -> None:
        """Leave."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(environ: Mapping[str, str], device: str) -> World:
    """The world that torchrun's variables tell of, joined; a world of one without them. `device`: "cpu" or "cuda"."""
    size = int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    # Tensors keep torch's time-outs: NCCL does not notice that a process on another machine is gone.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    objects = dist.new_group(backend="gloo", timeout=_PATIENCE)
    _LOG.info("rank %d of %d, process %d", rank, size, os.getpid())
    return World(rank, size, local_rank, objects)


@contextmanager
def _noticing_losses(world: World) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise RankLostError(
            "rank_lost",
            f"rank {world.rank} of {world.size} lost another process of this training, whose own last lines say why "
            f"({first_line}). Start all of them again; they go on from the last checkpoint",
            rank=world.rank,
            size=world.size,
        ) from error
