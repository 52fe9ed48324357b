"""Requests for which the model samples from another distribution: answered if the run says so, and never trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import anthropic
import openai
import pytest
from tests.unit.env.gateway.conftest import SAMPLING, Running, ScriptedModel

from gristmill_env.gateway import Session

pytestmark = pytest.mark.slow

QUESTION: list[Any] = [{"role": "user", "content": "2 + 2?"}]
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "search"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}


@pytest.fixture
def session(running: Running) -> Session:
    session = Session(dataclasses.replace(running.policy, untrained=True), SAMPLING)
    running.gateway.sessions.add(session)
    return session


def client(running: Running, session: Session) -> Any:
    return openai.AsyncOpenAI(base_url=running.url, api_key=session.key, max_retries=0)


@pytest.mark.parametrize(
    ("more", "sampling"),
    [
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
        ({"response_format": JSON_SCHEMA}, {"structured_outputs": {"json": PARAMETERS}}),
        ({"logit_bias": {"5": 10}}, {"logit_bias": {"5": 10}}),
        ({"tools": [TOOL], "tool_choice": NAMED}, {"structured_outputs": {"json": PARAMETERS}}),
    ],
)
async def test_constraint_reaches_the_model_server_and_the_reply_is_not_trained(
    running: Running, model: ScriptedModel, session: Session, more: Any, sampling: Any
) -> None:
    model.says = ['{"query": "a"}', "Done"]
    asked = client(running, session)
    first = await asked.chat.completions.create(model="tiny", messages=QUESTION, **more)
    assert sampling.items() <= model.server.bodies[-1]["sampling_params"].items()
    message, tools = first.choices[0].message, {"tools": more["tools"]} if "tools" in more else {}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id} if message.tool_calls else {"role": "user"}
    await asked.chat.completions.create(
        model="tiny", messages=[*QUESTION, message, {**result, "content": "b"}], **tools
    )
    free_request = [body for body in model.server.bodies if "sampling_params" in body][-1]
    assert not sampling.keys() & free_request["sampling_params"].keys()
    (branch,) = session.branches()
    constrained, free = branch.turns
    assert (constrained.stored.trained, free.stored.trained) == (False, True)
    assert branch.mask.sum() == len(free.sampled)
    assert branch.logprobs[: len(constrained.sampled)].tolist() == [0.0] * len(constrained.sampled)
    assert sum(span.end - span.start for span in branch.labels) == branch.sampled
    assert session.turns.counts() == {"untrained": 1}


async def test_forced_tools_are_answered_as_calls(running: Running, model: ScriptedModel, session: Session) -> None:
    calls = [{"name": "search", "parameters": {"query": name}} for name in "ab"]
    model.says = [json.dumps(calls), '{"query": "c"}', '{"query": "d"}', json.dumps(calls)[:-5]]
    asked = client(running, session)

    async def say(choice: Any) -> Any:
        answer = await asked.chat.completions.create(model="tiny", messages=QUESTION, tools=[TOOL], tool_choice=choice)
        return answer.choices[0]

    both = await say("required")
    assert both.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in both.message.tool_calls] == [{"query": "a"}, {"query": "b"}]
    schema = model.server.bodies[-1]["sampling_params"]["structured_outputs"]["json"]
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "search"}
    assert "maxItems" not in schema
    (named,) = (await say(NAMED)).message.tool_calls
    assert (named.function.name, json.loads(named.function.arguments)) == ("search", {"query": "c"})
    other: Any = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key=session.key, max_retries=0)
    message = await other.messages.create(
        model="tiny", max_tokens=50, messages=QUESTION, tool_choice={"type": "tool", "name": "search"},
        tools=[{"name": "search", "input_schema": PARAMETERS}],
    )  # fmt: skip
    assert [block.input for block in message.content] == [{"query": "d"}]
    assert (await say("required")).message.tool_calls is None, "a reply that was cut has no calls"
    with pytest.raises(openai.BadRequestError) as refused:
        await say({"type": "function", "function": {"name": "other"}})
    assert refused.value.param == "tool_choice"


async def test_reply_that_is_nested_too_deeply_to_read_has_no_calls(
    running: Running, model: ScriptedModel, session: Session
) -> None:
    model.says = ["[" * 1100] * 2
    requests: list[Any] = [{}, {"tools": [TOOL], "tool_choice": "required"}]
    for more in requests:
        answer = await client(running, session).chat.completions.create(model="tiny", messages=QUESTION, **more)
        assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("[" * 1100, None)


async def test_client_that_wants_one_call_gets_one(running: Running, model: ScriptedModel, session: Session) -> None:
    model.says = [json.dumps([{"name": "search", "parameters": {"query": "a"}}])] * 3
    asked = client(running, session)
    await asked.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    flat = {"type": "function", **TOOL["function"]}
    await asked.responses.create(
        model="tiny", input="2 + 2?", tools=[flat], tool_choice="required", parallel_tool_calls=False
    )
    other: Any = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key=session.key, max_retries=0)
    await other.messages.create(
        model="tiny", max_tokens=50, messages=QUESTION, tools=[{"name": "search", "input_schema": PARAMETERS}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    forms = [body["sampling_params"]["structured_outputs"] for body in model.server.bodies if "sampling_params" in body]
    assert [form["json"]["maxItems"] for form in forms] == [1, 1, 1]


async def test_responses_have_a_form(running: Running, model: ScriptedModel, session: Session) -> None:
    form = {"type": "json_schema", "name": "x", "schema": PARAMETERS}
    await client(running, session).responses.create(model="tiny", input="2 + 2?", text={"format": form})
    assert model.server.bodies[-1]["sampling_params"]["structured_outputs"] == {"json": PARAMETERS}
    assert session.branches()[0].mask.sum() == 0


async def test_constraint_that_the_server_refuses_is_an_error_of_the_request(
    running: Running, model: ScriptedModel, session: Session
) -> None:
    answer = model.server.answers["/inference/v1/generate"]

    def generate() -> tuple[int, Any]:
        refused = "structured_outputs" in model.server.now.body["sampling_params"]
        return (400, {"error": "Grammar error"}) if refused else answer()

    model.server.answers["/inference/v1/generate"] = generate
    with pytest.raises(openai.BadRequestError):
        await client(running, session).chat.completions.create(
            model="tiny", messages=QUESTION, response_format=JSON_SCHEMA
        )
    assert session.failure is None, "the agent is to blame, and not the model server"
