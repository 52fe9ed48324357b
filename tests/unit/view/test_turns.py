"""Turns of completions, from conversations and from masks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from gristmill.view import turns

SYSTEM, QUESTION = {"role": "system", "content": "Guess."}, {"role": "user", "content": "7?"}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_conversations_are_split_after_their_common_prompt() -> None:
    one = [SYSTEM, QUESTION, said("assistant", "5"), said("user", "higher"), said("assistant", "7")]
    two = [SYSTEM, QUESTION, said("assistant", "5"), said("user", "higher"), said("assistant", "6")]
    prompt, rests = turns.split([json.dumps(one), json.dumps(two)])
    assert prompt == [SYSTEM, QUESTION, said("assistant", "5"), said("user", "higher")]
    assert rests == [[said("assistant", "7")], [said("assistant", "6")]]
    prompt, rests = turns.split([json.dumps(one), json.dumps([SYSTEM, QUESTION, said("assistant", "7")])])
    assert prompt == [SYSTEM, QUESTION]
    assert [len(rest) for rest in rests] == [3, 1]


def test_prompt_does_not_end_with_a_reply() -> None:
    same = [QUESTION, said("assistant", "5")]
    more = [*same, said("assistant", "or 6")]
    assert turns.split([json.dumps(more), json.dumps(more)])[0] == [QUESTION]


@pytest.mark.parametrize(
    "other",
    [None, "{", "[]", "7", "[7]", json.dumps([QUESTION]), json.dumps([{"content": "x"}]), json.dumps([{"role": 7}])],
)
def test_messages_in_another_form_are_not_a_conversation(other: str | None) -> None:
    good = json.dumps([QUESTION, said("assistant", "5")])
    assert turns.split([good, other]) == (None, [])


def test_tool_calls_and_reasoning_stay_and_unknown_fields_go() -> None:
    call = [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]
    reply = {"role": "assistant", "content": None, "tool_calls": call, "reasoning_content": "hm", "secret": 1}
    _, ((found,),) = turns.split([json.dumps([QUESTION, reply])])
    assert found == {"role": "assistant", "content": "", "tool_calls": call, "thinking": "hm"}


def test_thinking_of_a_reply_is_apart_from_its_answer() -> None:
    assert turns.with_thinking(said("assistant", "<think>a\nb</think> 7")) == {
        "role": "assistant", "content": "7", "thinking": "a\nb",
    }  # fmt: skip
    assert turns.with_thinking(said("user", "a</think>b")) == said("user", "a</think>b")


def test_runs_of_sampled_tokens_are_replies_and_the_rest_is_the_environment() -> None:
    def decode(ids: Sequence[int], plain: bool) -> str:
        return ("" if plain else "!") + " ".join(map(str, ids))

    tokens = list(range(10, 20))
    assert turns.of_mask(tokens, [2, 4, 6, 9], decode) == [
        said("assistant", "12 13"),
        said("environment", "!14 15"),
        said("assistant", "16 17 18"),
        said("environment", "!19"),
    ]
    assert turns.of_mask(tokens, [2, 4, 5, 10], decode)[-1] == said("assistant", "15 16 17 18 19")
