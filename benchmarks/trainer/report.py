"""Writes the results as a page of Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.trainer.cpu_cases import Memory, Speed
from benchmarks.trainer.gpu_cases import Case
from benchmarks.trainer.subprocess_run import Found, Skipped

from gristmill_trainer.metrics import peak_tflops

FASTER = {"trl": 1.6, "whole": 2.0}
LEANER = 0.5


@dataclass(frozen=True)
class Results:
    facts: Mapping[str, str]
    speed: Speed | None = None
    prompts: Speed | None = None
    """Long prompts with short answers."""
    memory: Memory | None = None
    cases: Sequence[Case] = ()

    def json(self) -> str:
        """Returns all results, step by step, as JSON."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=1)


def page(results: Results) -> str:
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    yield "# Trainer: measured"
    yield ""
    yield from _table(("", ""), results.facts.items())
    for speed in (results.speed, results.prompts):
        if speed is not None:
            yield ""
            yield from _speed(speed)
    if results.memory is not None:
        yield ""
        yield from _memory(results.memory)
    if results.cases:
        yield ""
        yield from _cases(results.cases, results.facts["device"])


def _speed(speed: Speed) -> Iterator[str]:
    load, ours, theirs, wanted = speed.load, speed.first["ours"], speed.first[speed.other], FASTER[speed.other]
    met = "met" if speed.ratio >= wanted else "**missed**"
    than, whose = ("", "TRL's") if speed.other == "trl" else (" of long prompts with short answers", "whole sequences'")
    yield f"## Speed{than}: {speed.ratio:.2f} × {whose} trained tokens a second; wanted ≥ {wanted}: {met}"
    yield ""
    yield (
        f"One optimizer step on {load.sequences} sequences of {load.tokens} tokens together, "
        f"{speed.trained_tokens} of them trained, in micro-batches of {load.micro_batch}; {_model(speed)}. "
        f"{_PLACES[speed.other].format(speed.real_share)} Both in one process, in turn, another one first each "
        f"round; the ratio is that of the medians. The rounds' own: {_spread(speed.ratios)} (min / median / max); "
        "where they lie far apart, the machine was busy, and the figure says little. Everything in float32."
    )
    yield ""
    yield (
        f"The same computation: loss {ours.loss:.6f} and {whose} {theirs.loss:.6f}, gradient norm {ours.grad_norm:.6f} "
        f"and {theirs.grad_norm:.6f}."
    )
    yield ""
    yield from _table(
        ("", "trained tokens/s", "seconds a step: min / median / max"),
        (
            (_NAMES[name], f"{speed.tokens_per_second(name):.0f}", _spread(speed.seconds[name]))
            for name in speed.seconds
        ),
    )


def _memory(memory: Memory) -> Iterator[str]:
    load = memory.load
    met = "met" if memory.peak_ratio <= LEANER else "**missed**"
    yield f"## Memory: {memory.peak_ratio:.2f} × TRL's peak; wanted ≤ {LEANER}: {met}"
    yield ""
    yield (
        f"{load.sequences} sequences of {load.tokens} tokens together, in micro-batches of {load.micro_batch}; "
        f"{_model(memory)}. Two steps, each backend in a separate process. The ratio is of the processes' peaks of "
        "resident memory: libraries, weights, gradients and optimizer state are in it. Added: by the steps, to a "
        f"process that has weights and optimizer already, without its state; {memory.added_ratio:.2f} × TRL's."
    )
    yield ""
    yield from _table(
        ("", "peak, MB", "before the first step, MB", "added, MB"),
        (
            (_NAMES[name], *(f"{size / 1e6:.0f}" for size in (one.peak, one.before, one.peak - one.before)))
            for name, one in memory.found.items()
        ),
    )


def _cases(cases: Sequence[Case], device: str) -> Iterator[str]:
    peak = peak_tflops(device)
    yield "## Shapes of real models, random weights"
    yield ""
    yield (
        "Tokens are of prompts and completions, without padding; three quarters or more of them are trained. "
        "ckpt: with gradient checkpointing, as it did not fit without. MFU: the mathematics of the "
        f"step (gristmill_trainer.metrics) over {'an unknown peak' if peak is None else f'{peak:.0f} TFLOPS'}; it is "
        "the same for both backends, so work on padding does not count. computed: the memory that the trainer computes "
        "before the run. Loss and gradient norm are of the first "
        "step; adapters start from random numbers, so their norms differ."
    )
    yield ""
    yield from _table(
        (
            "model",
            "sequences × tokens",
            "real share",
            "backend",
            "tokens/s",
            "peak, GB",
            "computed, GB",
            "MFU",
            "loss",
            "norm",
        ),
        (_case(case, peak) for case in cases),
    )
    published = {
        case.setting.shape.name: (*case.found.publish, case.found.publish_ipc)
        for case in cases
        if case.backend == "ours" and isinstance(case.found, Found) and case.found.publish is not None
    }
    rows = [(name, *("" if one is None else f"{one:.2f}" for one in seconds)) for name, seconds in published.items()]
    if rows:
        yield ""
        yield "Publication in the server's dtype, by files to a file system in memory, and by `publisher: ipc`:"
        yield ""
        yield from _table(("model", "seconds to the host", "seconds to the file", "seconds to the buffer"), rows)


def _case(case: Case, peak: float | None) -> Sequence[str]:
    load, found = case.setting.load, case.found
    backend = _NAMES[case.backend] + (", ckpt" if case.found.checkpointing else "")
    packed = f"{load.sequences} × {load.tokens // load.sequences}"
    if isinstance(found, Skipped):
        return (case.setting.shape.name, packed, "", backend, f"**skipped**: {found.why}", "", "", "", "", "")
    mfu = case.mfu(peak)
    return (
        case.setting.shape.name,
        packed,
        f"{found.real_share:.2f}",
        backend,
        f"{case.tokens_per_second:,.0f}",
        f"{found.peak / 1e9:.1f}",
        "" if found.computed is None else f"{found.computed / 1e9:.1f}",
        "" if mfu is None else f"{mfu:.1%}",
        f"{found.first.loss:.4f}",
        f"{found.first.grad_norm:.4f}",
    )


_PLACES = {
    "trl": "The real share of TRL's padded places is {:.2f}.",
    "whole": "Eight sequences have one prompt, which is computed once, or for each sequence.",
}
_NAMES = {
    "ours": "Gristmill",
    "eager": "Gristmill, compile: false",
    "whole": "Gristmill, whole sequences",
    "trl": "TRL",
}


def _model(of: Speed | Memory) -> str:
    shape = of.shape
    return (
        f"a {shape.family} of {shape.layers} layers of width {shape.hidden} with random weights and a vocabulary of "
        f"{shape.vocabulary:,}"
    )


def _spread(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in (min(values), statistics.median(values), max(values)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join("-" for _ in head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        # The weights' folder no longer exists.
        return {key: _plain(one) for key, one in value.items() if key != "folder"}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
