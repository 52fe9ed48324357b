"""`gristmill slurm`: a training as one job of a Slurm cluster.

The job is heterogeneous: one component has the trainer's nodes, and the other component has the model servers' nodes.
`job.py` checks the options and writes the script: a header with the values of the job, and `job.sh`, which is the same
in every job. Slurm places, signals and requeues. `job.sh` starts the processes as steps, and restarts them.
"""

from gristmill_cli.slurm.job import Containers, Job, Nodes, containers, submit

__all__ = ["Containers", "Job", "Nodes", "containers", "submit"]
