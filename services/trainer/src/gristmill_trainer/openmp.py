"""Imported before torch, whose OpenMP reads its settings when it is loaded: threads sleep while they wait.

By itself a thread that waits for others spins. Where trainer and model server compute at the same time on the cores of
one machine (max_staleness > 0), each then spins on the core that the other needs: on two cores a quickstart run took
more than twice as long (`OMP_WAIT_POLICY=ACTIVE make bench-learning ARGS=staleness`, against the same without).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
