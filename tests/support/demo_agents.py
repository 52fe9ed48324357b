"""A group of an agent for the synthetic runs of the page: rollouts of one, two and three branches with tool calls."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any, Final

from gristmill_view.groups import group_json

ANSWER: Final = "57"
_REWARDS: Final = (0.0, 1.0, 0.5)
Message = dict[str, Any]


def agent_group(group_id: str, step: int, hostile: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a group as the page reads it. `hostile`: texts in all places that a model or a client fills."""
    rows = [
        _row(group_id, step, sequence, rollout, branch, conversations)
        for rollout, conversations in enumerate(_rollouts(list(hostile)))
        for sequence, branch in enumerate(range(len(conversations)), start=rollout * (rollout + 1) // 2)
    ]
    return group_json(rows, None)


def branches_of(rollout: int) -> int:
    """Returns the number of branches of a rollout of the group."""
    return rollout + 1


def _rollouts(hostile: list[str]) -> list[list[list[Message]]]:
    """Returns the conversations of the branches of each rollout."""
    text = hostile or ["What is 26 + 31?", "I add both numbers.", "The sum is 57.", "57"]
    question: list[Message] = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": text[0]}]
    name = hostile[1] if hostile else "add"
    calls = [_call("call_1", name, {"left": 26, hostile[2] if hostile else "right": hostile or [31]})]
    calls += [_call("call_2", "note", "{not JSON" + (hostile[3] if hostile else ""))]
    ask: Message = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": text[1]}
    results: list[Message] = [{"role": "tool", "tool_call_id": "call_2", "content": "noted"}]
    results += [{"role": "tool", "tool_call_id": "call_1", "content": text[3]}]
    main = [*question, ask, *results, _said(text[2])]
    retry = [*question, ask, *results, {"role": "user", "content": "Again."}, _said("It is 57, again.")]
    side = [{"role": "user", "content": "A title?"}, _said("<think>short</think>Sums")]
    return [[main], [main, retry], [main, retry, side]]


def _call(identity: str, name: str, arguments: Any) -> Message:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _row(
    group_id: str, step: int, sequence: int, rollout: int, branch: int, conversations: list[list[Message]]
) -> dict[str, Any]:
    """Returns a row of the table of rollouts. The first branch trains the reply that the second one shares."""
    tokens: list[int] = []
    replies: list[int] = []
    for place, message in enumerate(conversations[branch]):
        ids = [zlib.crc32(word.encode()) % 1000 for word in json.dumps(message).split()[:40]]
        shared = branch == 1 and place == 2
        if message["role"] == "assistant" and not shared:
            replies += [len(tokens), len(tokens) + len(ids)]
        tokens += ids
    sampled = [False] * len(tokens)
    for start, end in zip(replies[::2], replies[1::2], strict=True):
        sampled[start:end] = [True] * (end - start)
    return {
        "group_id": group_id, "row": int(group_id[1:]), "source": None, "index": None, "env_id": "env-1",
        "step": step,
        "prompt": "What is 26 + 31?", "answer": ANSWER, "outcome": "trained", "outcome_reason": None, "error": None,
        "staleness": 0, "tokens": tokens, "mask": sampled, "sampler_logprobs": [-0.2] * len(tokens),
        "trainer_logprobs": [-0.2001] * len(tokens), "entropy": [0.3] * len(tokens), "advantages": None,
        "advantage": _REWARDS[rollout] - 0.5, "completion": conversations[branch][-1]["content"],
        "messages": json.dumps(conversations[branch]), "sequence": sequence, "rollout": rollout,
        "prompt_tokens": replies[0], "replies": replies, "turns": len(replies) // 2, "reward": _REWARDS[rollout],
        "reward_parts": [("episode", _REWARDS[rollout])], "answer_searched": True, "extracted": ANSWER,
        "finish_reason": "length" if sequence == 4 else "stop", "version_first": f"1.{step - 1}",
        "version_last": f"1.{step - 1}",
    }  # fmt: skip
