"""Agents that broke the tokens or the training of other stacks, with the clients as their makers publish them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.unit.env.gateway.conftest import SAMPLING, TEMPLATE, Running, ScriptedModel

from gristmill_env.gateway import Session

pytestmark = pytest.mark.slow

QUESTION: list[Any] = [{"role": "user", "content": "2 + 2?"}]
MORE = {"role": "user", "content": "Sure?"}
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}, "most": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "a", "most": 3}}</tool_call>'
PATHS = ("chat/completions", "responses", "messages")


def client(running: Running, session: Session | None = None, **options: Any) -> Any:
    key = (session or running.session).key
    return openai.AsyncOpenAI(base_url=running.url, api_key=key, **{"max_retries": 0, **options})


async def say(asked: Any, messages: list[Any], **more: Any) -> Any:
    """Returns the reply's message as the openai client sends it back."""
    answer = await asked.chat.completions.create(model="tiny", messages=messages, **more)
    return answer.choices[0].message


def trained(session: Session) -> int:
    """Returns the number of trained tokens, each of which one branch must train."""
    return sum(int(branch.mask.sum()) for branch in session.branches())


def sampled(session: Session) -> int:
    return sum(len(turn.sampled) for turn in session.turns)


async def test_title_of_the_conversation_is_a_conversation_beside_it(running: Running, model: ScriptedModel) -> None:
    asked, session = client(running), running.session
    model.says = ["4", "A sum", "Yes"]
    reply = await say(asked, QUESTION)
    await say(asked, [{"role": "system", "content": "Write a title."}, *QUESTION, reply, MORE], max_tokens=10)
    await say(asked, [*QUESTION, reply, MORE])
    first, title, second = session.turns
    assert (title.parent, second.parent) == (None, first)
    assert [branch.turns for branch in session.branches()] == [[title], [first, second]]
    assert trained(session) == sampled(session)
    assert session.turns.counts() == {"conversations": 2, "unknown": 1}


@pytest.mark.parametrize("usage", [None, False, True])
async def test_empty_tools_and_options_of_a_stream_are_accepted(
    running: Running, model: ScriptedModel, usage: bool | None
) -> None:
    more = {} if usage is None else {"stream_options": {"include_usage": usage}}
    chunks = [
        chunk
        async for chunk in await client(running).chat.completions.create(
            model="tiny", messages=QUESTION, tools=[], stream=True, **more
        )
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "4"
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == ([2] if usage else [])
    assert "Tools:" not in model.prompts[-1]


async def test_system_prompt_that_changes_with_each_step_begins_a_conversation_each_time(running: Running) -> None:
    asked: Any = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key=running.session.key)
    messages = list(QUESTION)
    for step in range(3):
        answer = await asked.messages.create(model="tiny", max_tokens=20, messages=messages, system=f"Step {step}.")
        messages += [{"role": "assistant", "content": answer.content}, MORE]
    assert [turn.parent for turn in running.session.turns] == [None] * 3
    assert trained(running.session) == sampled(running.session)
    assert running.session.turns.counts() == {"conversations": 3, "unknown": 2}


async def test_reply_that_the_agent_invented_is_not_trained(running: Running, model: ScriptedModel) -> None:
    asked, session = client(running), running.session
    invented = {"role": "assistant", "content": "It is 5."}
    await say(asked, [*QUESTION, invented, MORE])
    assert session.turns.counts() == {"unknown": 1}
    reply = await say(asked, QUESTION)
    await say(asked, [*QUESTION, reply, MORE, invented, MORE])
    example, first, second = session.turns
    assert (example.parent, first.parent, second.parent) == (None, None, first)
    assert model.prompts[-1].count("It is 5.") == 1
    assert trained(session) == sampled(session)
    assert session.turns.counts() == {"conversations": 2, "unknown": 2}


async def test_reply_that_the_agent_changed_is_not_trained_as_it_was_changed(
    running: Running, model: ScriptedModel
) -> None:
    model.says = ["4", "Yes"]
    asked, session = client(running), running.session
    reply = await say(asked, QUESTION)
    await say(asked, [*QUESTION, {"role": "assistant", "content": reply.content + " (edited)"}, MORE])
    first, second = session.turns
    assert second.parent is None
    assert [branch.turns for branch in session.branches()] == [[first], [second]]
    assert "4 (edited)" in model.prompts[-1]
    assert session.turns.counts() == {"conversations": 2, "unknown": 1}


@pytest.mark.parametrize("back", ["without", "with"])
async def test_thought_stays_in_the_tokens_whether_the_client_sends_it_back(
    running: Running, model: ScriptedModel, back: str
) -> None:
    session = Session(dataclasses.replace(running.policy, reasoning=True), SAMPLING)
    running.gateway.sessions.add(session)
    # As the templates of Qwen3 and DeepSeek-R1, this one removes the thoughts of earlier replies.
    model.tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    model.says = ["<think>Two and two.</think>4", "<think>Sure.</think>Yes", "Done"]
    asked, messages = client(running, session), list(QUESTION)
    for _ in range(3):
        reply = (await say(asked, messages)).model_dump()
        if back == "without":
            reply.pop("reasoning", None)
        messages += [reply, MORE]
    (branch,) = session.branches()
    assert [turn.parent for turn in session.turns] == [None, *list(session.turns)[:2]]
    assert model.prompts[-1].count("<think>Two and two.</think>4") == 1
    assert model.prompts[-1].count("<think>Sure.</think>Yes") == 1
    assert branch.mask.sum() == sampled(session)
    assert session.turns.counts() == {}


@pytest.mark.parametrize("arguments", ['{"most":3,"query":"a"}', '{ "query" : "a",\n "most": 3 }'])
async def test_arguments_that_the_client_wrote_again_continue_the_stored_tokens(
    running: Running, model: ScriptedModel, arguments: str
) -> None:
    model.says = [CALL, "Done"]
    asked, session = client(running), running.session
    reply = (await say(asked, QUESTION, tools=[TOOL])).model_dump(exclude_none=True)
    (call,) = reply["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == json.loads(arguments)
    call["function"]["arguments"] = arguments
    await say(asked, [*QUESTION, reply, {"role": "tool", "tool_call_id": call["id"], "content": "b"}], tools=[TOOL])
    first, second = session.turns
    assert second.parent is first
    assert CALL in model.prompts[-1], "as it was sampled"
    assert session.turns.counts() == {}


async def test_order_of_a_tools_keys_does_not_matter(running: Running) -> None:
    asked, session = client(running), running.session
    reply = await say(asked, QUESTION, tools=[TOOL])
    backwards = json.loads(json.dumps(TOOL), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    await say(asked, [*QUESTION, reply, MORE], tools=[backwards])
    assert session.turns.counts() == {}


async def test_equal_requests_at_once_are_samples_and_not_retries(running: Running, model: ScriptedModel) -> None:
    model.says = [str(number) for number in range(5)]
    asked, session = client(running), running.session
    replies = await asyncio.gather(*(say(asked, QUESTION) for _ in range(5)))
    assert sorted(reply.content for reply in replies) == ["0", "1", "2", "3", "4"]
    await say(asked, [*QUESTION, replies[2], MORE])
    assert len(session.branches()) == 5
    assert trained(session) == sampled(session)


async def test_client_that_repeats_a_request_by_itself_gets_the_one_reply(
    running: Running, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = threading.Event()
    model.hold = lambda: (again.wait(30), None)[1]
    first = running.session.reply
    requests = []

    def reply(*given: Any, **more: Any) -> Any:
        requests.append(more["again"])
        if len(requests) == 2:
            again.set()
        return first(*given, **more)

    monkeypatch.setattr(running.session, "reply", reply)
    await say(client(running, max_retries=5, timeout=httpx.Timeout(30, read=1.0)), QUESTION)
    assert requests[:2] == [False, True]
    assert len(running.session.turns) == len(running.session.branches()) == 1


async def test_stream_that_broke_is_repeated_as_a_stream(running: Running, model: ScriptedModel) -> None:
    model.says = ["one", "two"]
    body = {"model": "tiny", "messages": QUESTION, "stream": True}
    async with httpx.AsyncClient(base_url=running.gateway.base_url(running.session)) as plain:
        async with plain.stream("POST", "/chat/completions", json=body) as broken:
            assert broken.status_code == 200
        whole = await plain.post("/chat/completions", json=body, headers={"x-stainless-retry-count": "1"})
    assert whole.headers["content-type"].startswith("text/event-stream")
    assert '"content": "one"' in whole.text
    assert whole.text.endswith("data: [DONE]\n\n")
    assert len(running.session.turns) == 1


async def test_call_that_cannot_be_continued_is_sampled_again(running: Running, model: ScriptedModel) -> None:
    deep = "[" * 600 + "]" * 600
    model.says = [f'<tool_call>{{"name": "search", "arguments": {{"query": {deep}}}}}</tool_call>', CALL]
    asked, session = client(running), running.session
    with pytest.raises(openai.APIStatusError) as refused:
        await say(asked, QUESTION, tools=[TOOL])
    assert (refused.value.status_code, session.failure and session.failure.code) == (503, "reply_not_parsed")
    assert (await say(asked, QUESTION, tools=[TOOL])).tool_calls
    assert (len(session.turns), session.failure) == (1, None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "more",
    [
        {"messages": "2 + 2?", "input": 3},
        {"messages": [], "input": []},
        {"messages": [3], "input": [3]},
        {"messages": [{"role": "robot", "content": "x"}], "input": [{"role": "robot", "content": "x"}]},
        {"tools": [3]},
        {"tools": 3},
        {"tools": [{"type": "function", "function": {"name": 3}, "input_schema": {}}]},
        {"max_tokens": "many", "max_output_tokens": "many"},
        {"stop": 3, "stop_sequences": 3, "text": 3},
        {"tool_choice": 3},
    ],
)
async def test_request_of_wrong_types_is_refused_with_400(running: Running, path: str, more: Mapping[str, Any]) -> None:
    body = {"model": "tiny", "messages": QUESTION, "input": "2 + 2?", "max_tokens": 9, **more}
    async with httpx.AsyncClient(base_url=running.gateway.base_url(running.session)) as plain:
        answer = await plain.post(f"/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert not list(running.session.turns)
