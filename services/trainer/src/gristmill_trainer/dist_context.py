"""The processes of one training: a single process, or the processes that torchrun starts.

Only rank 0 communicates with other services, and sends the other ranks their inputs. All ranks call the same methods
here in the same order.
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
# The other ranks wait for an order while rank 0 waits for groups. A dead process is noticed by its closed connections.
_PATIENCE = timedelta(days=365)


@dataclass(frozen=True)
class DistContext:
    """The rank of this process among `size` processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank on this machine, and the number of its GPU."""
    objects: dist.ProcessGroup | None = None
    """Process group of `share` and `gather`, separate from the tensors because of long waits. None with one rank."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which calls the API and the model servers."""
        return self.rank == 0

    def broadcast(self, value: T | None) -> T:
        """Returns rank 0's value on every rank. Uses pickle, because ranks trust each other. Raises RankLostError."""
        if self.size == 1:
            assert value is not None
            return value
        box: list[Any] = [value]
        with _noticing_losses(self):
            dist.broadcast_object_list(box, src=0, group=self.objects)
        found: T = box[0]
        return found

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value on every rank, in the order of ranks. Raises RankLostError."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _noticing_losses(self):
            dist.all_gather_object(found, value, group=self.objects)
        return found

    def close(self) -> None:
        """Leaves the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(environ: Mapping[str, str], device: str) -> DistContext:
    """Joins the process group of torchrun's variables; without them returns a context with one rank.

    `device`: "cpu" or "cuda".
    """
    size = int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return DistContext()
    rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    # Tensors keep torch's time-outs, because NCCL does not notice a lost process on another machine.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    objects = dist.new_group(backend="gloo", timeout=_PATIENCE)
    _LOG.info("rank %d of %d, process %d", rank, size, os.getpid())
    return DistContext(rank, size, local_rank, objects)


@contextmanager
def _noticing_losses(context: DistContext) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise RankLostError(
            "rank_lost",
            f"rank {context.rank} of {context.size} lost another process of this training, whose own last lines say "
            f"why ({first_line}). Start all of them again; they continue from the last checkpoint",
            rank=context.rank,
            size=context.size,
        ) from error
