"""Small programs per second of the sandbox, through the call that rewards and tools use: `make bench ARGS=sandbox`."""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks import machine, script

from gristmill_env import sandbox

_RATE = 50.0
"""Target: least programs per second on two cores."""
_PROGRAM = "left, right = map(int, input().split())\nprint(left + right)\n"
_AT_ONCE = (1, 16)


def main() -> None:
    parser = script.parser("sandbox", __doc__)
    parser.add_argument("--programs", type=int, default=500, help="programs of a measurement; default: 500")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each row; default: 3")
    options = parser.parse_args()
    rows = []
    for at_once in _AT_ONCE:
        found = [asyncio.run(_measure(options.programs, at_once)) for _ in range(options.rounds)]
        rate, wait = (statistics.median(values) for values in zip(*found, strict=True))
        verdict = "" if at_once == 1 else " (met)" if rate >= _RATE else " (missed)"
        rows.append(f"| {at_once} | **{rate:.0f}**{verdict} | {1000 * wait:.0f} |")
        script.say(rows[-1])
    lines = script.heading("The sandbox", machine.hardware())
    lines += [
        "Each program reads two numbers, prints their sum, and runs in a process of its own. The sandbox is a process",
        f"of this machine, as in `make local`. Medians of {options.rounds} times {options.programs} programs. Target:",
        f"{_RATE:g} programs per second on two cores.",
        "",
        "| requests at once | programs/s | ms for an answer |",
        "|---|---|---|",
        *rows,
    ]
    script.publish("\n".join(lines) + "\n", options.results, "sandbox")


async def _measure(programs: int, at_once: int) -> tuple[float, float]:
    """Returns the programs per second, and the median seconds for an answer."""
    await sandbox.run(_PROGRAM, ["1 2"])  # starts the sandbox
    numbers, seconds = iter(range(programs)), []

    async def work() -> None:
        for number in numbers:
            began = time.monotonic()
            [report] = (await sandbox.run(_PROGRAM, [f"{number} 1"])).runs
            assert report.stdout == f"{number + 1}\n", report
            seconds.append(time.monotonic() - began)

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return programs / (time.monotonic() - began), statistics.median(seconds)


if __name__ == "__main__":
    main()
