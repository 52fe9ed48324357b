"""A group is made of scored sequences, and a sequence that cannot be trained on is refused with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.errors import raises

from gristmill import (
    GroupError,
    Permit,
    PolicyVersion,
    SamplingParams,
    Sequence,
    SyncClient,
    TrajectoryGroup,
    VersionSpan,
)

PERMIT = Permit(group_id="g00000007", row=7, run_id="sums", holder="env-1")
SAMPLING = SamplingParams(temperature=0.5, max_tokens=4)
FIRST = Sequence(prompt=[5, 6], completion=[7, 8], logprobs=[-0.5, -0.25], reward=1.0)


def _group(*sequences: Sequence, version: PolicyVersion | str = "1.20") -> TrajectoryGroup:
    return TrajectoryGroup.of(PERMIT, sequences, version=version, sampling=SAMPLING)


def test_group_of_sequences_has_flat_arrays_and_the_facts_of_its_permit() -> None:
    second = Sequence(
        prompt=np.array([5, 6], np.int64),
        completion=(9,),
        logprobs=np.array([-2.0]),
        reward=0,
        reward_parts={"length": None},
        finish_reason="length",
    )
    group = _group(dataclasses.replace(FIRST, reward_parts={"accuracy": 1}), second, version=PolicyVersion(1, 20))
    assert (group.group_id, group.run_id, group.env_id, group.row) == ("g00000007", "sums", "env-1", 7)
    assert group.lengths.tolist() == [4, 3]
    assert group.tokens.tolist() == [5, 6, 7, 8, 5, 6, 9]
    assert group.mask.tolist() == [False, False, True, True, False, False, True]
    assert group.logprobs.tolist() == [0, 0, -0.5, -0.25, 0, 0, -2]
    assert group.rewards.tolist() == [1, 0]
    assert group.reward_parts == {"accuracy": [1, None], "length": [None, None]}
    assert group.finish_reasons == ["stop", "length"]
    assert group.versions == [[VersionSpan("1.20", 0, 2)], [VersionSpan("1.20", 0, 1)]]
    assert group.sampling == SAMPLING
    assert group.messages is None
    assert [array.dtype for array in (group.lengths, group.tokens, group.logprobs, group.mask, group.rewards)] == [
        np.int32, np.int32, np.float32, np.bool_, np.float32
    ]  # fmt: skip
    assert TrajectoryGroup.decode(group.encode()).tokens.tolist() == group.tokens.tolist()


def test_sequence_may_have_unsampled_tokens_messages_and_weights_that_changed() -> None:
    talk = [{"role": "user", "content": "2+2"}]
    turns = dataclasses.replace(
        FIRST, logprobs=[-0.5, float("nan")], mask=[True, False], messages=talk, versions=[(PolicyVersion(1, 19), 0, 1)]
    )
    group = _group(turns, FIRST)
    assert group.logprobs.tolist() == [0, 0, -0.5, 0, 0, 0, -0.5, -0.25]
    assert group.mask.tolist() == [False, False, True, False, False, False, True, True]
    assert group.messages == [talk, []]
    assert group.versions == [[VersionSpan("1.19", 0, 1)], [VersionSpan("1.20", 0, 2)]]


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({"prompt": []}, "sequence_length", {"sequence": 1, "field": "prompt"}),
        ({"completion": [], "logprobs": []}, "sequence_length", {"sequence": 1, "field": "completion"}),
        ({"completion": [7]}, "length_mismatch", {"sequence": 1, "field": "logprobs"}),
        ({"logprobs": [[-0.5, -0.25]]}, "length_mismatch", {"sequence": 1, "field": "logprobs"}),
        ({"mask": [True]}, "length_mismatch", {"sequence": 1, "field": "mask"}),
        ({"prompt": [1.5]}, "not_token_ids", {"sequence": 1, "field": "prompt"}),
        ({"prompt": ["5"]}, "not_token_ids", {"sequence": 1, "field": "prompt"}),
        ({"prompt": [True]}, "not_token_ids", {"sequence": 1, "field": "prompt"}),
        ({"prompt": [[5, 6]]}, "not_token_ids", {"sequence": 1, "field": "prompt"}),
        ({"prompt": [[5, 6], [7]]}, "not_token_ids", {"sequence": 1, "field": "prompt"}),
        ({"mask": [[True, False], [True]]}, "length_mismatch", {"sequence": 1, "field": "mask"}),
        ({"reward": 10**400}, "not_finite", {"sequence": 1, "field": "rewards"}),
        ({"reward_parts": {"a": "x"}}, "not_finite", {"sequence": 1, "field": "reward_parts"}),
        ({"prompt": 5}, "not_token_ids", {"sequence": 1, "field": "prompt"}),
        ({"completion": [7, 2**31]}, "not_token_ids", {"sequence": 1, "field": "completion"}),
        ({"completion": [7, 2**70]}, "not_token_ids", {"sequence": 1, "field": "completion"}),
        ({"completion": [7, -1]}, "negative_token", {"sequence": 1}),
        ({"logprobs": [-0.5, float("nan")]}, "not_finite", {"field": "logprobs"}),
        ({"logprobs": [-0.5, None]}, "not_finite", {"field": "logprobs"}),
        ({"logprobs": [-0.5, 0.25]}, "positive_logprob", {}),
        ({"reward": float("nan")}, "not_finite", {"field": "rewards"}),
        ({"reward": None}, "not_finite", {"sequence": 1, "field": "rewards"}),
        ({"reward_parts": {"length": float("inf")}}, "not_finite", {"field": "reward_parts"}),
        ({"versions": [("1.20", 0, 1)]}, "version_span", {"sequence": 1}),
        ({"versions": [("default", 0, 2)]}, "not_a_version", {"sequence": 1}),
    ],
)
def test_group_refuses_a_sequence_that_cannot_be_trained_on(
    changes: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with raises(GroupError, code, **values):
        _group(FIRST, dataclasses.replace(FIRST, **changes))


def test_scalars_of_numpy_and_subclasses_of_plain_types_are_encoded_as_plain_values() -> None:
    class Text(str):
        pass

    sampling = SamplingParams(temperature=np.float64(0.5), max_tokens=np.int64(8))  # type: ignore[arg-type]
    whole = dataclasses.replace(FIRST, versions=[("1.20", np.int64(0), np.int64(2))])  # type: ignore[list-item]
    group = dataclasses.replace(_group(whole), sampling=sampling, meta={"a": np.float64(1.5), Text("b"): Text("c")})
    decoded = TrajectoryGroup.decode(group.encode())
    assert decoded.meta == {"a": 1.5, "b": "c"}
    assert decoded.sampling == SamplingParams(temperature=0.5, max_tokens=8)
    assert decoded.versions == [[VersionSpan("1.20", 0, 2)]]


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_encode_refuses_an_integer_of_more_than_64_bits(number: int) -> None:
    with raises(GroupError, "not_plain"):
        dataclasses.replace(_group(FIRST), meta={"n": number}).encode()


def test_group_needs_a_sequence_a_version_and_a_holder() -> None:
    with raises(GroupError, "no_sequences"):
        _group()
    with raises(GroupError, "not_a_version"):
        _group(FIRST, version="default")
    with raises(GroupError, "nothing_trained"):
        _group(dataclasses.replace(FIRST, mask=[False, False]))
    with raises(GroupError, "env_id"):
        TrajectoryGroup.of(Permit(group_id="g00000007", row=7), [FIRST], version="1.20", sampling=SAMPLING)


def test_permits_of_a_client_name_their_run_and_holder() -> None:
    answer = httpx.Response(200, json={"permits": [{"group_id": "g00000007", "row": 7}], "state": "open"})
    with SyncClient("http://api") as client:
        client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(lambda request: answer))
        assert client.permits("sums", "env-1", 1, wait=0).permits == [PERMIT]
