"""The group's bytes: decoding returns the encoded group, and a group that cannot be trained on is refused with the
reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill import GroupError, PolicyVersion, TrajectoryGroup, VersionSpan
from gristmill.group_checks import MAX_DEPTH, check_submitted


@pytest.mark.slow
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=9), seed=st.integers(0, 99)
)
def test_decode_returns_the_encoded_group(lengths: list[tuple[int, int]], seed: int) -> None:
    group = make_group(lengths=lengths, seed=seed)
    decoded = TrajectoryGroup.decode(group.encode())
    for field in dataclasses.fields(group):
        before, after = getattr(group, field.name), getattr(decoded, field.name)
        if isinstance(before, np.ndarray):
            np.testing.assert_array_equal(before, after)
            assert before.dtype == after.dtype
        else:
            assert before == after


def test_decode_ignores_unknown_keys() -> None:
    wire = msgspec.msgpack.decode(make_group().encode())
    wire["from_the_future"] = [1, 2]
    assert TrajectoryGroup.decode(msgspec.msgpack.encode(wire)).group_id == "g00000001"


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_decode_refuses_truncated_bytes(cut: int) -> None:
    with raises(GroupError, "not_a_group"):
        TrajectoryGroup.decode(make_group().encode()[:cut])


def _broken(**changes: Any) -> bytes:
    wire = msgspec.msgpack.decode(make_group(lengths=[(2, 3), (2, 1)]).encode())
    return msgspec.msgpack.encode(wire | changes)


def _i4(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def _f4(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("body", "code", "values"),
    [
        (_broken(format=2), "group_format", {}),
        (_broken(rollouts=_i4(0)), "length_mismatch", {"field": "rollouts"}),
        (_broken(rollouts=_i4(0, 1, 2)), "length_mismatch", {"field": "rollouts"}),
        (_broken(rollouts=b"123"), "length_mismatch", {"field": "rollouts"}),
        (_broken(rollouts=_i4(1, 2)), "rollout_order", {"sequence": 0}),
        (_broken(rollouts=_i4(-1, 0)), "rollout_order", {"sequence": 0}),
        (_broken(rollouts=_i4(0, 2)), "rollout_order", {"sequence": 1}),
        (_broken(rollouts=_i4(0, -1)), "rollout_order", {"sequence": 1}),
        (_broken(rollouts=_i4(0, 0), rewards=_f4(1, 2)), "rollout_rewards", {"field": "rewards", "sequence": 1}),
        (
            _broken(rollouts=_i4(0, 0), rewards=_f4(1, 1), reward_parts={"length": [1.0, None]}),
            "rollout_rewards",
            {"field": "reward_parts['length']", "sequence": 1},
        ),
        (_broken(lengths=np.array([5, 9], "<i4").tobytes()), "length_mismatch", {"field": "lengths"}),
        (_broken(lengths=np.array([8, 0], "<i4").tobytes()), "sequence_length", {}),
        (_broken(lengths=b""), "no_sequences", {}),
        (_broken(tokens=b"123"), "length_mismatch", {"field": "tokens"}),
        (_broken(tokens=np.full(8, -1, "<i4").tobytes()), "negative_token", {}),
        (_broken(logprobs=np.full(8, np.nan, "<f4").tobytes()), "not_finite", {"field": "logprobs"}),
        (_broken(logprobs=np.full(8, 0.5, "<f4").tobytes()), "positive_logprob", {}),
        (_broken(rewards=np.array([1, np.inf], "<f4").tobytes()), "not_finite", {"field": "rewards"}),
        (_broken(rewards=np.array([1], "<f4").tobytes()), "length_mismatch", {"field": "rewards"}),
        (_broken(mask=b"\x00"), "nothing_trained", {}),
        (_broken(mask=b"\xff\xff"), "length_mismatch", {"field": "mask"}),
        (_broken(reward_parts={"length": [1.0]}), "length_mismatch", {"field": "reward_parts['length']"}),
        (_broken(finish_reasons=["stop"]), "length_mismatch", {"field": "finish_reasons"}),
        (_broken(versions=[[["1.0", 0, 3]], []]), "no_version", {"sequence": 1}),
        (_broken(versions=[[["1.0", 0, 3]], [["default", 0, 1]]]), "not_a_version", {"sequence": 1}),
        (_broken(versions=[[["1.0", 0, 3]], [["1.0", 0, 99]]]), "version_span", {"sequence": 1}),
        (_broken(versions=[[["1.0", 0, 3], ["9.9", 3, 3]], [["1.0", 0, 1]]]), "version_span", {"sequence": 0}),
        (_broken(versions=[[["1.0", 0, 3]], [["1.0", 1, 1]]]), "version_span", {"sequence": 1}),
        (_broken(versions=[[["1.0", 0, 2], ["1.1", 1, 3]], [["1.0", 0, 1]]]), "version_span", {"sequence": 0}),
        (_broken(versions=[[["1.0", 1, 3], ["1.1", 0, 1]], [["1.0", 0, 1]]]), "version_span", {"sequence": 0}),
        (_broken(versions=[[["1.0", 0, 1]], [["1.0", 0, 1]]]), "version_span", {"sequence": 0}),
        (_broken(versions=[[["1.0", -1, 3]], [["1.0", 0, 1]]]), "version_span", {"sequence": 0}),
        (_broken(reward_parts={"length": [1.0, float("nan")]}), "not_finite", {"field": "reward_parts"}),
        (_broken(advantages=np.full(8, np.inf, "<f4").tobytes()), "not_finite", {"field": "advantages"}),
        (_broken(ref_logprobs=np.zeros(7, "<f4").tobytes()), "length_mismatch", {"field": "ref_logprobs"}),
        (_broken(distill_ids=bytes(32)), "length_mismatch", {"field": "distill_ids"}),
        (_broken(distill_logprobs=bytes(32)), "length_mismatch", {"field": "distill_ids"}),
        (_broken(distill_ids=b"", distill_logprobs=b""), "length_mismatch", {"field": "distill_ids"}),
        (_broken(distill_ids=bytes(28), distill_logprobs=bytes(28)), "length_mismatch", {"field": "distill_ids"}),
        (_broken(distill_ids=bytes(64), distill_logprobs=bytes(32)), "length_mismatch", {"field": "distill_ids"}),
        (_broken(distill_ids=np.full(8, -2, "<i4").tobytes(), distill_logprobs=bytes(32)), "negative_token", {}),
        (
            _broken(distill_ids=bytes(32), distill_logprobs=np.full(8, np.nan, "<f4").tobytes()),
            "not_finite",
            {"field": "distill_logprobs"},
        ),
        (_broken(messages=[{"role": b"user"}]), "not_plain", {"field": "messages"}),
        (_broken(messages=[[{1: "user"}]]), "not_plain", {"field": "messages"}),
        (_broken(messages=[msgspec.msgpack.Ext(1, b"x")]), "not_plain", {"field": "messages"}),
        (_broken(messages=[[{"role": "user", "logprob": float("nan")}]]), "not_finite", {"field": "messages"}),
        (_broken(messages=[["text"]]).replace(b"text", b"te\xffx"), "not_a_group", {}),
        (_broken(overrides={"a": {None: 1}}), "not_plain", {"field": "overrides"}),
        (_broken(meta={"a": [float("-inf")]}), "not_finite", {"field": "meta"}),
        (_broken(meta={"a": b"bytes"}), "not_plain", {"field": "meta"}),
        (_broken(sampling={"temperature": float("nan"), "max_tokens": 4}), "temperature", {}),
        (_broken(sampling={"temperature": 1.0, "top_p": float("nan"), "max_tokens": 4}), "top_p", {}),
        (_broken(sampling={"temperature": 1.0, "top_p": 0.0, "max_tokens": 4}), "top_p", {}),
        (_broken(sampling={"temperature": 0.0, "max_tokens": 4}), "temperature", {}),
        (_broken(env_id="two words"), "env_id", {}),
        (_broken(env_id="x" * 129), "env_id", {}),
        (_broken().replace(b"env-1", b"env\xff1"), "not_a_group", {}),
        (_broken(messages=[[]] * (1 << 20)), "objects_too_large", {}),
        (_broken(versions=[[]] * (1 << 20)), "objects_too_large", {}),
    ],
)
def test_decode_refuses_groups_that_cannot_be_trained_on_with_the_reason(
    body: bytes, code: str, values: dict[str, Any]
) -> None:
    with raises(GroupError, code, **values):
        TrajectoryGroup.decode(body)


def test_group_with_a_teacher_an_unsampled_sequence_and_messages_is_accepted() -> None:
    body = _broken(
        mask=np.packbits([0, 0, 1, 1, 1, 0, 0, 0], bitorder="little").tobytes(),
        versions=[[["1.0", 0, 3]], [["1.0", 0, 0]]],
        distill_ids=np.array([3, -1] * 8, "<i4").tobytes(),
        distill_logprobs=np.array([-1, -np.inf] * 8, "<f4").tobytes(),
        messages=[[{"role": "user", "content": "é😀", "calls": [1, 2.5, None, True]}]],
    )
    assert TrajectoryGroup.decode(body).distill_ids is not None
    with raises(GroupError, "not_plain", field="messages"):
        dataclasses.replace(make_group(), messages=[["\ud83d"]])


def test_group_with_branches_knows_the_rollout_of_each_sequence() -> None:
    group = make_group(lengths=[(2, 1)] * 5, rewards=[1, 1, 0, 1, 1], rollouts=[0, 0, 1, 2, 2])
    decoded = TrajectoryGroup.decode(group.encode())
    assert decoded.rollout_of.tolist() == [0, 0, 1, 2, 2]
    assert decoded.rollout_starts.tolist() == [0, 2, 3]
    assert (decoded.size, decoded.rollout_count) == (5, 3)


def test_group_without_rollouts_has_one_per_sequence_and_the_bytes_of_before() -> None:
    group = make_group(lengths=[(2, 1)] * 3)
    assert group.rollouts is None
    assert group.rollout_of.tolist() == group.rollout_starts.tolist() == [0, 1, 2]
    assert group.rollout_count == 3
    assert "rollouts" not in msgspec.msgpack.decode(group.encode())


def nested(depth: int, kind: type = list) -> Any:
    """Returns this many lists or objects inside each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 900])
def test_submitted_group_has_a_bounded_depth(kind: type, depth: int) -> None:
    cases: list[dict[str, Any]] = [
        {"overrides": {"a": nested(depth - 1, kind)}},
        {"meta": {"a": nested(depth - 1, kind)}},
        {"messages": [[{"role": "user", "content": nested(depth - 3, kind)}], []]},
    ]
    for fields in cases:
        group = TrajectoryGroup.decode(dataclasses.replace(make_group(), **fields).encode())  # stored by an older API
        if depth == MAX_DEPTH:
            check_submitted(group)
            continue
        with raises(GroupError, "too_deep", field=next(iter(fields))):
            check_submitted(group)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, None),
        ([], None),
        ([[{"role": "user", "content": None, "calls": [1]}], []], None),
        ([[{"role": "user"}]], "length_mismatch"),
        ([[{"role": "user"}]] * 3, "length_mismatch"),
        ([5, 6], "not_messages"),
        (["ab", "cd"], "not_messages"),
        ([None, None], "not_messages"),
        ([{"role": "user"}, {"role": "assistant"}], "not_messages"),
        ([["a"], ["b"]], "not_messages"),
        ([[{"role": "user"}], [{"role": 1}]], "not_messages"),
        ([[{"role": "user"}], [{"content": "a"}]], "not_messages"),
    ],
)
def test_submitted_messages_are_one_conversation_per_sequence(messages: list[Any] | None, code: str | None) -> None:
    group = dataclasses.replace(make_group(), messages=messages)
    if code is None:
        check_submitted(group)
        return
    with raises(GroupError, code):
        check_submitted(group)


@pytest.mark.parametrize("of_trained", [False, True])
def test_submitted_logprobs_of_other_models_are_not_positive_where_tokens_are_trained(of_trained: bool) -> None:
    group = make_group()
    flat = np.where(group.mask == of_trained, 0.5, -0.5).astype(np.float32)
    ids = np.stack([np.arange(len(flat)), np.full(len(flat), -1)], axis=1).astype(np.int32)
    teacher = np.stack([flat, np.full(len(flat), np.nan, np.float32)], axis=1)
    for fields in (
        {"ref_logprobs": flat},
        {"distill_ids": ids.reshape(-1), "distill_logprobs": teacher.reshape(-1)},
    ):
        found = dataclasses.replace(group, **fields)
        if of_trained:
            with raises(GroupError, "positive_logprob", field=list(fields)[-1]):
                check_submitted(found)
        else:
            check_submitted(found)


def test_encode_refuses_a_group_that_no_reader_accepts() -> None:
    group = dataclasses.replace(make_group(), meta={"notes": "x" * (1 << 20)})
    with raises(GroupError, "objects_too_large"):
        group.encode()


def test_oldest_version_is_the_oldest_of_any_token() -> None:
    group = make_group(lengths=[(1, 4), (1, 4)])
    spans = [[VersionSpan("1.9", 0, 2), VersionSpan("1.10", 2, 4)], [VersionSpan("2.0", 0, 4)]]
    assert dataclasses.replace(group, versions=spans).oldest_version == PolicyVersion(1, 9)


def test_versions_order_by_incarnation_then_step() -> None:
    labels = ["1.2", "2.1", "1.10"]
    assert [str(version) for version in sorted(map(PolicyVersion.parse, labels))] == ["1.2", "1.10", "2.1"]


def test_version_is_made_of_a_version_or_its_label() -> None:
    assert PolicyVersion.of("1.20") == PolicyVersion.of(PolicyVersion(1, 20)) == PolicyVersion(1, 20)
    assert str(PolicyVersion(1, 20)) == "1.20"
    for other in ("default", "1.20 ", 20, None):
        with pytest.raises(ValueError, match=r"1\.20"):
            PolicyVersion.of(other)  # type: ignore[arg-type]


def test_span_of_a_version_that_is_not_its_label_is_refused() -> None:
    """Encoded, it would be a map that no reader knows."""
    spans = [[VersionSpan(PolicyVersion(1, 9), 0, 1)]]  # type: ignore[arg-type]
    with raises(GroupError, "not_a_version", sequence=0):
        dataclasses.replace(make_group(lengths=[(1, 1)]), versions=spans)


class _Words:
    """A tokenizer whose token 0 is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(f"<{n}>" if n == 0 else str(n) for n in ids if n or not skip_special_tokens)


def test_texts_are_prompt_and_completion_of_each_sequence() -> None:
    group = dataclasses.replace(
        make_group(lengths=[(2, 3), (2, 1)]),
        tokens=np.array([0, 7, 1, 2, 0, 0, 7, 3], np.int32),
        mask=np.array([0, 0, 1, 0, 1, 0, 0, 1], bool),
        logprobs=np.zeros(8, np.float32),
    )
    assert group.texts(_Words()) == [("<0> 7", "1 2"), ("<0> 7", "3")]
    assert group.texts(_Words())[0].completion == "1 2"


def test_repr_is_one_short_line() -> None:
    text = repr(make_group(lengths=[(200, 4000)] * 8))
    assert text.startswith("<TrajectoryGroup g00000001 of ")
    assert "8 sequences, 33600 tokens" in text
    assert len(text) < 160
    assert "\n" not in text
