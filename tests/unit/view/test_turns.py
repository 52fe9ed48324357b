"""Turns of rollouts, from conversations and from masks, and the tree of their branches."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gristmill_view import turns
from gristmill_view.turns import Turn

SYSTEM, QUESTION = {"role": "system", "content": "Guess."}, {"role": "user", "content": "7?"}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def split(*given: list[dict[str, Any]]) -> tuple[list[Turn], list[list[Turn]]]:
    """Returns the common prompt of conversations, and the rest of each."""
    known = turns.conversations([json.dumps(one) for one in given])
    assert known is not None
    prompt = turns.common_prompt(known)
    return prompt, [one[len(prompt) :] for one in known]


# --- Conversations ---------------------------------------------------------------------------------------------
def test_conversations_are_split_after_their_common_prompt() -> None:
    one = [SYSTEM, QUESTION, said("assistant", "5"), said("user", "higher"), said("assistant", "7")]
    two = [SYSTEM, QUESTION, said("assistant", "5"), said("user", "higher"), said("assistant", "6")]
    prompt, rests = split(one, two)
    assert prompt == [SYSTEM, QUESTION, said("assistant", "5"), said("user", "higher")]
    assert rests == [[said("assistant", "7")], [said("assistant", "6")]]
    prompt, rests = split(one, [SYSTEM, QUESTION, said("assistant", "7")])
    assert prompt == [SYSTEM, QUESTION]
    assert [len(rest) for rest in rests] == [3, 1]


def test_prompt_does_not_end_with_a_reply() -> None:
    same = [QUESTION, said("assistant", "5")]
    more = [*same, said("assistant", "or 6")]
    assert split(more, more)[0] == [QUESTION]


@pytest.mark.parametrize(
    "other",
    [None, "{", "[]", "7", "[7]", json.dumps([QUESTION]), json.dumps([{"content": "x"}]), json.dumps([{"role": 7}])],
)
def test_messages_in_another_form_are_not_a_conversation(other: str | None) -> None:
    good = json.dumps([QUESTION, said("assistant", "5")])
    assert turns.conversations([good, other]) is None


def test_thinking_of_a_reply_is_apart_from_its_answer() -> None:
    assert turns.with_thinking(said("assistant", "<think>a\nb</think> 7")) == {
        "role": "assistant", "content": "7", "thinking": "a\nb",
    }  # fmt: skip
    assert turns.with_thinking(said("user", "a</think>b")) == said("user", "a</think>b")


def test_runs_of_sampled_tokens_are_replies_and_the_rest_is_the_environment() -> None:
    def decode(ids: Sequence[int], plain: bool) -> str:
        return ("" if plain else "!") + " ".join(map(str, ids))

    tokens = list(range(10, 20))
    assert turns.of_mask(tokens, [(2, 4), (6, 9)], decode, 2) == [
        said("assistant", "12 13"),
        said("environment", "!14 15"),
        said("assistant", "16 17 18"),
        said("environment", "!19"),
    ]
    assert turns.of_mask(tokens, [(2, 4), (5, 10)], decode, 2)[-1] == said("assistant", "15 16 17 18 19")


# --- Tool calls ------------------------------------------------------------------------------------------------
def called(arguments: Any, name: str = "add", identity: str | None = "1") -> dict[str, Any]:
    call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_tool_calls_and_reasoning_stay_and_unknown_fields_go() -> None:
    reply = {**called('{"a": 1, "b": "x\\ny"}'), "reasoning_content": "hm", "secret": 1}
    _, ((found,),) = split([QUESTION, reply])
    call = {"id": "1", "name": "add", "arguments": [["a", "1"], ["b", "x\ny"]]}
    assert found == {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "hm"}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"a": [1, 2]}, [("a", "[1, 2]")]),
        ({"a": ["x" * 60]}, [("a", f'[\n "{"x" * 60}"\n]')]),
        ('{"a": 1', [("", '{"a": 1')]),
        ('{"a": 1, "a": 2}', [("", '{"a": 1, "a": 2}')]),
        ("[1]", [("", "[1]")]),
        ("[" * 100_000, [("", "[" * 100_000)]),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", [("a", "[" * 900 + "]" * 900)]),
        ({"a": list(range(9000))}, [("a", json.dumps(list(range(9000))))]),
        ({str(n): n for n in range(60)}, [("", json.dumps({str(n): n for n in range(60)}, indent=1))]),
        (None, []),
        ({}, []),
    ],
)
def test_arguments_of_a_call_are_shown_as_they_can_be_read(given: Any, shown: list[tuple[str, str]]) -> None:
    (call,) = turns.tool_calls(called(given))
    assert (call.name, call.arguments) == ("add", shown)


@pytest.mark.parametrize("value", [7, "x", [7], {"function": "x"}, [{"function": {"name": 7}}], [[]]])
def test_calls_in_another_form_are_shown_as_their_text(value: Any) -> None:
    (call,) = turns.tool_calls({"tool_calls": value})
    assert (call.id, call.name) == (None, "")
    assert call.arguments[0][1]


def answers(*messages: dict[str, Any]) -> list[Any]:
    found = turns.conversations([json.dumps([QUESTION, *messages, said("assistant", "so")])])
    assert found is not None
    return [turn.get("answers", {}).get("name") for turn in found[0] if turn["role"] == "tool"]


def test_result_of_a_tool_names_the_call_that_it_answers() -> None:
    result = {"role": "tool", "content": "3"}
    both = called("{}", "add", "1")
    both["tool_calls"] += called("{}", "sub", "2")["tool_calls"]
    assert answers(both, {**result, "tool_call_id": "2"}, {**result, "tool_call_id": "1"}) == ["sub", "add"]
    assert answers(both, result, result, result) == ["add", "sub", None], "in the order of the calls"
    assert answers(both, {**result, "tool_call_id": "3"}) == [None]
    assert answers(both, called("{}", "mul", "1"), {**result, "tool_call_id": "1"}) == ["mul"], "ids come again"
    without = called("{}", "add", None)
    assert answers(without, {**result, "tool_call_id": "1"}) == ["add"], "a template may leave out the ids"


# --- Branches --------------------------------------------------------------------------------------------------
class Conversation:
    """A conversation whose turns are tokens: a reply is two tokens, another message one."""

    def __init__(self, sequence: int, *messages: str, trained: Sequence[int] = ()) -> None:
        """`messages`: texts; those that begin with "!" are replies. `trained`: places of the replies in `messages`."""
        self.turns: list[Turn] = []
        self.spans: list[turns.Span] = []
        tokens: list[int] = []
        for place, text in enumerate(messages):
            reply = text.startswith("!")
            self.turns.append(said("assistant" if reply else "user", text))
            ids = [sum(map(ord, text)) * 2 + reply] * (2 if reply else 1)
            if place in trained:
                self.spans.append((len(tokens), len(tokens) + 2))
            tokens += ids
        self.branch = turns.Branch(sequence, self.turns, np.array(tokens, np.int32), self.spans)


def tree(*branches: Conversation, prompt: Sequence[str] = ()) -> list[tuple[int | None, list[str], list[int]]]:
    """Returns (parent, texts, sequences) of each node. A trained reply ends with "+", an untrained one with "-"."""
    marks = {True: "+", False: "-", None: ""}
    nodes = turns.tree([one.branch for one in branches], [said("user", text) for text in prompt])
    return [
        (
            node["parent"],
            [turn["content"] + marks[turn.get("trained")] for turn in node["turns"]],
            node["sequences"],
        )
        for node in nodes
    ]


def test_turns_that_branches_begin_with_are_one_node() -> None:
    one = Conversation(4, "q", "!a", "b", "!c", trained=[1, 3])
    two = Conversation(5, "q", "!a", "d", "!e", trained=[3])
    three = Conversation(6, "q", "!a", "d", "!e", "f", "!g", trained=[5])
    four = Conversation(7, "q", "!a", "d", "!e", "h", "!i", trained=[5])
    assert tree(one, two, three, four) == [
        (None, ["q", "!a+"], [4, 5, 6, 7]),
        (0, ["b", "!c+"], [4]),
        (0, ["d", "!e+"], [5, 6, 7]),
        (2, [], [5]),
        (2, ["f", "!g+"], [6]),
        (2, ["h", "!i+"], [7]),
    ]


def test_branch_that_begins_in_another_way_has_its_own_root() -> None:
    one = Conversation(0, "q", "!a", "b", "!c", trained=[1, 3])
    two = Conversation(1, "title?", "!t", trained=[1])
    three = Conversation(2, "q", "!a", "d", "!e", trained=[3])
    assert tree(one, two, three) == [
        (None, ["q", "!a+"], [0, 2]),
        (0, ["b", "!c+"], [0]),
        (0, ["d", "!e+"], [2]),
        (None, ["title?", "!t+"], [1]),
    ]


def test_prompt_of_the_group_is_left_out_and_marked() -> None:
    one, two = Conversation(0, "q", "!a", trained=[1]), Conversation(1, "title?", "!t", trained=[1])
    assert tree(one, two, prompt=["q"]) == [(None, ["!a+"], [0]), (None, ["title?", "!t+"], [1])]
    nodes = turns.tree([one.branch, two.branch], [said("user", "q")])
    assert [node["continues"] for node in nodes] == [True, False]


def test_replies_that_were_sampled_twice_are_two_replies() -> None:
    one, two = (Conversation(n, "q", "!a", "b", f"!{n}", trained=[1, 3]) for n in range(2))
    assert tree(one, two) == [
        (None, ["q"], [0, 1]),
        (0, ["!a+", "b", "!0+"], [0]),
        (0, ["!a+", "b", "!1+"], [1]),
    ]
    same = [Conversation(n, "q", "!a", trained=[1]) for n in range(2)]
    assert tree(*same) == [(None, ["q"], [0, 1]), (0, ["!a+"], [0]), (0, ["!a+"], [1])]


def test_reply_that_no_branch_trains_is_marked() -> None:
    """For example the history that an agent wrote itself."""
    one = Conversation(0, "q", "!a", "b", "!c", trained=[1, 3])
    two = Conversation(1, "short", "!x", "d", "!e", trained=[3])
    assert tree(one, two) == [(None, ["q", "!a+", "b", "!c+"], [0]), (None, ["short", "!x-", "d", "!e+"], [1])]


def test_reply_of_which_only_a_part_is_shared_is_not_a_reply_of_both() -> None:
    one = turns.Branch(0, [], np.array([1, 2, 3, 4, 5], np.int32), [(1, 3), (4, 5)])
    two = turns.Branch(1, [], np.array([1, 2, 3, 6], np.int32), [(3, 4)])
    three = turns.Branch(2, [], np.array([1, 2, 9, 6], np.int32), [(3, 4)])
    assert turns.sampled_spans([one, two, three]) == [[(1, 3), (4, 5)], [(1, 3), (3, 4)], [(3, 4)]]


def test_replies_are_not_marked_if_they_cannot_be_told_apart() -> None:
    one = Conversation(0, "q", "!a", trained=[1])
    one.branch = dataclasses.replace(one.branch, trained=[(0, 1), (2, 3)])
    assert tree(one, Conversation(1, "z", "!b", trained=[1])) == [(None, ["q", "!a"], [0]), (None, ["z", "!b+"], [1])]


@pytest.mark.slow
def test_tree_of_a_long_rollout_is_made_without_recursion() -> None:
    """A retry at each of 120 turns: each node is deeper than the one before."""
    texts = [text for n in range(120) for text in (f"q{n}", f"!a{n}")]
    main = Conversation(0, *texts, trained=range(1, 240, 2))
    retries = [Conversation(n, *texts[: 2 * n], f"other{n}", f"!r{n}", trained=[2 * n + 1]) for n in range(1, 120)]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        nodes = tree(main, *retries)
    finally:
        sys.setrecursionlimit(limit)
    assert len(nodes) == 2 * 119 + 1
    assert sorted(text for _, found, _ in nodes for text in found if text.startswith("!a")) == sorted(
        f"!a{n}+" for n in range(120)
    )
