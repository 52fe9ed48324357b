"""`python -m gristmill_trainer`, or `torchrun ... -m gristmill_trainer` for several processes."""

from __future__ import annotations

from gristmill_trainer import openmp  # noqa: F401  The first import: see there.

# isort: split

import logging
import os
import sys

import torch
from transformers.utils import logging as transformers_logging

from gristmill import GristmillError
from gristmill.logs import setup as set_up_logging
from gristmill_trainer.build import LearnerPlan, build_crew
from gristmill_trainer.distributed.world import join
from gristmill_trainer.errors import FencedError
from gristmill_trainer.loop import train
from gristmill_trainer.setup import prepare
from gristmill_trainer.stop import StoppedError, leave_to_rank_0

_LOG = logging.getLogger("gristmill_trainer")


def main() -> int:
    """Runs the trainer and returns the exit code.

    0: the run is finished, or has another trainer. 143: stopped on request. 1: an error. The process exits with 70 if
    it makes no progress (gristmill.stall).
    """
    rank = os.environ.get("RANK", "0")
    set_up_logging("trainer" if rank == "0" else f"trainer/{rank}")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # two bars for every checkpoint
    world = join(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        if world.leads:
            with prepare(sys.argv[1:], dict(os.environ), world) as training:
                train(training)
        else:
            leave_to_rank_0()
            plan: LearnerPlan = world.share(None)
            build_crew(plan, world).follow()
    except StoppedError as stopped:
        _LOG.info("%s", stopped.report())
        return 143
    except FencedError as fenced:
        # Exit with 0, because a restart policy would let two trainers take the run from each other forever.
        _LOG.error("%s", fenced.report())
        return 0
    except GristmillError as error:
        for text in error.report().splitlines():
            _LOG.error("%s", text)
        return 1
    finally:
        world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
