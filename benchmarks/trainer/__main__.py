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

import torch
from benchmarks import machine, script
from benchmarks.trainer import cpu_cases, gpu_cases
from benchmarks.trainer.batch import Load
from benchmarks.trainer.report import Results, page
from benchmarks.trainer.shapes import BODY, REAL, SHAPES, VOCABULARY

_SPEED = Load(sequences=16, micro_batch=8, tokens=1536)
_PROMPTS = Load(sequences=8, micro_batch=8, tokens=4096, spread=0.3, prompt_share=16.0)
_MEMORY = Load(sequences=16, micro_batch=16, tokens=2048)
_TOKENS = (16_384,)
_CASES = ("speed", "prompts", "memory")


def main() -> None:
    options = _options()
    facts = machine.hardware() | machine.training(options.device)
    name = "trainer-cuda" if options.device == "cuda" else "trainer"
    if options.shapes:
        shapes = [SHAPES[name] for name in options.shapes.split(",")]
        measured: list[gpu_cases.Case] = []
        for case in gpu_cases.measure(shapes, options.tokens, options.device, options.rounds, script.say):
            measured.append(case)
            if options.results is not None:
                results = Results(facts, cases=measured)  # Written now: the time on a GPU may end before the last case.
                script.write(page(results), options.results, name, results.json())
        results = Results(facts, cases=measured)
    else:
        cases, rounds, say = options.cases, options.rounds, script.say
        results = Results(
            facts,
            memory=cpu_cases.compare_memory(VOCABULARY, _MEMORY, say) if "memory" in cases else None,
            speed=cpu_cases.compare_speed("trl", BODY, _SPEED, rounds, say) if "speed" in cases else None,
            prompts=cpu_cases.compare_speed("whole", BODY, _PROMPTS, rounds, say) if "prompts" in cases else None,
        )
    script.publish(page(results), options.results, name, results.json())


def _options() -> argparse.Namespace:
    parser = script.parser("trainer", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", help=f"names with commas between them, of {', '.join(SHAPES)}; cuda: the real ones")
    parser.add_argument(
        "--tokens", type=lambda text: [int(one) for one in text.split(",")], default=_TOKENS,
        help="of the shapes' micro-batches, with commas between them",
    )  # fmt: skip
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=_CASES, help="on a CPU; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each backend")
    options = parser.parse_args()
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA card here")
        options.shapes = options.shapes or ",".join(shape.name for shape in REAL)
    for name in filter(None, (options.shapes or "").split(",")):
        if name not in SHAPES:
            parser.error(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return options


if __name__ == "__main__":
    main()
