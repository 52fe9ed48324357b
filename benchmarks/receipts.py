"""The share of receipts in a training step: `make bench-receipts`.

Trains the quickstart with real services. The trainer's process measures the time of the two parts of a receipt: its own
log-probabilities of the probes (`own_scores`), and the server's answer with the comparison and the file
(`Receipts.holds`). The share is the median of their time divided by the median of the step's wall time. Steps before
`_WARM` do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from tests.support.ports import free_port
from tests.support.stack import MODELS_DIR, ROOT, Output, environ, start_api, start_redis, start_vllm

from gristmill.metrics import read_jsonl
from gristmill.receipts import RECEIPTS_FILE, proven, read_receipts
from local_processes import LocalStack

_WARM = 1
"""Steps at the beginning, which load and compile."""
_TIMED = """
import json, sys, time
from gristmill_trainer import loop
from gristmill_trainer.__main__ import main
from gristmill_trainer.receipts import Receipts
target = sys.argv.pop(1)
times = {"own": [], "server": []}
def timed(name, call):
    def measured(*arguments):
        started = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            times[name].append(time.perf_counter() - started)
            with open(target, "w") as file:
                json.dump(times, file)
    return measured
loop.own_scores = timed("own", loop.own_scores)
Receipts.holds = timed("server", Receipts.holds)
sys.exit(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny or smollm2; default: tiny")
    parser.add_argument("--steps", type=int, default=30, help="default: 30")
    parser.add_argument("--results", type=Path, help="folder to write receipts-MODEL.md to; default: only show it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = _page(options.model, Path(folder), options.steps)
    print(page, end="")
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / f"receipts-{options.model}.md").write_text(page)


def _page(model: str, folder: Path, steps: int) -> str:
    times = _train(model, folder, steps)
    run = folder / "runs" / "quickstart"
    rows, receipts = read_jsonl(run / "metrics.jsonl"), read_receipts(run / RECEIPTS_FILE)
    # The publication of a step is in the row of the next step.
    step = statistics.median(sum(row["seconds"].values()) for row in rows[_WARM:])
    parts = {name: statistics.median(values[_WARM:]) for name, values in times.items()}
    cost, count = sum(parts.values()), proven(receipts)
    lines = [
        f"# Receipts of {model}",
        "",
        *(f"- {name}: {value}" for name, value in machine.hardware().items()),
        "",
        "| | |",
        "|---|---|",
        f"| steps | {len(rows)} |",
        f"| publications proven | {count.proven} of {count.publications} |",
        f"| wall time per step (medians here and below) | {step:.3f} s |",
        f"| trainer's own log-probabilities | {1000 * parts['own']:.1f} ms |",
        f"| server's answer, comparison and file | {1000 * parts['server']:.1f} ms |",
        f"| share of the step | {100 * cost / step:.2f} % |",
        f"| largest difference | {max(one.difference or 0.0 for one in receipts):.2g} nats |",
        f"| smallest change | {min(one.change for one in receipts if one.change is not None):.2g} nats |",
        "",
    ]
    return "\n".join(lines)


def _train(model: str, folder: Path, steps: int) -> dict[str, list[float]]:
    """Trains, and returns the seconds of each part of each receipt."""
    output, measured = Output(), folder / "times.json"
    with LocalStack(output.add) as stack:
        redis_port, api_port, model_port = free_port(), free_port(), free_port()
        start_redis(stack, folder / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        (folder / "weights").mkdir()
        start_vllm(stack, folder / "weights", model_port, model)
        places = environ(
            f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{model_port}", folder / "runs", ROOT / "configs",
            folder / "weights", MODELS_DIR,
        )  # fmt: skip
        stack.start("env", [sys.executable, "-m", "gristmill_env", "--config", "quickstart"], places)
        flags = ["--training_steps", str(steps)]
        trainer = stack.start("trainer", [sys.executable, "-c", _TIMED, str(measured), *flags], places)
        stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=3600)
        if trainer.exit_code != 0:
            raise SystemExit(f"the trainer ended with {trainer.exit_code}: " + "\n".join(output.lines[-20:]))
    found: dict[str, list[float]] = json.loads(measured.read_text())
    return found


if __name__ == "__main__":
    main()
