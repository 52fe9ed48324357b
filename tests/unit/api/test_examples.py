"""An example has a bounded size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support.groups import make_group

from gristmill import GroupError
from gristmill_api.examples import MAX_CHARACTERS, MAX_SEQUENCES, MAX_TOKENS, example

LARGEST = 1 << 20
"""Bytes of the largest example in JSON: well above the bounds on its parts."""


def shown(stored: bytes) -> dict[str, Any]:
    text = example(stored)
    assert len(text) < LARGEST
    found: dict[str, Any] = json.loads(text)
    return found


def stored(messages: list[Any]) -> bytes:
    return replace(make_group(lengths=[(2, 2)]), messages=messages).encode()


def test_small_group_is_shown_whole() -> None:
    group = make_group()
    found = shown(group.encode())
    assert (found["sequences"], found["lengths"], found["cut"]) == (2, [7, 5], False)
    assert found["tokens"] == [group.tokens[:7].tolist(), group.tokens[7:].tolist()]
    assert found["trained"] == [[False] * 3 + [True] * 4, [False] * 3 + [True] * 2]


def test_group_of_a_run_without_weights_has_no_version() -> None:
    assert [shown(make_group(version=version).encode())["version"] for version in ("0.0", "1.0")] == [None, "1.0"]


def test_example_has_the_rollout_of_each_shown_sequence() -> None:
    assert shown(make_group().encode())["rollouts"] is None
    assert shown(make_group(rollouts=[0, 0], rewards=[1, 1]).encode())["rollouts"] == [0, 0]
    many = MAX_SEQUENCES + 2
    long = make_group(lengths=[(1, 1)] * many, rewards=[0] * many, rollouts=[number // 2 for number in range(many)])
    assert shown(long.encode())["rollouts"] == [number // 2 for number in range(MAX_SEQUENCES)]


def test_long_sequence_is_cut() -> None:
    found = shown(make_group(lengths=[(50_000, 4), (3, 2)]).encode())
    assert found["cut"]
    assert found["lengths"] == [50_004, 5]
    assert [len(row) for row in found["tokens"]] == [MAX_TOKENS // 2, 5]
    assert [len(row) for row in found["trained"]] == [MAX_TOKENS // 2, 5]


def test_only_the_first_sequences_are_shown() -> None:
    found = shown(make_group(lengths=[(1, 1)] * 5_000).encode())
    assert found["cut"]
    assert found["sequences"] == 5_000
    assert {len(found[name]) for name in ("tokens", "trained", "rewards", "lengths")} == {MAX_SEQUENCES}


def test_long_messages_are_cut_with_a_marker() -> None:
    text = "x" * (MAX_CHARACTERS + 1000)
    found = shown(stored(messages=[[{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]]))
    assert found["cut"]
    ((message,),) = found["messages"]
    content = message["content"]
    assert content.endswith(" characters cut]")
    assert len(content) < MAX_CHARACTERS + 50
    kept = len(content.partition("[")[0])
    assert content == f"{'x' * kept}[... {len(text) - kept} characters cut]"


@pytest.mark.parametrize(
    "messages",
    [
        [[{"role": "user", "content": [0] * 500_000}]],
        [[{"role": "user", "content": {str(number): number for number in range(70_000)}}]],
        [[{"role": "user", "content": ""}] * 40_000],
    ],
    ids=["numbers", "keys", "messages"],
)
@pytest.mark.slow
def test_messages_of_many_small_parts_are_cut(messages: list[Any]) -> None:
    assert shown(stored(messages=messages))["cut"]


@pytest.mark.parametrize("depth", [250, 900])
def test_example_of_a_group_that_was_stored_with_deep_messages_is_cut(depth: int) -> None:
    deep: Any = "end"
    for _ in range(depth):
        deep = [deep]
    messages = [[{"role": "user", "content": "first"}, {"role": "user", "content": deep}]]
    found = shown(stored(messages=messages))
    assert found["cut"]
    assert found["messages"][0][0] == messages[0][0]
    assert "nested too deep" in json.dumps(found["messages"])


def test_bytes_that_are_not_a_group_are_an_error() -> None:
    with pytest.raises(GroupError):
        example(b"\x00")
