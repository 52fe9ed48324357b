"""The fast path stores the same as the slow path, and a batch returns what Atropos' server would return."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.api.atropos.groups import KEYS, full, returned, small

from gristmill.group_checks import MAX_DEPTH
from gristmill_api.atropos.conversion import SubmittedGroup
from gristmill_api.atropos.messages import Mismatch, ScoredData
from gristmill_api.atropos.parse import from_message, read_list, read_one
from gristmill_api.http.fast_route import NeedsSlowPath


def slow(value: Any) -> SubmittedGroup:
    return from_message(ScoredData.model_validate(value))


def shown(group: SubmittedGroup) -> str:
    """Distinguishes 1 from 1.0."""
    return json.dumps(json.loads(returned(group)))


@pytest.mark.parametrize("group", [full(), small(), {**small(), "advantages": [], "messages": [], "overrides": []}])
def test_fast_path_stores_the_same_as_the_slow_path(group: dict[str, Any]) -> None:
    fast = read_one(json.dumps({**group, "unknown": [1]}).encode())
    assert shown(fast) == shown(slow(group))
    assert tuple(json.loads(returned(fast))) == KEYS
    assert (fast.sequences, fast.tokens, fast.env_id) == (
        len(group["tokens"]),
        sum(map(len, group["tokens"])),
        group.get("env_id"),
    )


def test_fast_path_reads_a_list_group_by_group() -> None:
    found = read_list(json.dumps([full(), small()]).encode())
    assert [shown(group) for group in found] == [shown(slow(group)) for group in (full(), small())]
    assert read_list(b"[]") == []


def test_fast_path_stores_ints_in_float_fields_as_floats() -> None:
    ints = {"scores": [1], "inference_logprobs": [[1, -2]], "advantages": [[1.5, 0]], "ref_logprobs": [[0, 1e-7]]}
    group = {**small(), **ints}
    stored = json.loads(returned(read_one(json.dumps(group).encode())))
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
    (_with(tokens=[[1, 2], [3, -5]], masks=[[1, 2], [3, 4]], scores=[0.0, 1.0]), ("tokens", 1)),
    (_with(tokens=[[2**31, 2]]), ("tokens", 0)),
    (_with(tokens=[[1, 2**64]]), ("tokens",)),
    (_with(masks=[[2**64, 2]]), ("masks",)),
    (_with(masks=[[-100, -100]]), ("masks",)),
    (_with(scores=[1e39]), ("scores",)),
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
    assert shown(fast) == shown(slowly) == shown(slow(_with(**fields | dict.fromkeys(names))))


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
    assert shown(found) == shown(slow(_with(**dict.fromkeys(fields))))


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
    assert shown(fast) == shown(slowly)
    assert json.loads(returned(fast))[name] == (None if left_out else fields[name])


@pytest.mark.slow
@given(st.data())
def test_batch_returns_every_value_that_was_sent(data: st.DataObject) -> None:
    """Also values that the binary group rounds, narrows or has no place for."""
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))

    def by_token(values: st.SearchStrategy[Any]) -> Any:
        return [data.draw(st.lists(values, min_size=length, max_size=length)) for length in lengths]

    number = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1.0, -0.5, 0.1, 1e-300, 1e300])
    sent: dict[str, Any] = dict.fromkeys(KEYS)
    sent["tokens"] = by_token(st.integers(0, 2**31 - 1))
    sent["masks"] = [[data.draw(st.sampled_from([-100, token, 1])) for token in row] for row in sent["tokens"]]
    sent["masks"][0][0] = sent["tokens"][0][0]
    sent["scores"] = data.draw(st.lists(st.floats(-1e30, 1e30), min_size=len(lengths), max_size=len(lengths)))
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        sent[name] = data.draw(st.sampled_from([None, [], by_token(number)]))
    count = data.draw(st.sampled_from([0, 1, 2]))
    if count:
        sent["distill_token_ids"] = by_token(st.lists(st.integers(-1, 2**33), min_size=count, max_size=count))
        sent["distill_logprobs"] = by_token(st.lists(number, min_size=count, max_size=count))
    value = st.none() | st.sampled_from([[], 2**70, -(2**63), "é", 0.1, {"a": [True, 1, 1.0]}])
    sent["images"] = data.draw(value)
    sent["generation_params"] = data.draw(st.none() | st.dictionaries(st.sampled_from(["temperature", "x"]), value))
    sent["messages"] = data.draw(st.sampled_from([None, [], [[{"role": "user", "content": 2**70}]]]))
    sent["overrides"] = data.draw(st.sampled_from([None, [], [{}], [{"set_advantage_to_zero": True}]]))
    sent["group_overrides"] = data.draw(st.sampled_from([None, {}, {"id": 2**65}]))
    sent["env_id"] = data.draw(st.sampled_from([None, 0, 7, -1, 2**70]))
    for group in (read_one(json.dumps(sent).encode()), slow(sent)):
        assert group.left_out == ()
        assert shown(group) == json.dumps(sent)


VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 1e-7, "1", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=3))
@pytest.mark.slow
def test_every_body_that_the_fast_path_reads_is_the_same_on_the_slow_path(changes: dict[str, Any]) -> None:
    body = json.dumps({**small(), **changes}).encode()
    try:
        fast = read_one(body)
    except (NeedsSlowPath, Mismatch):
        return
    try:
        slowly = slow(json.loads(body))
    except (ValidationError, Mismatch) as error:
        raise AssertionError(f"only the fast way takes {body!r}") from error
    assert shown(fast) == shown(slowly)
