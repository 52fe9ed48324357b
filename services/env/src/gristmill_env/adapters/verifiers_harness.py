"""A harness of verifiers without a program: replies and tool calls in turn, in the process of the agent.

verifiers' own `null` harness does the same in a process per rollout, whose start takes seconds of processor time.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from gristmill_env.values import json_or_none

__all__ = ["InProcessHarness"]


class InProcessHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Ends with a reply that calls no tool, or when the conversation has no room."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace[Any, Any, Any],
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with (
            AsyncExitStack() as stack,
            openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client,
        ):
            schemas, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            options: dict[str, Any] = {"tools": schemas} if schemas else {}
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
                except openai.APIStatusError as error:
                    # A @stop refuses a turn; verifiers then takes any end of the program as one.
                    ended = trace.stop_condition is not None or is_context_overflow(error)
                    return vf.ProgramResult(0 if ended else 1, "", "" if ended else str(error))
                reply = answer.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                if not reply.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in reply.tool_calls:
                    content = await _result(call.function, connected, dispatch)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _result(call: Any, servers: Any, dispatch: Any) -> Any:
    """Returns a tool's answer, or the error of its call. The model reads it."""
    if call.name not in dispatch:
        return f"Error: there is no tool {call.name}; there are {', '.join(dispatch) or 'none'}"
    arguments = json_or_none(call.arguments or "{}")
    if not isinstance(arguments, dict):
        return "Error: the arguments are not a JSON object"
    return await call_mcp(servers, dispatch, call.name, arguments)
