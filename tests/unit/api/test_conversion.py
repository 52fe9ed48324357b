"""Conversion of groups between Atropos' JSON and the binary form of /v1."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.unit.api.atropos.groups import KEYS, full, small

from gristmill import GroupError, TrajectoryGroup
from gristmill_api.atropos.fast_parse import read_one
from gristmill_api.conversion import as_json, to_group, to_json


def binary(group: dict[str, Any]) -> TrajectoryGroup:
    return to_group(read_one(json.dumps(group).encode()).text, "a00000007", "default", 7, "1.20")


def test_conversion_keeps_every_field() -> None:
    group = binary(full())
    assert (group.group_id, group.run_id, group.env_id, group.row) == ("a00000007", "default", "atropos-3", 7)
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
    group = TrajectoryGroup.decode(binary(full()).encode())
    assert json.loads(to_json(group)) == full()


def test_group_of_v1_converts_to_json() -> None:
    group = make_group(lengths=((2, 2), (1, 3)), rewards=(1.0, 0.0))
    text = json.loads(to_json(group))
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
    group = TrajectoryGroup.decode(binary(small()).encode())
    assert not group.logprobs_known
    assert group.logprobs.tolist() == [0.0, 0.0]
    assert json.loads(to_json(group))["inference_logprobs"] is None
    assert binary(full()).logprobs_known


async def test_stored_json_is_returned_unchanged() -> None:
    text = read_one(json.dumps(full()).encode()).text
    assert await as_json(text) is text
    assert json.loads(await as_json(binary(full()).encode())) == full()


def test_conversion_keeps_a_sequence_without_trained_tokens() -> None:
    group = full()
    group["masks"][0] = [-100, -100, -100]
    found = TrajectoryGroup.decode(binary(group).encode())
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
    ("group", "code"),
    [
        (_with(masks=[[-100, -100]]), "nothing_trained"),
        (_with(inference_logprobs=[[1.0, 1.0]]), "positive_logprob"),
        (_with(tokens=[[1, -5]]), "negative_token"),
    ],
)
def test_group_without_a_binary_form_is_an_error(group: dict[str, Any], code: str) -> None:
    with raises(GroupError, code):
        binary(group)


def test_token_above_32_bits_has_no_binary_form() -> None:
    with pytest.raises(GroupError, match=str(2**40)):
        binary(_with(tokens=[[1, 2**40]]))


@pytest.mark.parametrize("params", [None, {}, {"temperature": 0}, {"temperature": "hot", "top_p": True}])
def test_conversion_uses_plain_sampling_by_default(params: dict[str, Any] | None) -> None:
    sampling = binary(_with(generation_params=params)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 2)
