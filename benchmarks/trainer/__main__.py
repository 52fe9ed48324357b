#!/usr/bin/env python3
"""The trainer's step against TRL's: same weights, same ragged batch, same objective (dapo, recorded old policy).

On a CPU, `make bench ARGS=trainer` runs three cases and writes the results to benchmarks/results/:

    speed    both backends in one process, alternating steps, after loss and gradient norm were compared
    prompts  our step with shared prompts and without, for long prompts with short answers, in the same way
    memory   with a vocabulary of 152 thousand, each backend in a separate process

On a CUDA card, models of real shapes at 16k tokens a micro-batch, ragged and in one sequence, in ten minutes:

    make bench-gpu, or python -m benchmarks trainer --device cuda

The script needs the trainer's packages (torch, transformers, ...) and no network. Without trl or peft, the rows that
need the package name it. `--cases prompts` runs one of the three cases. `--device cpu --shapes tiny` tries the script
without a GPU.

TRL's step is GRPOTrainer._compute_loss on micro-batches of its padded generation batch, backward, the clip and its own
optimizer. Ours is Learner.step, with all that it measures; TRL measures as much in its loss.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from benchmarks import machine
from benchmarks.trainer import cpu_cases, gpu_cases
from benchmarks.trainer.batch import Load
from benchmarks.trainer.report import Results, page
from benchmarks.trainer.shapes import BODY, REAL, SHAPES, VOCABULARY

_SPEED = Load(sequences=16, micro_batch=8, tokens=1536)
_PROMPTS = Load(sequences=8, micro_batch=8, tokens=4096, spread=0.3, prompt_share=16.0)
_MEMORY = Load(sequences=16, micro_batch=16, tokens=2048)
_TOKENS = (16_384,)
_CASES = ("speed", "prompts", "memory")
_STARTED = time.monotonic()


def main() -> None:
    options = _options()
    facts = machine.hardware() | machine.training(options.device)
    if options.shapes:
        shapes = [SHAPES[name] for name in options.shapes.split(",")]
        measured: list[gpu_cases.Case] = []
        for case in gpu_cases.measure(shapes, options.tokens, options.device, options.rounds, _say):
            measured.append(case)
            _write(Results(facts, cases=measured), options)  # time on a GPU may end before the last case
        results = Results(facts, cases=measured)
    else:
        cases, rounds = options.cases, options.rounds
        results = Results(
            facts,
            memory=cpu_cases.compare_memory(VOCABULARY, _MEMORY, _say) if "memory" in cases else None,
            speed=cpu_cases.compare_speed("trl", BODY, _SPEED, rounds, _say) if "speed" in cases else None,
            prompts=cpu_cases.compare_speed("whole", BODY, _PROMPTS, rounds, _say) if "prompts" in cases else None,
        )
    print(page(results))
    _write(results, options)
    if options.results is not None:
        _say(f"written to {options.results}")


def _write(results: Results, options: argparse.Namespace) -> None:
    if options.results is None:
        return
    name = "trainer-cuda" if options.device == "cuda" else "trainer"
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{name}.md").write_text(page(results))
    (options.results / f"{name}.json").write_text(results.json() + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", help=f"names with commas between them, of {', '.join(SHAPES)}; cuda: the real ones")
    parser.add_argument(
        "--tokens", type=lambda text: [int(one) for one in text.split(",")], default=_TOKENS,
        help="of the shapes' micro-batches, with commas between them",
    )  # fmt: skip
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=_CASES, help="on a CPU; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each backend")
    parser.add_argument("--results", type=Path, help="folder to write to; default: only show them")
    options = parser.parse_args()
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA card here")
        options.shapes = options.shapes or ",".join(shape.name for shape in REAL)
    for name in filter(None, (options.shapes or "").split(",")):
        if name not in SHAPES:
            parser.error(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return options


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:6.0f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
