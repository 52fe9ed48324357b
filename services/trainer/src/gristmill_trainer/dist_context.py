"""The processes of one training: a single process, or the processes (ranks) that torchrun starts.

Every rank runs the same code and calls the same methods in the same order. Rank 0 alone communicates with other
services and writes files, in `on_main`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gristmill import ApiError, ErrorCode
from gristmill_trainer.errors import FencedError, RankLostError
from gristmill_trainer.stop import StoppedError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# The other ranks wait while rank 0 waits for groups. A dead process is noticed by its closed connections.
_PATIENCE = timedelta(days=365)


@dataclass
class DistContext:
    """The rank of this process among `size` processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank on this machine, and the number of its GPU."""
    objects: dist.ProcessGroup | None = None
    """Process group for Python objects, separate from the tensors because of long waits. None with one rank."""
    _ending: bool = field(default=False, init=False)
    """Whether every rank has raised the same orderly end."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which calls the API and the model servers."""
        return self.rank == 0

    def on_main(self, call: Callable[[], T]) -> T:
        """Returns the result of `call` on every rank, although only rank 0 executes it. `call` may not use the ranks.

        An orderly end (`is_orderly_end`) that `call` raises is raised on every rank. Any other error, as of a full
        disk, is raised only on rank 0. The other ranks then wait here until rank 0 ends, and raise RankLostError. In a
        collective of tensors, NCCL would not notice that rank 0 has ended.
        """
        if self.size == 1:
            return call()
        outcome: tuple[T | None, Exception | None] = (None, None)
        if self.is_main:
            try:
                outcome = (call(), None)
            except Exception as error:
                if not is_orderly_end(error):
                    self._ending = False
                    raise
                outcome = (None, error)
        box: list[Any] = [outcome]
        with _noticing_losses(self):  # Uses pickle, because ranks trust each other (docs/security.md).
            dist.broadcast_object_list(box, src=0, group=self.objects)
        value, end = box[0]
        if end is not None:
            self._ending = True
            raise end
        result: T = value
        return result

    @contextmanager
    def leaving_together(self) -> Iterator[None]:
        """Lets rank 0 leave the block first, unless an error ends a rank.

        torchrun kills all processes as soon as one of them has ended with an exit code above 0, and rank 0 has files
        and connections to close.
        """
        try:
            yield
        except Exception as error:
            if self._ending and is_orderly_end(error):
                self.on_main(lambda: None)
            raise
        self.on_main(lambda: None)

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value on every rank, in the order of ranks. Raises RankLostError."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _noticing_losses(self):
            dist.all_gather_object(values, value, group=self.objects)
        return values

    def raise_if_lost(self, error: Exception) -> None:
        """Raises RankLostError if `error` is of a collective of tensors: gloo's errors have no class of their own."""
        if isinstance(error, dist.DistError) or (self.size > 1 and "gloo" in str(error)):
            raise self.lost(error) from error

    def lost(self, error: Exception) -> RankLostError:
        """Returns the error of a rank whose collective failed with `error`."""
        first_line = str(error).partition("\n")[0]
        return RankLostError(
            "rank_lost",
            f"rank {self.rank} of {self.size} lost another process of this training, whose own last lines say "
            f"why ({first_line}). Start all of them again; they continue from the last checkpoint",
            rank=self.rank,
            size=self.size,
        )

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def is_orderly_end(error: Exception) -> bool:
    """Whether the error ends a training on request: a stop request, another trainer of the run, a suspended run."""
    if isinstance(error, ApiError):
        return error.code == ErrorCode.SUSPENDED
    return isinstance(error, StoppedError | FencedError)


def join(environ: Mapping[str, str], device: str) -> DistContext:
    """Joins the process group of torchrun's variables; without them returns a context with one rank.

    `device`: "cpu" or "cuda". Ranks of one machine exchange objects over its loopback interface, because objects are
    pickles, which run the sender's code. GLOO_SOCKET_IFNAME names another interface.
    """
    size = int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return DistContext()
    rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if environ.get("LOCAL_WORLD_SIZE") == str(size) and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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
        raise context.lost(error) from error
