"""A model client for vf.SingleTurnEnv.rollout that returns an already sampled completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.types import Response, ResponseMessage, Usage

from gristmill_env.errors import RewardError
from gristmill_env.rewards.sample import Sample


class Replay(vf.Client):  # type: ignore[misc]  # Any to a type checker: it is an extra
    """Returns one sample's completion for every request with the sample's prompt."""

    def __init__(self, sample: Sample, prompt: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(sample)
        self._sample = sample
        self._prompt = [(message["role"], message["content"]) for message in prompt]

    def setup_client(self, config: Any) -> Any:
        """Returns `config`; this client makes no connection."""
        return config

    async def to_native_tool(self, tool: Any) -> Any:
        """Raises RewardError, because the model did not get any tools."""
        raise RewardError(
            "tool_in_row", f"the row gives the model a tool, {tool.name}, which nobody would answer", tool=tool.name
        )

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        """Raises RewardError if the prompt differs from the sample's, that is, setup_state or get_prompt_messages
        changed it."""
        if [(message.role, message.content) for message in messages] != self._prompt:
            raise RewardError(
                "prompt_changed",
                "the environment's code changes the prompt, which the model was given as it is in the row",
            )
        return messages, {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        """Returns the sample."""
        return self._sample

    async def raise_from_native_response(self, response: Any) -> None:
        """Accepts every response."""

    async def from_native_response(self, response: Sample) -> Any:
        """Returns the completion as a verifiers Response. The number of prompt tokens is unknown here, and set to 0."""
        cut = response.finish_reason == "length"
        spent = len(response.tokens or ())
        return Response(
            id="replay",
            created=0,
            model="policy",
            usage=Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=spent, total_tokens=spent),
            message=ResponseMessage(
                content=response.completion, finish_reason="length" if cut else "stop", is_truncated=cut
            ),
        )

    async def close(self) -> None:
        """Does nothing; this client has no connection."""
