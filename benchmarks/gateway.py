"""The cost of the gateway for agents, in three measurements with the openai client: `make bench ARGS=gateway`.

Throughput: agents talk to a real vLLM (SmolLM2-135M), by turns directly and through the gateway. Turn: the
milliseconds that the gateway adds to a turn of a model server that takes a constant time. Sessions: memory and
processor time of the gateway's process for 256 sessions of 20 turns at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from benchmarks import machine, script
from benchmarks.served_gateway import ANSWER
from benchmarks.services import local_stack, start_stub
from tests.support.stack import MODELS_DIR, VLLM_PYTHON, start_vllm

from gristmill_cli.local.processes import LocalStack, Service, free_port
from gristmill_model.resolve import resolve

_RATIO, _ADDED_MS, _MEGABYTES = 0.9, 10.0, 300
"""Targets: least share of vLLM's own tokens per second, most milliseconds per turn, and most resident memory."""
_TURNS = 4
"""Turns of a conversation that is measured for throughput."""
_STUB_S = 0.2
"""Seconds that the replacement of the model server takes for a reply."""
_LENGTH = 16384
"""Most tokens of a conversation at the replacement of the model server."""
_TOOL_RESULT = "The file src/module_{turn}.py has a function that returns the number {turn}. " * 12
"""The next message of a long conversation: 1,000 characters, as a tool's result."""


@dataclass(frozen=True)
class Side:
    """One of the two ways to the model: its address, keys for conversations, and the model's name."""

    name: str
    url: str
    keys: Sequence[str]
    model: str


def main() -> None:
    parser = script.parser("gateway", __doc__)
    parser.add_argument("--parts", nargs="+", default=["throughput", "turn", "sessions"], help="default: all three")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see whether it runs")
    parser.add_argument("--rounds", type=int, default=6, help="measurements of each side; default: 6")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a measurement; default: 30")
    parser.add_argument("--agents", type=int, default=8, help="agents at once; default: 8")
    parser.add_argument("--sessions", type=int, default=256, help="sessions at once; default: 256")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.sessions = 2, 10.0, 32
    parts = {"throughput": _throughput, "turn": _turn, "sessions": _sessions}
    lines = script.heading("The gateway for agents", machine.hardware())
    lines += ["vLLM, gateway and agents share the cores of this machine. The agents use the openai client."]
    # The packages of smollm2 are in the model server's environment.
    variables = os.environ | {"GRISTMILL_MODELS_DIR": str(MODELS_DIR)}
    subprocess.run([str(VLLM_PYTHON), "-m", "gristmill_model", "build", "smollm2"], env=variables, check=True)
    tokenizer = resolve("smollm2", MODELS_DIR).weights_path
    for name in options.parts:
        script.say(name)
        with tempfile.TemporaryDirectory() as folder, local_stack(Path(folder)) as stack:
            lines += ["", *parts[name](stack, Path(folder), tokenizer, options)]
    page = "\n".join(lines) + "\n"
    script.publish(page, options.results, "gateway")


def _throughput(stack: LocalStack, folder: Path, tokenizer: Path, options: argparse.Namespace) -> list[str]:
    """Measures tokens per second of the same agents on both ways to one vLLM. The ways take turns."""
    port, weights = free_port(), folder / "weights"
    weights.mkdir()
    start_vllm(stack, weights, port, "smollm2")
    url = f"http://127.0.0.1:{port}"
    conversations = 4000
    found: dict[str, list[float]] = {"vLLM": [], "gateway": []}
    with _gateway(stack, folder, url, tokenizer, conversations) as (service, through):
        sides = [Side("vLLM", f"{url}/v1", ["any"], through.model), through]
        asyncio.run(_talk_for(5.0, sides[0], iter(range(10**9)), options.agents))  # warms up
        cpu, requests, numbers = 0.0, 0, iter(range(conversations))
        for index in range(options.rounds):
            for side in sides if index % 2 else sides[::-1]:
                began, before = time.monotonic(), machine.cpu_seconds(service.process.pid)
                replies = asyncio.run(_talk_for(options.seconds, side, numbers, options.agents))
                found[side.name].append(sum(replies) / (time.monotonic() - began))
                if side is through:
                    requests += len(replies)
                    cpu += machine.cpu_seconds(service.process.pid) - before
                script.say(f"round {index + 1}: {side.name}: {found[side.name][-1]:.1f} tokens/s")
    direct, gateway = (statistics.median(rates) for rates in found.values())
    return [
        "## Throughput",
        "",
        f"{options.agents} agents hold conversations of {_TURNS} turns of up to 64 tokens with SmolLM2-135M. Medians",
        f"of {options.rounds} measurements of {options.seconds:g} s. Target: at least {_RATIO} of vLLM's own rate.",
        "",
        "| | tokens/s | lowest | highest | of vLLM |",
        "|---|---|---|---|---|",
        f"| vLLM's /v1/chat/completions | {direct:.1f} | {min(found['vLLM']):.1f} | {max(found['vLLM']):.1f} | 1 |",
        f"| through the gateway | {gateway:.1f} | {min(found['gateway']):.1f} | {max(found['gateway']):.1f} | "
        f"**{gateway / direct:.2f}** ({_verdict(gateway / direct >= _RATIO)}) |",
        "",
        f"The gateway's process used {1000 * cpu / max(requests, 1):.1f} ms of processor time per request.",
    ]


def _turn(stack: LocalStack, folder: Path, tokenizer: Path, options: argparse.Namespace) -> list[str]:
    """Measures what the gateway adds to a turn, alone and with several agents at once."""
    url = _stub(stack)
    times = 3 if options.quick else 10
    rows = []
    with _gateway(stack, folder, url, tokenizer, 20 * times * (1 + options.agents)) as (_, through):
        direct = Side("vLLM", f"{url}/v1", ["any"], through.model)
        numbers = iter(range(10**6))
        for at_once in (1, options.agents):
            turns: dict[str, list[float]] = {"vLLM": [], "gateway": []}
            for index in range(times):
                for side in (direct, through) if index % 2 else (through, direct):
                    turns[side.name] += asyncio.run(_talk(side, numbers, at_once, 20))
            medians = [1000 * statistics.median(turns[name]) for name in ("vLLM", "gateway")]
            added = medians[1] - medians[0]
            cells = f"{medians[0]:.1f} | {medians[1]:.1f} | **{added:.1f}** ({_verdict(added <= _ADDED_MS)})"
            rows.append(f"| {at_once} | {cells} |")
    return [
        "## A turn",
        "",
        f"Conversations of 20 turns with a model server that takes {1000 * _STUB_S:g} ms, without tools. Median",
        f"milliseconds of a turn. Target: the gateway adds at most {_ADDED_MS:g} ms. It writes each turn to disk.",
        "",
        "| agents at once | directly | through the gateway | added |",
        "|---|---|---|---|",
        *rows,
    ]


def _sessions(stack: LocalStack, folder: Path, tokenizer: Path, options: argparse.Namespace) -> list[str]:
    """Measures memory and processor time of the gateway's process."""
    url = _stub(stack)
    lines = [
        "## Many sessions",
        "",
        f"All sessions at once, with a model server that takes {1000 * _STUB_S:g} ms. Each message of a long",
        f"conversation has 1,000 characters. Target: at most {_MEGABYTES} MB in total, without torch as in the image.",
        "",
        "| sessions | turns | requests/s | CPU ms per request | MB after the start | MB at most |",
        "|---|---|---|---|---|---|",
    ]
    for name, sessions, turns in (("short", 64, 2), ("long", options.sessions, 20)):
        place = folder / name
        place.mkdir()
        with _gateway(stack, place, url, tokenizer, sessions) as (service, through):
            pid = service.process.pid
            before, cpu, began = machine.rss(pid), machine.cpu_seconds(pid), time.monotonic()
            asyncio.run(_talk(through, iter(range(sessions)), sessions, turns, long=name == "long"))
            seconds, requests = time.monotonic() - began, sessions * turns
            cpu = (machine.cpu_seconds(pid) - cpu) / requests
            peak = machine.peak_rss(pid)
        verdict = f" ({_verdict(peak <= _MEGABYTES * 1e6)})" if name == "long" else ""
        lines.append(
            f"| {sessions} | {turns} | {requests / seconds:.0f} | {1000 * cpu:.1f} | {before / 1e6:.0f} | "
            f"**{peak / 1e6:.0f}**{verdict} |"
        )
    return lines


async def _talk_for(seconds: float, side: Side, numbers: Iterator[int], agents: int) -> list[int]:
    """Holds conversations with `agents` agents at once. Returns the tokens of each reply within `seconds`."""
    replies: list[int] = []

    async def work(client: openai.AsyncOpenAI) -> None:
        while True:
            number = next(numbers)
            async for _, tokens in _conversation(client, side, number, _TURNS):
                replies.append(tokens)

    async with _client(side) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(work(client) for _ in range(agents)))
    return replies


async def _talk(side: Side, numbers: Iterator[int], agents: int, turns: int, *, long: bool = False) -> list[float]:
    """Holds one conversation per agent, all at once. Returns the seconds of each turn."""

    async def work(client: openai.AsyncOpenAI) -> list[float]:
        return [seconds async for seconds, _ in _conversation(client, side, next(numbers), turns, long=long)]

    async with _client(side) as client:
        found = await asyncio.gather(*(work(client) for _ in range(agents)))
    return [seconds for one in found for seconds in one]


@asynccontextmanager
async def _client(side: Side) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=side.url, api_key="any", timeout=300, max_retries=10) as client:
        yield client


async def _conversation(
    client: openai.AsyncOpenAI, side: Side, number: int, turns: int, *, long: bool = False
) -> AsyncIterator[tuple[float, int]]:
    """Yields the seconds and the tokens of each turn."""
    asked = client.with_options(api_key=side.keys[number % len(side.keys)])
    messages: list[Any] = [{"role": "user", "content": f"Tell me a story about the number {number}."}]
    for turn in range(turns):
        began = time.monotonic()
        answer = await asked.chat.completions.create(model=side.model, messages=messages, max_tokens=64, temperature=1)
        assert answer.usage is not None
        yield time.monotonic() - began, answer.usage.completion_tokens
        more = _TOOL_RESULT.format(turn=turn) if long else "What happened next?"
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": more}]


@contextmanager
def _gateway(
    stack: LocalStack, folder: Path, model_url: str, tokenizer: Path, sessions: int
) -> Iterator[tuple[Service, Side]]:
    """Starts the gateway's process, and stops it at the end of the block."""
    command = [sys.executable, "-m", "benchmarks.served_gateway", model_url, str(tokenizer), str(sessions), str(folder)]
    service = stack.start("gateway", command)
    stack.wait_until(service, (folder / ANSWER).exists, timeout=120)
    served = json.loads((folder / ANSWER).read_text())
    (folder / ANSWER).unlink()
    yield service, Side("gateway", f"{served['url']}/v1", served["keys"], served["model"])
    service.stop(grace=20)


def _stub(stack: LocalStack) -> str:
    """Starts the replacement of the model server, and returns its URL."""
    port = free_port()
    start_stub(stack, port, {"STUB_LATENCY_S": str(_STUB_S), "STUB_LENGTH": str(_LENGTH)})
    return f"http://127.0.0.1:{port}"


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    main()
