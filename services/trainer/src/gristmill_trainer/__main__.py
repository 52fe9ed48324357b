"""`python -m gristmill_trainer`."""

from __future__ import annotations

import logging
import os
import sys

from transformers.utils import logging as transformers_logging

from gristmill import GristmillError
from gristmill.logs import setup as set_up_logging
from gristmill_trainer.loop import train
from gristmill_trainer.setup import prepare
from gristmill_trainer.stop import StoppedError

_LOG = logging.getLogger("gristmill_trainer")


def main() -> int:
    """Exit code 0: the run is finished. 143: stopped on request. 1: an error, told in one line."""
    set_up_logging("trainer")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # two bars for every checkpoint
    try:
        with prepare(sys.argv[1:], dict(os.environ)) as training:
            train(training)
    except StoppedError as stopped:
        _LOG.info("%s", stopped)
        return 143
    except GristmillError as error:
        _LOG.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
