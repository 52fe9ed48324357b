"""An example has the same form for both protocols, and a bounded size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.groups import make_group
from tests.unit.api.atropos.groups import full, small

from gristmill import GroupError, TrajectoryGroup
from gristmill_api.atropos.fast_parse import from_message
from gristmill_api.atropos.messages import ScoredData
from gristmill_api.conversion import to_group
from gristmill_api.examples import MAX_CHARACTERS, MAX_SEQUENCES, MAX_TOKENS, example

LARGEST = 1 << 20
"""Bytes of the largest example in JSON: well above the bounds on its parts."""


def shown(stored: bytes) -> dict[str, Any]:
    text = example("g00000001", stored)
    assert len(text) < LARGEST
    found: dict[str, Any] = json.loads(text)
    return found


def stored(**fields: Any) -> bytes:
    return from_message(ScoredData.model_validate({**small(), **fields})).text


def test_small_group_is_shown_whole() -> None:
    group = make_group()
    found = shown(group.encode())
    assert (found["sequences"], found["lengths"], found["cut"]) == (2, [7, 5], False)
    assert found["tokens"] == [group.tokens[:7].tolist(), group.tokens[7:].tolist()]
    assert found["trained"] == [[False] * 3 + [True] * 4, [False] * 3 + [True] * 2]


def test_example_has_the_rollout_of_each_shown_sequence() -> None:
    assert shown(make_group().encode())["rollouts"] is None
    assert shown(make_group(rollouts=[0, 0], rewards=[1, 1]).encode())["rollouts"] == [0, 0]
    many = MAX_SEQUENCES + 2
    long = make_group(lengths=[(1, 1)] * many, rewards=[0] * many, rollouts=[number // 2 for number in range(many)])
    assert shown(long.encode())["rollouts"] == [number // 2 for number in range(MAX_SEQUENCES)]


@pytest.mark.parametrize("group", [full(), small(), {**full(), "env_id": None}])
def test_group_of_atropos_has_the_example_of_its_binary_form(group: dict[str, Any]) -> None:
    text = from_message(ScoredData.model_validate(group)).text
    binary = to_group(text, "g00000001", "run", 1, "1.0").encode()
    theirs, ours = shown(text), shown(binary)
    assert theirs == {**ours, "version": None, "finish_reasons": []}
    assert not theirs["cut"]


@pytest.mark.parametrize("space", ["", " ", "\n\t "])
def test_example_does_not_depend_on_white_space_in_the_stored_text(space: str) -> None:
    text = stored().replace(b",", f"{space},{space}".encode()).replace(b"[", f"{space}[{space}".encode())
    text = text.replace(b"]", f"{space}]{space}".encode())
    assert shown(text) == shown(stored())


def long_groups() -> list[bytes]:
    """A binary group and an Atropos group, each of two sequences: a very long one and a short one."""
    count = 50_000
    group = make_group(lengths=[(count, 4), (3, 2)])
    tokens = [list(range(count)), [1, 2]]
    return [group.encode(), stored(tokens=tokens, masks=tokens, scores=[1.0, 0.0])]


@pytest.mark.parametrize("body", long_groups(), ids=["v1", "atropos"])
def test_long_sequence_is_cut(body: bytes) -> None:
    found = shown(body)
    assert found["cut"]
    assert found["lengths"][0] >= 50_000
    assert [len(row) for row in found["tokens"]] == [MAX_TOKENS // 2, found["lengths"][1]]
    assert [len(row) for row in found["trained"]] == [MAX_TOKENS // 2, found["lengths"][1]]


def many_sequences() -> list[bytes]:
    count = 5_000
    group = make_group(lengths=[(1, 1)] * count)
    return [group.encode(), stored(tokens=[[1, 2]] * count, masks=[[-100, 2]] * count, scores=[1.0] * count)]


@pytest.mark.parametrize("body", many_sequences(), ids=["v1", "atropos"])
def test_only_the_first_sequences_are_shown(body: bytes) -> None:
    found = shown(body)
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
        [[{"role": "user", "content": {str(number): number for number in range(200_000)}}]],
        [[{"role": "user", "content": ""}] * 200_000],
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
    text = stored().replace(b'"messages":null', b'"messages":' + json.dumps(messages).encode())
    binary = make_group(lengths=[(2, 2)])
    for body in (text, TrajectoryGroup(**{**vars(binary), "messages": messages}).encode()):
        found = shown(body)
        assert found["cut"]
        assert found["messages"][0][0] == messages[0][0]
        assert "nested too deep" in json.dumps(found["messages"])


def test_group_of_one_long_row_makes_no_object_per_token() -> None:
    """If only a part of a row of Atropos' JSON is shown, only that part is read."""
    row = b"[" + b",".join([b"7"] * 200_000) + b"]"
    text = stored().replace(b"[1,2]", row).replace(b"[-100,2]", row)
    found = shown(text)
    assert (found["lengths"], len(found["tokens"][0])) == ([200_000], MAX_TOKENS)


def test_bytes_that_are_not_a_group_are_an_error() -> None:
    with pytest.raises(GroupError):
        example("g", b"\x00")
