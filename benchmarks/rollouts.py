"""The table of rollouts: the time of the ten questions of docs/look-at-a-run.md, and the cost of the trainer's records.

    questions  a synthetic run of 100,000 rollouts: time to make the table, to update it, and of each query
    records    steps of the quickstart's size with and without records, in turn: processor time of all threads, which
               other programs on the machine hardly change, and wall time

`python -m benchmarks rollouts [questions|records] [--rollouts N] [--rounds N] [--results FOLDER]`
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from benchmarks import machine, script
from tests.support.run_folder import synthetic_run

from gristmill_view import sql

ROOT = Path(__file__).resolve().parents[1]
GROUP_SIZE, GROUPS_PER_STEP, TOKENS = 16, 25, 120
STEPS_PER_BLOCK = 5
SEQUENCES = 128
"""Of a step of the quickstart."""


def questions(rollouts: int, rounds: int) -> list[str]:
    """Returns a table of times."""
    from gristmill_view.rollouts import build

    page = (ROOT / "docs" / "look-at-a-run.md").read_text()
    queries = re.findall(r"^#### (.*?)\n.*?```sql\n(.*?)```", page, re.M | re.S)
    with tempfile.TemporaryDirectory() as folder:
        steps = -(-rollouts // (GROUP_SIZE * GROUPS_PER_STEP))
        run = synthetic_run(
            Path(folder), steps=steps, groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, tokens=TOKENS
        )
        began = time.perf_counter()
        table = build(run.path)
        made = time.perf_counter() - began
        began = time.perf_counter()
        build(run.path)
        updated = time.perf_counter() - began
        size = sum(path.stat().st_size for path in (run.path / "dataset").glob("*.parquet"))
        lines = [
            f"{table.rows} rows, {size / 1e6:.0f} MB of Parquet. Made in {made:.1f} s "
            f"({table.rows / made:.0f} rows per second); an update without news takes {updated * 1000:.0f} ms.",
            "",
            "| question | median ms | slowest ms |",
            "|---|---|---|",
        ]
        for title, query in queries:
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                sql(run.path, query, update=False)
                times.append((time.perf_counter() - began) * 1000)
            lines.append(f"| {title} | {statistics.median(times):.0f} | {max(times):.0f} |")
    return lines


def records(rounds: int) -> list[str]:
    """Returns the cost of the records per step."""
    import torch
    from benchmarks.trainer import batch as batches
    from benchmarks.trainer.shapes import Shape, save

    from gristmill import PolicyVersion, RunRecord, RunState
    from gristmill_trainer.data.samples import Prepared, Statistics
    from gristmill_trainer.learner import Learner
    from gristmill_trainer.optimizer import build_optimizer
    from gristmill_trainer.policy import ModelSource, Policy
    from gristmill_trainer.records import TrainedRecords
    from gristmill_trainer.settings import TrainerSettings

    shape = Shape("quickstart", "Qwen2", 272, 128, 512, 2, 4, 4, 32)
    load = batches.Load(sequences=SEQUENCES, micro_batch=64, tokens=SEQUENCES * 18, spread=0.1, prompt_share=2.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(shape, folder, "cpu")
        policy = Policy(ModelSource(name, name, None, 2048), "cpu", packing=True)
        settings = TrainerSettings(device="cpu", batch_size=64, gradient_accumulation_steps=2)
        learner = Learner(policy, build_optimizer(settings, policy.trained_parameters()), settings)
        samples = batches.samples(batches.make(load, shape.vocabulary))
        prepared = Prepared(samples, [], Statistics.of_groups([]))
        run = RunRecord(run_id="bench", state=RunState.OPEN, digest="", group_size=8, env={}, created_at=1.0)

        def block(number: int, recorded: TrainedRecords | None) -> tuple[float, float]:
            """Returns processor time and wall time per step, ms."""
            began = time.process_time(), time.perf_counter()
            for step in range(STEPS_PER_BLOCK):
                result = learner.step(samples, step + 1)
                if recorded is not None:
                    recorded.add(PolicyVersion(1, number * STEPS_PER_BLOCK + step), prepared, result)
            if recorded is not None:
                recorded.close()
            ended = time.process_time(), time.perf_counter()
            spent = [(end - start) / STEPS_PER_BLOCK * 1000 for start, end in zip(began, ended, strict=True)]
            return spent[0], spent[1]

        block(0, None)
        off: list[tuple[float, float]] = []
        on: list[tuple[float, float]] = []
        adds: list[float] = []
        written: list[float] = []
        for number in range(rounds):
            for with_records in (True, False) if number % 2 else (False, True):
                if with_records:
                    on.append(block(number, TrainedRecords(folder / "trained", run, min_free=0)))
                else:
                    off.append(block(number, None))
        result = learner.step(samples, 1)
        recorded = TrainedRecords(folder / "trained", run, min_free=0)
        for number in range(50):
            began = time.perf_counter()
            recorded.add(PolicyVersion(1, number), prepared, result)
            adds.append((time.perf_counter() - began) * 1e6)
            spent = time.process_time()
            time.sleep(0.05)
            written.append((time.process_time() - spent) * 1000)
        recorded.close()
        size = sum(path.stat().st_size for path in (folder / "trained").glob("*.gmz"))
    lines = [
        f"A train phase of {SEQUENCES} sequences with {torch.get_num_threads()} threads, {rounds} blocks of "
        f"{STEPS_PER_BLOCK} steps in turn. `on` includes everything that is written.",
        "",
        "| | off, ms per step | on, ms per step | median difference | least | most |",
        "|---|---|---|---|---|---|",
    ]
    for place, title in enumerate(("processor time", "wall time")):
        pairs = [(one[place], other[place]) for one, other in zip(off, on, strict=True)]
        ratios = [(other - one) / one * 100 for one, other in pairs]
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        lines.append(
            f"| {title} | {before:.1f} | {after:.1f} | {statistics.median(ratios):+.2f} % | {min(ratios):+.2f} % | "
            f"{max(ratios):+.2f} % |"
        )
    return [
        *lines,
        "",
        f"The loop's own part, `add`: median {statistics.median(adds):.0f} microseconds, at most {max(adds):.0f}. "
        f"The thread's part: median {statistics.median(written):.2f} ms of processor time per step. "
        f"{size / (rounds * STEPS_PER_BLOCK + 50) / SEQUENCES:.0f} bytes per sequence of "
        f"{np.mean([one.trained_tokens for one in samples]):.1f} trained tokens.",
    ]


def main() -> None:
    parser = script.parser("rollouts", __doc__)
    parser.add_argument("what", nargs="*", choices=["questions", "records", []], help="default: both")
    parser.add_argument("--rollouts", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--rounds", type=int, default=10, help="default: 10")
    options = parser.parse_args()
    lines = script.heading("The table of rollouts", machine.hardware())
    if not options.what or "questions" in options.what:
        lines += ["## Ten questions", "", *questions(options.rollouts, options.rounds), ""]
    if not options.what or "records" in options.what:
        lines += ["## The trainer's records", "", *records(options.rounds), ""]
    script.publish("\n".join(lines), options.results, "rollouts")


if __name__ == "__main__":
    main()
