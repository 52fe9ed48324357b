"""Compares tokens per second of `serve` and of a bare client of the same vLLM, with equal prompts and concurrency.

Both rates are the slope of vLLM's counter of generated tokens over the turn. The counter's first and last values would
not do, because prompts and completions of similar length make the counter rise in waves. `serve` renders prompts,
decodes and scores completions, and stores groups through the API in Redis, on the same two cores. The bare client
requests the same completions and discards them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from benchmarks.env.stack import Bench

from gristmill import Manifest
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer

_ROWS = 2000
_WARM_S = 4.0
_EVERY_S = 0.5


@dataclass(frozen=True)
class Round:
    """Tokens per second of the bare client and of `serve`, measured one after the other."""

    bare: float
    serve: float

    @property
    def ratio(self) -> float:
        """serve / bare."""
        return self.serve / self.bare


def measure(bench: Bench, rounds: int, seconds: float, say: Callable[[str], None]) -> list[Round]:
    """Measures the bare client and `serve` for `seconds` each, `rounds` times. The order alternates between rounds.

    One turn of each comes before and does not count. Until vLLM on a CPU has run each batch size once, it is much
    slower.
    """
    asyncio.run(_bare(bench, seconds))
    _serve(bench, "throughput-warm", seconds)
    found = []
    for number in range(rounds):
        serve = _serve(bench, f"throughput-{number}", seconds) if number % 2 else None
        bare = asyncio.run(_bare(bench, seconds))
        if serve is None:
            serve = _serve(bench, f"throughput-{number}", seconds)
        found.append(Round(bare, serve))
        say(f"round {number + 1} of {rounds}: bare {bare:.0f}, serve {serve:.0f} tokens/s, {found[-1].ratio:.3f}")
    return found


async def _bare(bench: Bench, seconds: float) -> float:
    manifest = Manifest.read(bench.models_dir)
    prompts = PromptBuilder(load_tokenizer(manifest.tokenizer_path))
    load = bench.load
    sampling = {"n": load.group_size, "temperature": 1.0, "top_p": 1.0, "max_tokens": load.max_tokens, "logprobs": 0}
    rows = itertools.cycle(f"What is {n % 90} + {n % 9}?" for n in range(_ROWS))

    async with httpx.AsyncClient(
        base_url=bench.model_url, timeout=60, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def ask() -> None:
            while True:
                body = {
                    "model": manifest.name,
                    "token_ids": list(prompts.build(next(rows)).token_ids),
                    "sampling_params": {**sampling, "detokenize": False},
                }
                answer = await http.post("/inference/v1/generate", json=body)
                assert len(json.loads(answer.content)["choices"]) == load.group_size

        clients = [asyncio.create_task(ask()) for _ in range(load.workers)]
        await asyncio.sleep(_WARM_S)
        rate = await asyncio.to_thread(_rate, bench.model_url, seconds)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return rate


def _serve(bench: Bench, run: str, seconds: float) -> float:
    bench.config(run, _ROWS)
    env = bench.serve(run)
    bench.take(run)
    with httpx.Client() as http:
        idle = _generated(http, bench.model_url)
        while _generated(http, bench.model_url) == idle:
            assert env.exit_code is None, "serve ended"
            time.sleep(0.1)
    time.sleep(_WARM_S)
    rate = _rate(bench.model_url, seconds)
    env.stop(grace=20)
    bench.close(run)
    return rate


def _rate(url: str, seconds: float) -> float:
    times, counts = [], []
    with httpx.Client() as http:
        begun = time.monotonic()
        while (at := time.monotonic() - begun) < seconds:
            counts.append(_generated(http, url))
            times.append((at + time.monotonic() - begun) / 2)
            time.sleep(_EVERY_S)
    return statistics.linear_regression(times, counts).slope


def _generated(http: httpx.Client, url: str) -> float:
    text = http.get(f"{url}/metrics").text
    found = re.findall(r"^vllm:generation_tokens_total(?:\{.*\})? ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, "vLLM counts no generated tokens"
    return sum(map(float, found))
