"""Runs a benchmark: python -m benchmarks NAME [OPTIONS], or make bench ARGS="NAME [OPTIONS]".

Writes to benchmarks/results without --results FOLDER. NAME --help lists the options. Needs the packages of `make dev`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = {
    "api": "compare the trajectory API with atroposlib's server: half an hour; --quick is shorter",
    "env": "compare serve with a bare client: start, memory (needs the env's image), the accuracy reward: ten minutes",
    "trainer": "compare the trainer's step with TRL's: five minutes; make bench-gpu on a card",
    "learning": "train to the end: objectives, staleness, curriculum (half an hour), smollm2 (an hour), agent, ...",
    "checkpoint": "time that a step waits for a checkpoint of a 0.6B model, and its write: five minutes, needs 17 GB",
    "durability": "measure the cost of a SIGKILL of Redis by fsync mode: half an hour",
    "recovery": "time from the kill of each service to the next trained step: ten minutes",
    "scaling": "rates of one, two and four environments, and with a dead model server: fifteen minutes",
    "soak": "train for long: growth of memory, open files and disk per 1,000 steps: an hour",
    "capacity": "submits with one and two API processes, and the cost of an idle stack: three minutes",
    "gateway": "measure the gateway for agents: share of vLLM's rate, milliseconds per turn, memory: fifteen minutes",
    "sandbox": "measure small programs per second of the sandbox: a minute",
    "rollouts": "time ten questions on 100,000 rollouts, and the trainer's records",
    "page": "measure the page: cost of open pages for the API, bytes, first paint: ten minutes, needs Chromium",
    "receipts": "measure the share of receipts in a step: five minutes; --model smollm2 --steps 12 for 135M",
    "wrong_weights": "measure how far wrong weights are from a receipt's bound: MODEL_FOLDER...",
}
"""Names of modules in this folder."""


def listing() -> str:
    """Returns one line per benchmark."""
    return "\n".join(f"{name:<14} {text}" for name, text in BENCHMARKS.items())


def command(name: str, options: list[str]) -> list[str]:
    """Returns the command that runs a benchmark from the repository's folder."""
    # A later --results overrides this one.
    return [sys.executable, "-m", f"benchmarks.{name}", "--results", "benchmarks/results", *options]


def main() -> None:
    """Replaces this process by the benchmark. Without a name, lists the benchmarks."""
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{__doc__}\n{listing()}")
        return
    if name not in BENCHMARKS:
        print(f"{name!r} is not a benchmark:\n{listing()}", file=sys.stderr)
        sys.exit(2)
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.chdir(ROOT)
    os.execv(sys.executable, command(name, options))


if __name__ == "__main__":
    main()
