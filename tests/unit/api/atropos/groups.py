"""Groups as Atropos' clients send them."""

from __future__ import annotations

from typing import Any

from gristmill_api.atropos.conversion import SubmittedGroup, to_json

KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    "distill_logprobs",
)


def full() -> dict[str, Any]:
    """Two sequences with everything a group may have."""
    return {
        "tokens": [[1, 2, 3], [1, 2, 4, 5]],
        "masks": [[-100, 2, 3], [-100, -100, 4, 5]],
        "scores": [1.0, -0.5],
        "advantages": [[0.0, 1.0, 2.5], [0.0, -0.5, 1.0, 2.0]],
        "ref_logprobs": [[-0.5, -0.25, -0.5], [-1.0, -2.0, -3.0, -4.0]],
        "messages": [[{"role": "user", "content": "Grüße 你好"}], [{"role": "user", "content": None, "reward": 1}]],
        "generation_params": {"temperature": 0.5, "top_p": 0.75, "max_tokens": 8, "stop": ["\n"]},
        "inference_logprobs": [[1.0, -0.25, -0.5], [1.0, 1.0, -0.125, -2.0]],
        "overrides": [{"set_advantage_to_zero": True}, {}],
        "group_overrides": {"group_size": 2},
        "images": ["data:image/png;base64,AAAA", None],
        "env_id": 3,
        "distill_token_ids": [[[7, 8], [9], []], [[1], [2], [3], [4]]],
        "distill_logprobs": [[[-1.0, -2.0], [-1.5], []], [[-1.0], [-2.0], [-3.0], [-4.0]]],
    }


def small() -> dict[str, Any]:
    return {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}


def returned(group: SubmittedGroup) -> bytes:
    """Returns the JSON that GET /batch has of the group after it was stored."""
    return to_json(group.stored("default", "1.20").body)
