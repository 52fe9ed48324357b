"""The CUDA image's entrypoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ports import free_port

from gristmill_trainer.per_gpu import command

TRAINER = ["-m", "gristmill_trainer", "--device", "cuda", "--training_steps", "3"]


def test_one_gpu_needs_one_process() -> None:
    assert command(1, ["--training_steps", "3"]) == TRAINER


def test_several_gpus_get_a_process_each() -> None:
    one_machine = ["--nnodes", "1", "--master-addr", "127.0.0.1"]
    assert command(4, ["--training_steps", "3"]) == [*one_machine, "--nproc-per-node", "4", *TRAINER]


TORCHRUN = [sys.executable, "-c", "import sys; from gristmill_trainer.per_gpu import *; torchrun(sys.argv[1:], Path())"]
LISTENERS = """
import os, sys
from pathlib import Path
from gristmill_trainer.dist_context import join

dist = join(os.environ, "cpu")
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "by default, gloo takes the address of the host's name"
assert dist.gather(dist.rank) == [0, 1]
assert dist.on_main(lambda: {"from": 0}) == {"from": 0}
sockets = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
found = []
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            found.append(fields[1].partition(":")[0])
Path(sys.argv[1], str(dist.rank)).write_text(" ".join(found))
dist.gather(0)
dist.close()
"""


@pytest.mark.long
def test_processes_of_one_machine_exchange_objects_on_loopback_only(tmp_path: Path) -> None:
    """Whoever reaches their ports could send pickles."""
    (tmp_path / "rank.py").write_text(LISTENERS)
    one_machine = command(2, [])[: -len(TRAINER) + 2]
    ranks = [*TORCHRUN, *one_machine, "--master-port", str(free_port()), str(tmp_path / "rank.py"), str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    subprocess.run(ranks, env=environ, check=True, timeout=240)
    listened = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert all(listened)
    assert {address for rank in listened for address in rank} == {"0100007F"}, "127.0.0.1"


@pytest.mark.long
def test_processes_that_fail_are_not_started_again(tmp_path: Path) -> None:
    """Except after `rank_out_of_memory`, see distributed/test_endings.py."""
    (tmp_path / "rank.py").write_text("import sys\nprint('started')\nsys.exit(3)")
    ranks = [*TORCHRUN, *command(2, [])[: -len(TRAINER)], str(tmp_path / "rank.py")]
    done = subprocess.run(ranks, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    assert 1 <= done.stdout.count("started") <= 2


@pytest.mark.long
def test_entrypoint_without_a_gpu_ends_at_once_with_the_remedy() -> None:
    started = [sys.executable, "-m", "gristmill_trainer.per_gpu"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(started, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "[no_gpu]" in done.stderr
    assert "TRAINER_GPU" in done.stderr
