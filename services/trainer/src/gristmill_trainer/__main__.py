"""`python -m gristmill_trainer`, or `torchrun ... -m gristmill_trainer` for several processes."""

from __future__ import annotations

import logging
import os
import sys

# torch's OpenMP reads this variable when it is loaded. By default, a waiting thread spins. With max_staleness > 0,
# trainer and model server may compute at the same time on the cores of one machine, and a spinning thread uses a core
# that the other process needs. On two cores, a quickstart run with `OMP_WAIT_POLICY=ACTIVE make bench
# ARGS="learning staleness"` took more than twice as long as without the variable.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# isort: split

from gristmill import Deployment, GristmillError
from gristmill.errors import FileError
from gristmill.internal.logs import setup as set_up_logging
from gristmill.internal.signals import stop_on_hangup
from gristmill_trainer.errors import FencedError
from gristmill_trainer.settings import read_flags, read_settings

_LOG = logging.getLogger("gristmill_trainer")


def main() -> int:
    """Runs one rank of the trainer and returns the exit code.

    0: the run is finished, or has another trainer. 143: stopped on request. 1: an error. The process exits with 70 if
    it makes no progress (gristmill.internal.stall).
    """
    rank = os.environ.get("RANK", "0")
    stop_on_hangup()
    set_up_logging("trainer" if rank == "0" else f"trainer/{rank}")
    try:
        # `start` reads the flags again, after imports that take seconds.
        flags = read_flags(sys.argv[1:])
        read_settings(Deployment.read(os.environ).config_dir, {}, flags, "command line")
    except (GristmillError, OSError) as error:
        return _failed(error)
    return _train()


def _train() -> int:
    import torch
    from transformers.utils import logging as transformers_logging

    from gristmill_trainer.dist_context import join
    from gristmill_trainer.loop import train
    from gristmill_trainer.startup import start
    from gristmill_trainer.stop import StoppedError

    transformers_logging.disable_progress_bar()  # two bars for every checkpoint
    dist = join(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        with start(sys.argv[1:], dict(os.environ), dist) as training:
            train(training)
    except StoppedError as stopped:
        _LOG.info("%s", stopped.report())
        return 143
    except FencedError as fenced:
        # Exit with 0, because a restart policy would let two trainers take the run from each other forever.
        _LOG.error("%s", fenced.report())
        return 0
    except (GristmillError, OSError) as error:
        return _failed(error)
    finally:
        dist.close()
    return 0


def _failed(error: GristmillError | OSError) -> int:
    reported = FileError.of(error) if isinstance(error, OSError) else error
    for text in reported.report().splitlines():
        _LOG.error("%s", text)
    return 1


if __name__ == "__main__":
    sys.exit(main())
