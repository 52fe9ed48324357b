"""The cost of receipts in a training step: `make bench ARGS=receipts`.

Trains the quickstart with real services. The learning rate is small, so that all steps are alike. Every second
publication has a receipt. A step with a receipt is compared with the step before it, which has none: the share is the
median of the differences divided by the median step without a receipt.

The trainer's process also measures the parts: its own log-probabilities of the probes (`own_scores`), the server's
answer with the comparison and the file (`Receipts.holds`), which arrives while the environment samples, and the time
that the trainer waits for the answer before it trains (`Publisher.settle`). Steps before `_WARM` do not count.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import machine, script
from benchmarks.services import start_services
from tests.support.stack import ROOT

from gristmill.internal.lines import read_jsonl
from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, read_receipts

_WARM = 3
"""Steps at the beginning, which load and compile."""
_PAIRS = 30
"""Fewer pairs scatter too much to compare."""
_TIMED = """
import json, sys, time
from gristmill_trainer import loop
from gristmill_trainer.__main__ import main
from gristmill_trainer.publish.publisher import Publisher
from gristmill_trainer.receipts.receipts import Receipts
target = sys.argv.pop(1)
times = {"own": [], "server": [], "wait": []}
def timed(name, call):
    def measured(*arguments, **named):
        started = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            times[name].append(time.perf_counter() - started)
            with open(target, "w") as file:
                json.dump(times, file)
    return measured
def every_second(training, step, tensors, **moved):
    if step % 2 == 0:
        expect(training, step, tensors, **moved)
expect, loop.expect = timed("own", loop.expect), every_second
Receipts.holds = timed("server", Receipts.holds)
Publisher.settle = timed("wait", Publisher.settle)
sys.exit(main())
"""


def main() -> None:
    parser = script.parser("receipts", __doc__)
    parser.add_argument("--model", default="tiny", help="tiny or smollm2; default: tiny")
    parser.add_argument("--steps", type=int, default=400, help="default: 400")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = _page(options.model, Path(folder) / "services", options.steps)
    script.publish(page, options.results, f"receipts-{options.model}")


def _page(model: str, folder: Path, steps: int) -> str:
    times = _train(model, folder, steps)
    run = folder / "runs" / "quickstart"
    rows, receipts = read_jsonl(run / "metrics.jsonl"), read_receipts(run / RECEIPTS_FILE)
    if failed := [one for one in receipts if one.state is ReceiptState.FAILED]:
        raise SystemExit(f"{len(failed)} receipts failed; the first: {failed[0].detail}")
    # The publication of a step is in the row of the next step, so the rows of odd steps have a receipt.
    walls = {row["step"]: sum(row["seconds"].values()) for row in rows[_WARM:]}
    pairs = [(walls[step - 1], walls[step]) for step in walls if step % 2 == 1 and step - 1 in walls]
    plain = statistics.median(without for without, _ in pairs)
    more = [with_one - without for without, with_one in pairs]
    difference = statistics.median(more)
    # The median of n values has a standard error of 1.25 standard deviations over the root of n, for a normal
    # distribution; half the distance of the outer sixths estimates the standard deviation.
    low, *_, high = statistics.quantiles(more, n=6)
    error = 1.25 * (high - low) / 2 / len(more) ** 0.5
    times["wait"] = times["wait"][::2]  # One per step; only every second step waits for a receipt.
    own, server, wait = (statistics.median(times[name][1:]) for name in ("own", "server", "wait"))
    compared = [
        f"| a receipt adds to the step | {1000 * difference:.1f} ± {1000 * error:.1f} ms |",
        f"| share of the step | {100 * difference / plain:.2f} ± {100 * error / plain:.2f} % |",
    ]
    lines = [
        *script.heading(f"Receipts of {model}", machine.hardware()),
        "| medians | |",
        "|---|---|",
        f"| pairs of steps without and with a receipt | {len(pairs)} |",
        f"| step without a receipt | {plain:.3f} s |",
        *(compared if len(pairs) >= _PAIRS else []),
        f"| the trainer's own log-probabilities | {1000 * own:.1f} ms |",
        f"| the server's answer, comparison and file, while the environment samples | {1000 * server:.1f} ms |",
        f"| the trainer waits for the answer | {1000 * wait:.1f} ms |",
        f"| own log-probabilities and wait, as a share of the step | {100 * (own + wait) / plain:.2f} % |",
        f"| largest difference of a receipt | {max(one.difference or 0.0 for one in receipts):.2g} nats |",
        "",
    ]
    return "\n".join(lines)


def _train(model: str, folder: Path, steps: int) -> dict[str, list[float]]:
    """Trains, and returns the seconds of each part of each receipt."""
    measured, config = folder / "times.json", ROOT / "configs" / "quickstart.yaml"
    with start_services(folder, model) as services:
        stack, places = services.processes, services.environ()
        stack.start("env", [sys.executable, "-m", "gristmill_env", "--config", str(config)], places)
        flags = ["--training_steps", str(steps), "--learning_rate", "1e-7"]
        trainer = stack.start("trainer", [sys.executable, "-c", _TIMED, str(measured), *flags], places)
        stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=3600)
        if trainer.exit_code != 0:
            raise trainer.failure()
    times: dict[str, list[float]] = json.loads(measured.read_text())
    return times


if __name__ == "__main__":
    main()
