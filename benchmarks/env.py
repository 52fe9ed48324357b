#!/usr/bin/env python3
"""The dataset environment: `serve` against a bare client, its start, its memory, and the accuracy reward.

All parts (Redis, the trajectory API, vLLM with `tiny`) are real and share this machine. `make bench-env` runs it all;
results lie in benchmarks/results/. The memory is that of the image: scripts/prepare_images.sh and a build come first.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import checks, startup, throughput
from benchmarks.environment.stack import GROUP_SIZE, MAX_TOKENS, WORKERS, bench
from benchmarks.trajectory import machine

_ROOT = Path(__file__).parents[1]
_STARTED = time.monotonic()


def main() -> None:
    options = _options()
    facts = machine.facts(_ROOT / ".venv-atropos" / "bin" / "python")
    _say("the accuracy reward")
    accuracy = asyncio.run(checks.measure())
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder)) as parts:
        _say("tokens a second")
        rounds = throughput.measure(parts, options.rounds, options.seconds, _say)
        _say("the start, on 10,000 rows")
        starts = [startup.first_prompt(parts, number) for number in range(3)]
        _say("memory in the image")
        resident = startup.resident_mb(parts, options.image)
    page = "\n".join([*_facts(facts), *_targets(rounds, starts, resident), *checks.page(accuracy)]) + "\n"
    print(page)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {
            "facts": facts,
            "throughput": [dataclasses.asdict(one) for one in rounds],
            "first_prompt_s": [one.first_prompt_s for one in starts],
            "resident_mb": resident,
            "accuracy": dataclasses.asdict(accuracy),
        }
        (options.results / "env.md").write_text(page)
        (options.results / "env.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
        _say(f"written: {options.results}/env.md and env.json")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="bare client and serve take turns so often")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--image", default="gristmill/env:local", help="whose memory is measured")
    parser.add_argument("--results", type=Path, help="folder to write env.md and env.json to; default: only show them")
    return parser.parse_args()


def _facts(facts: dict[str, str]) -> list[str]:
    names = [name for name in facts if name not in ("ours", "reference")]
    return ["# Dataset environment: measured", "", "| | |", "|-|-|", *(f"| {name} | {facts[name]} |" for name in names)]


def _targets(rounds: list[throughput.Round], starts: list[startup.Startup], resident: float) -> list[str]:
    ratio = statistics.median(one.ratio for one in rounds)
    worst = max(one.first_prompt_s for one in starts)
    rows = [
        ("tokens/s of `serve`, median of rounds", f"{ratio:.3f} × a bare client's", "≥ 0.95", ratio >= 0.95),
        ("first prompt after the model is ready, slowest", f"{worst:.2f} s", "≤ 2 s", worst <= 2),
        ("resident memory of a worker, at most", f"{resident:.0f} MB", "< 400 MB", resident < 400),
    ]
    turns = ", ".join(f"{one.bare:.0f} / {one.serve:.0f}" for one in rounds)
    return [
        "",
        "| what | found | wanted | |",
        "|-|-|-|-|",
        *(f"| {what} | {found} | {wanted} | {'met' if met else 'missed'} |" for what, found, wanted, met in rows),
        "",
        f"`tiny`, {WORKERS} prompts at a time × {GROUP_SIZE} completions, at most {MAX_TOKENS} tokens each; tokens/s, "
        f"bare / serve, in order: {turns}.",
        "",
    ]


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:6.0f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
