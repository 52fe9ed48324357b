#!/usr/bin/env python3
"""The dataset environment: `serve` against a bare client, its start, its memory, and the accuracy reward.

All parts (Redis, the trajectory API, vLLM) are real and share this machine. `make bench ARGS=env` runs all cases and
writes benchmarks/results/. The memory is measured in the image: run scripts/prepare_images.sh and a build first.

`serve` is measured with two models. SmolLM2-135M is a real model, and the target applies to it. `tiny` answers almost
at once, so it shows the cost of everything except the model: the worst case, without a target.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, script
from benchmarks.env import checks, startup, throughput
from benchmarks.env.stack import Load, bench

_ROOT = Path(__file__).parents[2]
_REAL = Load("smollm2", workers=4, max_tokens=32)
_WORST = Load("tiny", workers=16, max_tokens=24)


def main() -> None:
    options = _options()
    facts = machine.facts(_ROOT / ".venv-atropos" / "bin" / "python")
    script.say("the accuracy reward")
    accuracy = asyncio.run(checks.measure())
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder) / _REAL.model, _REAL) as started:
        script.say(f"tokens a second, {_REAL.model}")
        real = throughput.measure(started, options.rounds, options.seconds, script.say)
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder) / _WORST.model, _WORST) as started:
        script.say(f"tokens a second, {_WORST.model}")
        worst = throughput.measure(started, options.rounds, options.seconds / 4, script.say)
        script.say("the start, on 10,000 rows")
        starts = [startup.first_prompt(started, number) for number in range(3)]
        script.say("memory in the image")
        resident = startup.resident_mb(started, options.image)
    shown = {name: value for name, value in facts.items() if name not in ("ours", "reference")}
    head = script.heading("Dataset environment: measured", shown)
    page = "\n".join([*head, *_targets(real, worst, starts, resident), *checks.page(accuracy)]) + "\n"
    figures: dict[str, Any] = {
        "facts": facts,
        "throughput": [_figures(_REAL, real), _figures(_WORST, worst)],
        "first_prompt_s": [start.first_prompt_s for start in starts],
        "resident_mb": resident,
        "accuracy": dataclasses.asdict(accuracy),
    }
    script.publish(page, options.results, "env", json.dumps(figures, indent=1, default=str))


def _options() -> argparse.Namespace:
    parser = script.parser("env", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of the bare client and of serve")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of a turn; a quarter of them with tiny")
    parser.add_argument("--image", default="gristmill/env:local", help="image whose memory is measured")
    return parser.parse_args()


def _targets(
    real: list[throughput.Round], worst: list[throughput.Round], starts: list[startup.Startup], resident: float
) -> list[str]:
    ratio = _median(real)
    slowest = max(one.first_prompt_s for one in starts)
    rows = [
        (f"tokens/s of `serve`, `{_REAL.model}`, median of rounds", f"{ratio:.3f} × a bare client's", "≥ 0.95",
         "met" if ratio >= 0.95 else "missed"),
        (f"the same, `{_WORST.model}`: the worst case", f"{_median(worst):.3f} × a bare client's", "", ""),
        ("first prompt after the model is ready, slowest", f"{slowest:.2f} s", "≤ 2 s",
         "met" if slowest <= 2 else "missed"),
        ("resident memory of a worker, at most", f"{resident:.0f} MB", "< 400 MB",
         "met" if resident < 400 else "missed"),
    ]  # fmt: skip
    return [
        "| what | found | wanted | |",
        "|-|-|-|-|",
        *(f"| {what} | {found} | {wanted} | {met} |" for what, found, wanted, met in rows),
        "",
        "The model, its client and all other processes share two cores. `tiny` has 0.6 million parameters and answers "
        "with about nine tokens. So nearly all of the machine's time goes into requests and storage, and a bare client "
        "does the smaller part of that work. A slower model makes the difference smaller.",
        "",
        *_turns(_REAL, real),
        *_turns(_WORST, worst),
    ]


def _turns(load: Load, rounds: list[throughput.Round]) -> list[str]:
    turns = ", ".join(f"{one.bare:.0f} / {one.serve:.0f}" for one in rounds)
    return [
        f"`{load.model}`, {load.workers} prompts at a time × {load.group_size} completions, at most {load.max_tokens} "
        f"tokens each; tokens/s, bare / serve, in order: {turns}.",
        "",
    ]


def _figures(load: Load, rounds: list[throughput.Round]) -> dict[str, Any]:
    return {"load": dataclasses.asdict(load), "rounds": [dataclasses.asdict(one) for one in rounds]}


def _median(rounds: list[throughput.Round]) -> float:
    return statistics.median(one.ratio for one in rounds)


if __name__ == "__main__":
    main()
