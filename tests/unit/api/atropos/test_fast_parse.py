"""The fast path stores the same as the slow path, which stores what Atropos would store."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.api.atropos.groups import KEYS, full, small

from gristmill.group import MAX_DEPTH
from gristmill_api.atropos.fast_parse import Scored, from_message, read_list, read_one
from gristmill_api.atropos.messages import Mismatch, ScoredData
from gristmill_api.http.fast_route import NeedsSlowPath


def slow(value: Any) -> Scored:
    return from_message(ScoredData.model_validate(value))


def shown(text: bytes) -> str:
    """Distinguishes 1 from 1.0."""
    return json.dumps(json.loads(text))


@pytest.mark.parametrize("group", [full(), small(), {**small(), "advantages": [], "messages": [], "overrides": []}])
def test_fast_path_stores_the_same_text_as_the_slow_path(group: dict[str, Any]) -> None:
    fast = read_one(json.dumps({**group, "unknown": [1]}).encode())
    assert shown(fast.text) == shown(slow(group).text)
    assert tuple(json.loads(fast.text)) == KEYS
    assert (fast.sequences, fast.tokens, fast.env_id) == (
        len(group["tokens"]),
        sum(map(len, group["tokens"])),
        group.get("env_id"),
    )


def test_fast_path_reads_a_list_group_by_group() -> None:
    found = read_list(json.dumps([full(), small()]).encode())
    assert [shown(group.text) for group in found] == [shown(slow(group).text) for group in (full(), small())]
    assert read_list(b"[]") == []


def test_fast_path_stores_ints_in_float_fields_as_floats() -> None:
    ints = {"scores": [1], "inference_logprobs": [[1, -2]], "advantages": [[1.5, 0]], "ref_logprobs": [[0, 1e-7]]}
    group = {**small(), **ints}
    stored = json.loads(read_one(json.dumps(group).encode()).text)
    for name in ("scores", "inference_logprobs", "advantages", "ref_logprobs"):
        values = stored[name] if name == "scores" else stored[name][0]
        assert all(isinstance(value, float) for value in values), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", '[["1", 2]]'),
        ("tokens", "[[1.0, 2]]"),
        ("tokens", "[[true, 2]]"),
        ("tokens", "[[1e0, 2]]"),
        ("masks", "null"),
        ("scores", '["1"]'),
        ("scores", "[NaN]"),
        ("inference_logprobs", "[[NaN, 1.0]]"),
        ("inference_logprobs", "[[1e999, 1.0]]"),
        ("inference_logprobs", "[[1.0e999, 1.0]]"),
        ("inference_logprobs", "[[null, 1.0]]"),
        ("advantages", "[1.0]"),
        ("env_id", "1.0"),
        ("env_id", '"1"'),
        ("messages", '[[{"role": "user"}]]'),
        ("images", "NaN"),
        ("images", "1e999"),
        ("images", '"\\ud800"'),
        ("overrides", '[{"a": Infinity}]'),
    ],
)
def test_value_that_needs_a_conversion_needs_the_slow_path(name: str, value: str) -> None:
    text = {key: json.dumps(item) for key, item in small().items()} | {name: value}
    body = "{" + ",".join(f'"{key}":{item}' for key, item in text.items()) + "}"
    with pytest.raises(NeedsSlowPath):
        read_one(body.encode())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"tokens": [[1]]}', b'{"tokens": [[1]]}\xff', b"[[" * 5000]
)
def test_body_that_is_not_a_group_needs_the_slow_path(body: bytes) -> None:
    with pytest.raises(NeedsSlowPath):
        read_one(body)
    if body != b"[]":
        with pytest.raises(NeedsSlowPath):
            read_list(body)


def test_text_that_is_not_utf_8_needs_the_slow_path() -> None:
    body = json.dumps({**small(), "images": "?"}).encode().replace(b"?", b"\xff")
    with pytest.raises(NeedsSlowPath):
        read_one(body)


def _with(**changes: Any) -> dict[str, Any]:
    return {**small(), **changes}


MISMATCHES = [
    (_with(tokens=[], masks=[], scores=[]), ("tokens",)),
    (_with(masks=[[1, 2], [1]]), ("masks",)),
    (_with(masks=[[1]]), ("masks", 0)),
    (_with(scores=[]), ("scores",)),
]


@pytest.mark.parametrize(("group", "where"), MISMATCHES)
def test_required_field_that_does_not_fit_is_refused(group: dict[str, Any], where: tuple[Any, ...]) -> None:
    with pytest.raises(Mismatch) as fast:
        read_one(json.dumps(group).encode())
    with pytest.raises(Mismatch) as slowly:
        slow(group)
    assert fast.value.where == slowly.value.where == where


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(Mismatch) as refused:
        slow(_with(scores=[math.nan]))
    assert refused.value.where == ("scores",)


TEACHER = {"distill_token_ids": [[[1], [2]]], "distill_logprobs": [[[-1.0], [-1.0, -1.0]]]}
MISFITS: list[dict[str, Any]] = [
    {"inference_logprobs": [[-1.0]]},
    {"inference_logprobs": [[-1.0, -1.0], [-1.0]]},
    {"ref_logprobs": [[]]},
    {"advantages": [[0.0, 0.0, 0.0]]},
    {"advantages": [[0, 0, 0]], "ref_logprobs": [[1, 2]]},
    {"messages": [[], []]},
    {"overrides": [{}, {}]},
    {"distill_token_ids": [[[1]]]},
    {"distill_logprobs": [[[-1.0], [-1.0]], []]},
    TEACHER,
]
FITTING = {"ref_logprobs": [[1, 2]]}


@pytest.mark.parametrize("fields", MISFITS)
def test_optional_field_that_does_not_fit_is_left_out(fields: dict[str, Any]) -> None:
    names = {name for name in fields if fields[name] != FITTING.get(name)}
    fast, slowly = read_one(json.dumps(_with(**fields)).encode()), slow(_with(**fields))
    assert set(fast.left_out) == set(slowly.left_out) == names
    assert shown(fast.text) == shown(slowly.text) == shown(slow(_with(**fields | dict.fromkeys(names))).text)


@pytest.mark.parametrize(
    "fields",
    [
        {"inference_logprobs": [[1.0, math.inf]]},
        {"advantages": [[math.nan, 0.0]]},
        {"distill_token_ids": [[[], [7]]], "distill_logprobs": [[[], [-math.inf]]]},
        {"images": {"a": math.nan}},
        {"images": "\ud800"},
        {"messages": [[{"role": "user", "content": "\udfff"}]]},
        {"generation_params": {"temperature": math.nan}},
        {"overrides": [{"a": math.inf}], "group_overrides": {"\ud800": 1}},
    ],
)
def test_optional_field_that_json_cannot_hold_is_left_out(fields: dict[str, Any]) -> None:
    found = slow(_with(**fields))
    assert set(found.left_out) == set(fields)
    assert shown(found.text) == shown(slow(_with(**dict.fromkeys(fields))).text)


def nested(depth: int) -> Any:
    """Returns this many lists and objects inside each other, next to brackets in text."""
    value: Any = '[{"[\\' * 100
    for level in range(depth):
        value = [value, "]"] if level % 2 else {'"[': value}
    return value


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 300, 800])
@pytest.mark.parametrize(
    ("name", "outer", "wrap"),
    [
        ("messages", 3, lambda value: [[{"role": "user", "content": value}]]),
        ("generation_params", 1, lambda value: {"a": value}),
        ("overrides", 2, lambda value: [{"a": value}]),
        ("group_overrides", 1, lambda value: {"a": value}),
        ("images", 1, lambda value: [value]),
    ],
)
def test_optional_field_that_is_nested_too_deep_is_left_out(
    name: str, outer: int, wrap: Callable[[Any], Any], depth: int
) -> None:
    fields = {name: wrap(nested(depth - outer))}
    left_out = (name,) if depth > MAX_DEPTH else ()
    fast, slowly = read_one(json.dumps(_with(**fields)).encode()), slow(_with(**fields))
    assert fast.left_out == slowly.left_out == left_out
    assert shown(fast.text) == shown(slowly.text)
    assert json.loads(fast.text)[name] == (None if left_out else fields[name])


VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 1e-7, "1", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=3))
@pytest.mark.slow
def test_every_body_that_the_fast_path_reads_has_the_same_text_on_the_slow_path(changes: dict[str, Any]) -> None:
    body = json.dumps({**small(), **changes}).encode()
    try:
        fast = read_one(body)
    except (NeedsSlowPath, Mismatch):
        return
    try:
        slowly = slow(json.loads(body))
    except (ValidationError, Mismatch) as error:
        raise AssertionError(f"only the fast way takes {body!r}") from error
    assert shown(fast.text) == shown(slowly.text)
