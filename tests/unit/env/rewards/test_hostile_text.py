"""The time that built-in rewards take for a text grows linearly, whatever a model writes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

SIZE = 50_000
"""Characters. One quadratic search in a text of this size exceeds the limit alone."""
CPU_LIMIT = 60
"""Seconds of processor time for all texts and rewards together, which need a few seconds."""

PIECES = [
    r"\[ x ",
    r"\( x ",
    "$$ x ",
    "$",
    r"\[ \( ",
    r"\[",
    "{",
    "}",
    "(",
    r"\{",
    r"\boxed{",
    r"\boxed{1}, ",
    r"\boxed{}",
    r"\boxed ",
    r"\frac",
    r"\frac{1",
    r"\frac{",
    r"\text{",
    r"\text ",
    r"\left ",
    r"\begin{pmatrix}",
    r"\begin{cases} 1 \\ ",
    r"\\ [",
    r"\\[1",
    "1,111,",
    "1,",
    "9",
    "9.",
    "9/",
    "-",
    "9!",
    "_1",
    "0x1",
    "1 ",
    "**",
    "**a",
    "#### ",
    "<answer>",
    "</answer>",
    "<answer>1</answer>",
    "<think>",
    "</think>",
    "answer is ",
    "answer ",
    "answer:",
    "A, B or ",
    "1. ",
    "- ",
    "Step 1.",
    "step1",
    "Then. ",
    " ",
    "\n",
    "a",
    "a ",
    ".",
    "\u4f60",
    "\u0301",
    "\u0301\u0323",
    "\uff17",
    "\x00",
    "%",
    "'",
    "=",
    "x=1;",
]

CHILD = """
import asyncio, json, sys
from gristmill_env.answers.comparison import canonical_answer, read_answer
from gristmill_env.answers.extraction import final_answer, gold_answer, last_mathematics
from gristmill_env.rewards import create_reward

pieces, size = json.load(sys.stdin)
names = ["accuracy", "format", "tag_count", "reasoning_steps", "repetition_penalty", "exact_match", "mcq"]
rewards = [create_reward(name, {"strict": True} if name == "format" else {}) for name in names]
for piece in pieces:
    print(ascii(piece), flush=True)
    text = piece * (size // len(piece))
    for one in (text, "<answer>" + text, "#### The answer is " + text):
        last_mathematics(one), gold_answer(one), final_answer(one, last_number=True)
    read_answer(text), canonical_answer(text[:2000])
    for reward in rewards:
        reward.score([text], answer="B")
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [PIECES[::5], pytest.param(PIECES, marks=pytest.mark.long)], ids=["some", "all"])
def test_built_in_rewards_take_linear_time_for_every_repeated_text(pieces: list[str]) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([pieces, SIZE]),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stdout.splitlines()[-1:] == ["done"], child.stdout[-200:] + child.stderr[-2000:]
