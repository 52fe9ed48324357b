"""Conversion of groups between Atropos' JSON and the binary form of /v1."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.support.groups import make_group
from tests.unit.api.atropos.groups import KEYS, full, returned, small

from gristmill import TrajectoryGroup
from gristmill_api.atropos.conversion import NAME_BYTES, SubmittedGroup, to_json
from gristmill_api.atropos.parse import read_one


def converted(group: dict[str, Any]) -> SubmittedGroup:
    return read_one(json.dumps(group).encode())


def binary(group: dict[str, Any]) -> TrajectoryGroup:
    """Returns the group that a trainer of /v1 leases."""
    found = converted(group)
    assert not found.unusable
    return TrajectoryGroup.decode(found.stored("default", "1.20").body)


def test_conversion_keeps_every_field() -> None:
    group = binary(full())
    assert (group.run_id, group.env_id) == ("default", "atropos-3")
    assert group.lengths.tolist() == [3, 4]
    assert group.tokens.tolist() == [1, 2, 3, 1, 2, 4, 5]
    assert group.mask.tolist() == [False, True, True, False, False, True, True]
    assert group.logprobs.tolist() == [0, -0.25, -0.5, 0, 0, -0.125, -2.0]
    assert group.rewards.tolist() == [1.0, -0.5]
    assert group.advantages is not None
    assert group.advantages.tolist() == [0.0, 1.0, 2.5, 0.0, -0.5, 1.0, 2.0]
    assert group.ref_logprobs is not None
    assert group.ref_logprobs.tolist() == [-0.5, -0.25, -0.5, -1.0, -2.0, -3.0, -4.0]
    assert (group.sampling.temperature, group.sampling.top_p, group.sampling.max_tokens) == (0.5, 0.75, 8)
    assert [[(span.version, span.start, span.end) for span in spans] for spans in group.versions] == [
        [("1.20", 0, 2)],
        [("1.20", 0, 2)],
    ]
    assert group.overrides == {"sequences": full()["overrides"], "group": full()["group_overrides"]}
    assert group.messages == full()["messages"]
    assert group.meta == {"generation_params": full()["generation_params"], "images": full()["images"]}
    assert group.distill_ids is not None
    assert group.distill_ids.reshape(7, 2).tolist() == [[7, 8], [9, -1], [-1, -1], [1, -1], [2, -1], [3, -1], [4, -1]]


def test_conversion_to_json_and_back_is_the_same_group() -> None:
    found = converted(full())
    assert json.loads(returned(found)) == full()
    assert found.texts == {}, "the binary group alone has all values"


@pytest.mark.parametrize("name", ["scores", "inference_logprobs", "advantages", "ref_logprobs"])
def test_a_number_of_32_bits_is_returned_with_the_digits_of_64(name: str) -> None:
    # 32 bits need fewer digits for 0.1, and a client that reads those digits as 64 bits gets another number.
    number = float(np.float32(-0.1))
    found = converted(small() | {name: [number] if name == "scores" else [[1.0, number]]})
    assert found.texts == {}
    value = json.loads(returned(found))[name]
    assert value == ([number] if name == "scores" else [[1.0, number]])


def test_group_of_v1_converts_to_json() -> None:
    group = make_group(lengths=((2, 2), (1, 3)), rewards=(1.0, 0.0))
    text = json.loads(to_json(group.encode()))
    assert tuple(text) == KEYS
    flat = [token for row in text["tokens"] for token in row]
    assert flat == group.tokens.tolist()
    assert [len(row) for row in text["tokens"]] == [4, 4]
    masks = np.array([token for row in text["masks"] for token in row])
    assert masks.tolist() == np.where(group.mask, group.tokens, -100).tolist()
    logprobs = [value for row in text["inference_logprobs"] for value in row]
    assert np.array(logprobs, np.float32).tolist() == np.where(group.mask, group.logprobs, np.float32(1.0)).tolist()
    assert text["scores"] == [1.0, 0.0]
    assert text["overrides"] is None
    assert text["env_id"] is None
    assert text["generation_params"] == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64}


def test_group_without_logprobs_converts_both_ways() -> None:
    group = binary(small())
    assert not group.logprobs_known
    assert group.logprobs.tolist() == [0.0, 0.0]
    assert json.loads(returned(converted(small())))["inference_logprobs"] is None
    assert binary(full()).logprobs_known


def test_id_and_row_are_written_into_the_stored_bytes() -> None:
    stored = converted(full()).stored("default", "1.20")
    body = bytearray(stored.body)
    body[stored.name_at : stored.name_at + NAME_BYTES] = b"a00000007"
    body[stored.row_at : stored.row_at + 4] = (7).to_bytes(4, "big")
    group = TrajectoryGroup.decode(bytes(body))
    assert (group.group_id, group.row) == ("a00000007", 7)


def test_only_values_that_the_binary_group_cannot_return_are_kept_as_text() -> None:
    group = {**full(), "scores": [0.1, 1.0], "overrides": [], "env_id": None}
    found = converted(group)
    assert found.texts == {"scores": b"[0.1,1.0]", "overrides": b"[]"}
    assert json.loads(returned(found)) == group


def test_conversion_keeps_a_sequence_without_trained_tokens() -> None:
    group = full()
    group["masks"][0] = [-100, -100, -100]
    found = binary(group)
    assert found.lengths.tolist() == [3, 4]
    assert not found.mask[:3].any()
    assert found.rewards.tolist() == group["scores"]


def test_conversion_removes_the_teacher_of_filler_positions() -> None:
    group = small()
    group |= {"distill_token_ids": [[[0, 0], [2, 7]]], "distill_logprobs": [[[0.0, 0.0], [-0.1, -3.0]]]}
    found = binary(group)
    assert found.distill_ids is not None
    assert found.distill_logprobs is not None
    assert found.distill_ids.tolist() == [-1, -1, 2, 7]
    assert found.distill_logprobs.tolist() == pytest.approx([0.0, 0.0, -0.1, -3.0])
    sure = binary({**small(), "distill_token_ids": [[[0], [2]]], "distill_logprobs": [[[0.0], [0.0]]]})
    assert sure.distill_ids is not None
    assert sure.distill_ids.tolist() == [0, 2], "a teacher of one token may be certain"


def _with(**changes: Any) -> dict[str, Any]:
    return {**small(), "inference_logprobs": [[1.0, -0.5]], **changes}


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (_with(inference_logprobs=[[1.0, 1.0]]), "log-probabilities must not be positive"),
        (_with(advantages=[[0.0, 1e300]]), "advantages holds NaN or infinity"),
        (_with(generation_params={"temperature": -1}), "temperature"),
        (_with(generation_params={"temperature": 10**400}), "OverflowError"),
        (_with(overrides=[{"id": 2**64}]), "msgpack does not have"),
        (_with(images=["x" * (1 << 20)]), "it carries"),
        (_with(distill_token_ids=[[[2**40], [1]]], distill_logprobs=[[[0.0], [0.0]]]), "OverflowError"),
        (_with(distill_token_ids=[[[1], [1]]]), "distill_logprobs"),
    ],
)
def test_group_without_a_binary_form_is_stored_without_the_values_that_lack_it(
    group: dict[str, Any], reason: str
) -> None:
    found = converted(group)
    assert found.unusable.startswith("no_binary_form: ")
    assert reason in found.unusable
    stored = found.stored("default", "1.20").body
    binary = TrajectoryGroup.decode(stored)
    assert (binary.tokens.tolist(), binary.mask.tolist(), binary.rewards.tolist()) == ([1, 2], [False, True], [1.0])
    assert not binary.logprobs_known
    assert json.loads(to_json(stored)) == {**dict.fromkeys(KEYS), **group}


def test_a_teacher_of_one_crowded_position_does_not_widen_all_positions() -> None:
    crowded = [[[7] * 3000, *[[1]] * 1999]]
    group = {**small(), "tokens": [[1] * 2000], "masks": [[-100, *[1] * 1999]]}
    group |= {"distill_token_ids": crowded, "distill_logprobs": [[[-1.0] * len(ids) for ids in crowded[0]]]}
    found = converted(group)
    assert "one position has 3000 entries of a teacher" in found.unusable
    assert found.size < 1 << 20
    assert json.loads(to_json(found.stored("default", "1.20").body))["distill_token_ids"] == crowded


@pytest.mark.parametrize("params", [None, {}, {"temperature": 0}, {"temperature": "hot", "top_p": True}])
def test_conversion_uses_plain_sampling_by_default(params: dict[str, Any] | None) -> None:
    sampling = binary(_with(generation_params=params)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 2)
