"""OpenMP settings for sleeping threads. Imported before torch, because torch's OpenMP reads them when it is loaded.

By default, a waiting thread spins. With max_staleness > 0, trainer and model server may compute at the same time on the
cores of one machine. A spinning thread then uses a core that the other process needs. On two cores, a quickstart run
with `OMP_WAIT_POLICY=ACTIVE make bench-learning ARGS=staleness` took more than twice as long as without the variable.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
