"""The process that torchrun starts: `python -m torch.distributed.run ... -m tests.unit.trainer.distributed.worker WHAT
FOLDER`.

WHAT is `train`, for the jobs pickled in FOLDER/jobsRANK, or a way for rank 0 to die while the other rank waits for it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

from tests.unit.trainer.distributed.training import Job, run, samples

from gristmill.internal.logs import setup
from gristmill_trainer.dist_context import DistContext, join
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.learner_factory import build_learner
from gristmill_trainer.stop import leave_to_rank_0


def main(what: str, folder: Path) -> int:
    """Returns the exit code, as in the trainer."""
    setup(f"rank{os.environ['RANK']}")
    dist = join(os.environ, "cpu")
    jobs: list[Job] = pickle.loads((folder / f"jobs{dist.rank}").read_bytes())
    try:
        if what == "train":
            for job in jobs:
                run(job, dist)
        else:
            _lose_rank_0(what, jobs[0], dist)
    except TrainerError as error:
        sys.stderr.write(f"ERROR on rank {dist.rank}: [{error.code}] {error.values}\n{error}\n")
        return 1
    finally:
        dist.close()
    return 0


def _lose_rank_0(how: str, job: Job, dist: DistContext) -> None:
    learner, _ = build_learner(job.plan, dist)
    if not dist.is_main:
        leave_to_rank_0()
    learner.step(samples(1), 1)

    def publish() -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise TrainerError("model_server_unreachable", "the model server is gone", url="http://nowhere")

    dist.on_main(publish)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
