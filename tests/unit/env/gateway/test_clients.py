"""Clients as their makers publish them: the openai and anthropic packages, streaming or not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.support.errors import raises
from tests.unit.env.gateway.conftest import SAMPLING, TIED, Running, ScriptedModel, until

from gristmill_env.errors import EnvError, EpisodeError
from gristmill_env.gateway import Session, Sessions
from gristmill_env.gateway.dialects import DIALECTS
from gristmill_env.outages import may_pass
from gristmill_env.rollouts.prompts import PromptBuilder

pytestmark = pytest.mark.slow

QUESTION: list[Any] = [{"role": "user", "content": "2 + 2?"}]
BODY = {"model": "tiny", "messages": QUESTION}
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"name": "search", "description": "Searches.", "parameters": PARAMETERS}
TOOL: dict[str, Any] = {"type": "function", "function": SEARCH}
TWO_CALLS = (
    'Wait.<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    '<tool_call>{"name": "search", "arguments": {"query": "b"}}</tool_call>'
)


def client(running: Running, **options: Any) -> Any:
    """The openai package, without its types: the tests send what programs send."""
    return openai.AsyncOpenAI(base_url=running.url, api_key=running.session.key, **options)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Origin": "http://attacker.example"}, 403, "cross_site"),
        ({"Origin": "null"}, 403, "cross_site"),
        ({"Host": "rebound.example"}, 421, "host_not_allowed"),
    ],
)
async def test_web_pages_may_not_use_the_gateway(
    running: Running, headers: dict[str, str], status: int, code: str
) -> None:
    async with httpx.AsyncClient(base_url=running.gateway.url) as plain:
        for path in ("/agent/task", "/v1/chat/completions"):
            refused = await plain.post(path, headers=headers, json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


async def test_key_or_path_names_the_session(running: Running) -> None:
    for url, key in ((running.url, running.session.key), (running.gateway.base_url(running.session), "any")):
        asked: Any = openai.AsyncOpenAI(base_url=url, api_key=key)
        answer = await asked.chat.completions.create(model="tiny", messages=QUESTION)
        assert answer.choices[0].message.content == "4"
        assert [model.id async for model in asked.models.list()] == ["tiny"]
    with pytest.raises(openai.AuthenticationError) as refused:
        await openai.AsyncOpenAI(base_url=running.url, api_key="other").chat.completions.create(
            model="tiny", messages=QUESTION
        )
    assert refused.value.code == "unknown_session"


async def test_conversation_is_sent_as_the_sampled_tokens(running: Running, model: ScriptedModel) -> None:
    asked = client(running)
    answer = await asked.chat.completions.create(model="tiny", messages=QUESTION)
    more = [*QUESTION, answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    again = await asked.chat.completions.create(model="tiny", messages=more)
    first, second = running.session.turns
    assert second.parent is first
    assert model.server.bodies[-1]["token_ids"][: len(first.token_ids)] == first.token_ids
    assert model.prompts[-1] == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens == len(second.token_ids) - len(second.sampled)
    (branch,) = running.session.branches()
    assert branch.mask.sum() == len(first.sampled) + len(second.sampled)


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls_and_both_results_reach_the_model(
    running: Running, model: ScriptedModel, stream: bool
) -> None:
    model.says = [TWO_CALLS, "Done"]
    asked = client(running)
    if stream:
        calls: dict[int, dict[str, Any]] = {}
        text, reasons, usage = "", [], None
        async for chunk in await asked.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
                for call in choice.delta.tool_calls or []:
                    calls[call.index] = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        assert reasons == ["tool_calls"]
        assert usage is not None
        message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": list(calls.values())}
    else:
        answer = await asked.chat.completions.create(model="tiny", messages=QUESTION, tools=[TOOL])
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message.model_dump()
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"query": "a"},
        {"query": "b"},
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
        for number, call in enumerate(message["tool_calls"])
    ]
    await asked.chat.completions.create(model="tiny", messages=[*QUESTION, message, *results], tools=[TOOL])
    first, second = running.session.turns
    assert second.parent is first
    assert model.prompts[-1].endswith(
        "<|im_start|>tool\nresult 0<|im_end|>\n<|im_start|>tool\nresult 1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.prompts[-1].count("<tool_call>") == 2, "the calls are there as they were sampled, and once"


@pytest.mark.parametrize(
    ("path", "tool", "choice"),
    [
        ("/chat/completions", TOOL, "none"),
        ("/responses", {"type": "function", **SEARCH}, "none"),
        ("/messages", {"name": "search", "description": "", "input_schema": PARAMETERS}, {"type": "none"}),
    ],
)
async def test_request_without_calls_keeps_the_tools_and_continues(
    running: Running, model: ScriptedModel, path: str, tool: dict[str, Any], choice: Any
) -> None:
    model.says = ["4", TWO_CALLS]
    more = [*QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    async with httpx.AsyncClient(base_url=running.gateway.base_url(running.session), timeout=60) as plain:
        body: dict[str, Any] = {"messages": QUESTION, "input": QUESTION, "max_tokens": 64, "tools": [tool]}
        assert (await plain.post(path, json=body)).status_code == 200
        body |= {"messages": more, "input": more, "tool_choice": choice}
        assert (await plain.post(path, json=body)).status_code == 200
    first, second = running.session.turns
    assert second.parent is first
    assert (second.stored.answer["content"], second.stored.answer.get("tool_calls")) == (TWO_CALLS, None)


@pytest.mark.parametrize("template", TIED)
async def test_results_reach_the_model_by_templates_that_need_the_calls(
    running: Running, model: ScriptedModel, template: str
) -> None:
    model.tokenizer.chat_template = template
    policy = dataclasses.replace(running.policy, prompts=PromptBuilder(model.tokenizer))
    session = Session(policy, SAMPLING, folder=running.folder, number=1)
    running.gateway.sessions.add(session)
    model.says = [TWO_CALLS, "Done", "4"]
    asked: Any = openai.AsyncOpenAI(base_url=running.url, api_key=session.key)
    said: list[Any] = list(QUESTION)
    for _ in range(3):
        answer = (await asked.chat.completions.create(model="tiny", messages=said, tools=[TOOL])).choices[0].message
        calls = answer.tool_calls or ()
        results = [{"role": "tool", "tool_call_id": call.id, "content": f"of {call.id}"} for call in calls]
        said += [answer, *(results or [{"role": "user", "content": "Sure?"}])]
    end = (
        "</tool_call><|im_end|>\n<|im_start|>tool\nof call_1<|im_end|>\n<|im_start|>tool\nof call_2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert model.prompts[1].endswith(end)
    assert model.prompts[1].count("<tool_call>") == 2
    assert model.prompts[2].startswith(model.prompts[1] + "Done<|im_end|>")
    asking, rendered = session.branches()
    bodies = [body for body in model.server.bodies if "sampling_params" in body]
    assert rendered.prompt.tolist() == bodies[1]["token_ids"]
    assert [branch.mask.sum() for branch in (asking, rendered)] == [len(TWO_CALLS) + 1, len("Done") + 1 + len("4") + 1]
    assert session.turns.counts() == {"conversations": 2, "rendered": 1}
    await session.close()
    again = Session(policy, SAMPLING, folder=running.folder, number=1)
    assert again.turns.counts() == {"conversations": 2, "rendered": 1}
    await again.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_client_calls_tools(running: Running, model: ScriptedModel, stream: bool) -> None:
    model.says = [TWO_CALLS, "Done"]
    asked: Any = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key=running.session.key)
    tools: list[Any] = [{"name": "search", "description": "Searches.", "input_schema": PARAMETERS}]
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "system": "Be brief.", "tools": tools}

    async def say(messages: list[Any]) -> Any:
        if not stream:
            return await asked.messages.create(messages=messages, **settings)
        async with asked.messages.stream(messages=messages, **settings) as answer:
            return await answer.get_final_message()

    message = await say(QUESTION)
    assert message.stop_reason == "tool_use"
    turn = running.session.turns[0]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(turn.given), len(turn.sampled))
    text, *calls = message.content
    assert (text.text, [call.input for call in calls]) == ("Wait.", [{"query": "a"}, {"query": "b"}])
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "nothing"} for call in calls]
    echo = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    last = await say([*QUESTION, echo, {"role": "user", "content": results}])
    assert last.content[0].text == "Done"
    assert last.stop_reason == "end_turn"
    first, second = running.session.turns
    assert second.parent is first
    assert len(second.stored.more) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_api_calls_tools(running: Running, model: ScriptedModel, stream: bool) -> None:
    model.says = [TWO_CALLS, "Done"]
    asked = client(running)
    tools: list[Any] = [{"type": "function", "strict": False, **TOOL["function"]}]

    async def say(items: list[Any]) -> Any:
        settings: dict[str, Any] = {"model": "tiny", "instructions": "Search.", "tools": tools}
        if not stream:
            return await asked.responses.create(input=items, **settings)
        async with asked.responses.stream(input=items, **settings) as events:
            return await events.get_final_response()

    answer = await say(list(QUESTION))
    turn = running.session.turns[0]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(turn.given), len(turn.sampled))
    message, *calls = answer.output
    assert message.content[0].text == "Wait."
    assert [json.loads(call.arguments) for call in calls] == [{"query": "a"}, {"query": "b"}]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "nothing"} for call in calls]
    echo = [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in answer.output]
    last = await say([*QUESTION, *echo, *results])
    assert last.output_text == "Done"
    first, second = running.session.turns
    assert second.parent is first, "the second request continues the first"
    assert len(second.stored.more) == 2


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("logit_bias", {"logit_bias": {"5": 10}}),
        ("n", {"n": 2}),
        ("logprobs", {"logprobs": True}),
        *((name, {"extra_body": {name: [5]}}) for name in ("stop_token_ids", "allowed_token_ids")),
        ("min_tokens", {"extra_body": {"min_tokens": 5}}),
        ("guided_grammar", {"extra_body": {"guided_grammar": "root ::= 'x'"}}),
        ("chat_template_kwargs", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}),
        ("functions", {"functions": [SEARCH], "function_call": "auto"}),
        ("function_call", {"function_call": {"name": "search"}}),
        ("modalities", {"modalities": ["text", "audio"]}),
    ],
)
async def test_request_for_another_distribution_names_the_field(
    running: Running, field: str, more: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client(running).chat.completions.create(model="tiny", messages=QUESTION, **more)
    assert refused.value.param == field
    assert refused.value.code in {"other_distribution", "not_supported"}
    assert not list(running.session.turns)


async def test_sampling_parameters_are_the_runs(running: Running, model: ScriptedModel) -> None:
    await client(running).chat.completions.create(
        model="gpt-9", messages=QUESTION, temperature=0, top_p=0.1, max_tokens=7, tools=[], seed=1, presence_penalty=1,
        modalities=["text"], extra_body={"chat_template_kwargs": {}, "min_tokens": 0, "stop_token_ids": []},
    )  # fmt: skip
    sampling = model.server.bodies[-1]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["max_tokens"]) == (1.0, 1.0, 7)
    assert "seed" not in sampling


async def test_stops_are_the_runs_and_the_requests(running: Running, model: ScriptedModel) -> None:
    session = Session(dataclasses.replace(running.policy, stop=("####",), stop_token_ids=(7,)), SAMPLING)
    running.gateway.sessions.add(session)
    asked = openai.AsyncOpenAI(base_url=running.url, api_key=session.key)
    await asked.chat.completions.create(model="tiny", messages=QUESTION, stop=["END"])
    sampling = model.server.bodies[-1]["sampling_params"]
    assert (sampling["stop"], sampling["stop_token_ids"]) == (["####", "END"], [7])


async def test_too_long_conversation_has_openais_code(running: Running) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client(running).chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 2000}])
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"output_format": {"type": "json_schema", "schema": PARAMETERS}}, "output_format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}}, "output_config"),
        ({"tools": [{"name": "search", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
async def test_refusals_have_anthropics_form(running: Running, more: dict[str, Any], field: str) -> None:
    asked: Any = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key=running.session.key)
    with pytest.raises(anthropic.BadRequestError) as refused:
        await asked.messages.create(model="tiny", max_tokens=9, messages=QUESTION, extra_body=more)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert f"'{field}'" in body["error"]["message"]
    assert "[other_distribution]" in body["error"]["message"]
    unknown: Any = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key="other")
    with pytest.raises(anthropic.AuthenticationError) as without:
        await unknown.messages.create(model="tiny", max_tokens=9, messages=QUESTION)
    body = without.value.body
    assert body["error"]["type"] == "authentication_error"


async def test_refusals_have_openais_form(running: Running, model: ScriptedModel) -> None:
    async with httpx.AsyncClient(base_url=running.gateway.base_url(running.session)) as plain:
        refused = await plain.post("/chat/completions", json={**BODY, "n": 2})
        assert refused.json()["error"].keys() == {"message", "type", "param", "code"}
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        model.tokenizer.chat_template = "{{ raise_exception('no system message') }}"
        failed = await plain.post("/chat/completions", json=BODY)
    assert (failed.status_code, failed.json()["error"]["code"]) == (400, "chat_template_failed")


@pytest.mark.parametrize(
    ("path", "more", "sign"),
    [
        ("/chat/completions", {"tools": [TOOL]}, ": keep-alive"),
        ("/responses", {"input": "2 + 2?", "tools": [{"type": "function", **SEARCH}]}, ": keep-alive"),
        ("/messages", {"max_tokens": 50, "tools": [{"name": "search", "input_schema": PARAMETERS}]}, "event: ping"),
    ],
)
async def test_stream_shows_signs_of_life_while_a_tool_call_is_sampled(
    running: Running, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any], sign: str
) -> None:
    monkeypatch.setattr("gristmill_env.gateway.server._KEEP_ALIVE", 0.01)
    go_on = threading.Event()
    model.hold, model.says = lambda: (go_on.wait(30), None)[1], [TWO_CALLS]
    body = {**BODY, "stream": True, **more}
    async with (
        httpx.AsyncClient(base_url=running.gateway.base_url(running.session), timeout=30) as plain,
        plain.stream("POST", path, json=body) as answer,
    ):
        lines = answer.aiter_lines()
        async for line in lines:
            if line == sign:
                break
        go_on.set()
        rest = "".join([line async for line in lines])
    assert rest.count('"search"') >= 2


async def test_error_of_a_stream_is_an_event(running: Running, model: ScriptedModel) -> None:
    model.server.answers["/inference/v1/generate"] = lambda: (400, {"error": "no"})
    with pytest.raises(openai.APIError) as failed:
        async for _ in await client(running, max_retries=0).chat.completions.create(
            model="tiny", messages=QUESTION, stream=True
        ):
            pass
    assert failed.value.code == "every_prompt_refused"
    assert running.session.failure is not None


async def test_repetition_of_a_request_gets_the_first_reply(running: Running, model: ScriptedModel) -> None:
    model.says = ["one", "two", "three", "four"]
    body = {"model": "tiny", "messages": QUESTION}
    headers = {"Authorization": f"Bearer {running.session.key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers) as plain:

        async def say(more: dict[str, str] | None = None, most: int = 9) -> str:
            answer = await plain.post("/chat/completions", json={**body, "max_tokens": most}, headers=more)
            return str(answer.json()["choices"][0]["message"]["content"])

        assert await say() == "one"
        assert await say({"x-stainless-retry-count": "1"}) == "one"
        assert await say() == "two", "an equal request without either header is a new one"
        assert await say({"Idempotency-Key": "k"}) == "three"
        assert await say({"Idempotency-Key": "k"}) == "three"
        assert await say({"Idempotency-Key": "k"}, most=8) == "four", "a request with another limit is another request"
    assert len(running.session.turns) == 4


async def test_client_that_gives_up_and_repeats_gets_the_reply_in_work(running: Running, model: ScriptedModel) -> None:
    go_on = threading.Event()
    model.hold = lambda: (go_on.wait(30), None)[1]
    model.says = ["one", "two"]
    body, headers = {"model": "tiny", "messages": QUESTION}, {"Authorization": f"Bearer {running.session.key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers) as plain:
        with pytest.raises(httpx.ReadTimeout):
            await plain.post("/chat/completions", json=body, timeout=httpx.Timeout(30, read=1.0))
        go_on.set()
        answer = await plain.post("/chat/completions", json=body, headers={"x-stainless-retry-count": "1"}, timeout=30)
    assert answer.json()["choices"][0]["message"]["content"] == "one"
    assert len(running.session.turns) == len(running.session.branches()) == 1


async def test_reply_that_nobody_received_is_not_trained(running: Running, model: ScriptedModel) -> None:
    go_on = threading.Event()
    model.hold = lambda: (go_on.wait(30), None)[1]
    async with httpx.AsyncClient(base_url=running.gateway.base_url(running.session)) as plain:
        with pytest.raises(httpx.ReadTimeout):
            await plain.post(
                "/chat/completions", json={"model": "tiny", "messages": QUESTION}, timeout=httpx.Timeout(30, read=1.0)
            )
    go_on.set()
    await until(lambda: len(running.session.turns) == 1)
    assert running.session.branches() == []


async def test_bounds_of_a_session(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    session = running.open(1)
    asked: Any = openai.AsyncOpenAI(base_url=running.gateway.base_url(session), api_key="any", max_retries=0)
    await asked.chat.completions.create(model="tiny", messages=QUESTION)
    monkeypatch.setattr("gristmill_env.gateway.sessions._MOST_TOKENS", session.turns.tokens)
    for number, code in ((500, "too_many_tokens"), (1, "too_many_turns")):
        monkeypatch.setattr(session, "_most_turns", number)
        with pytest.raises(openai.BadRequestError) as full:
            await asked.chat.completions.create(model="tiny", messages=QUESTION)
        assert full.value.code == code
    with raises(EnvError, "too_many_sessions"):
        Sessions(most=0).add(session)
    await session.close()
    with pytest.raises(openai.APIStatusError) as gone:
        await asked.chat.completions.create(model="tiny", messages=QUESTION)
    assert (gone.value.status_code, gone.value.code) == (410, "session_closed")


async def test_killed_process_goes_on_with_the_rollout(running: Running, model: ScriptedModel) -> None:
    model.says = ["one", "two", "three"]
    headers = {"Authorization": f"Bearer {running.session.key}"}
    question = {"model": "tiny", "messages": QUESTION}
    more = {"model": "tiny", "messages": [*QUESTION, {"role": "assistant", "content": "one"}, *QUESTION]}
    async with httpx.AsyncClient(base_url=running.url, headers=headers) as plain:

        async def say(body: Any, **sent: str) -> Any:
            return (await plain.post("/chat/completions", json=body, headers=sent)).json()

        await say(question)
        assert (await say(more))["choices"][0]["message"]["content"] == "two"
        before = list(running.session.turns)
        await running.session.close()  # as a kill does, this leaves the file
        running.gateway.sessions.remove(running.session)
        assert (await say(more))["error"]["code"] == "session_not_open"

        resumed = running.open(folder=running.folder)
        assert resumed.resumed
        again = await say(more, **{"x-stainless-retry-count": "1"})
        assert again["choices"][0]["message"]["content"] == "two", "the reply may not have arrived"
        assert len(resumed.turns) == 2
        last = [*more["messages"], {"role": "assistant", "content": "two"}, *QUESTION]
        assert (await say({"model": "tiny", "messages": last}))["choices"][0]["message"]["content"] == "three"
    first, second, third = resumed.turns
    assert [first.token_ids, second.token_ids] == [turn.token_ids for turn in before]
    assert third.parent is second
    (branch,) = resumed.branches()
    assert int(branch.mask.sum()) == sum(len(turn.sampled) for turn in resumed.turns)
    await resumed.end(0.5)
    await resumed.close()
    ended = running.open(folder=running.folder).ended
    assert ended is not None
    assert ended.reward == 0.5


async def test_repetition_of_a_keyed_request_gets_its_reply_after_a_kill(
    running: Running, model: ScriptedModel
) -> None:
    model.says = ["one", "two"]
    headers = {"Authorization": f"Bearer {running.session.key}", "Idempotency-Key": "a"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers) as plain:

        async def say(text: str) -> str:
            body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
            answer = (await plain.post("/chat/completions", json=body)).json()
            return str(answer["choices"][0]["message"]["content"])

        assert await say("2 + 2?") == "one"
        await running.session.close()
        running.gateway.sessions.remove(running.session)
        resumed = running.open(folder=running.folder)
        assert await say("2 + 2?") == "one"
        assert await say("3 + 3?") == "two", "another request was not answered before, whatever its key is"
    assert len(resumed.turns) == 2


async def test_key_in_the_path_is_not_replaced_by_an_api_key(running: Running) -> None:
    url = f"{running.gateway.url}/s/ended/v1/chat/completions"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {running.session.key}"}) as plain:
        answer = await plain.post(url, json={"model": "tiny", "messages": QUESTION})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unknown_session")
    assert not list(running.session.turns)


async def test_requests_at_once_keep_the_bound_of_replies_and_end_with_the_session(
    running: Running, model: ScriptedModel
) -> None:
    go_on = threading.Event()
    model.hold = lambda: (go_on.wait(30), None)[1]
    session = running.open(3)
    asked = [session.reply(session.prepare(DIALECTS["/v1/chat/completions"].read(BODY))) for _ in range(5)]
    replies = [asyncio.create_task(one) for one in asked]
    refused, _ = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
    assert {getattr(one.exception(), "code", None) for one in refused} == {"too_many_turns"}
    sampling = set(session._working)
    assert len(sampling) == 3
    await session.close()
    assert all(task.cancelled() for task in sampling), "equal requests too"
    go_on.set()
    await asyncio.gather(*replies, return_exceptions=True)


async def test_repetition_of_the_last_allowed_request_gets_its_reply(running: Running) -> None:
    session = running.open(1)
    async with httpx.AsyncClient(base_url=running.gateway.base_url(session)) as plain:
        for again in ("0", "1"):
            answer = await plain.post("/chat/completions", json=BODY, headers={"x-stainless-retry-count": again})
            assert answer.status_code == 200, answer.text
    assert len(session.turns) == 1


@pytest.mark.parametrize("stop", ["Observation:", ["x", "Observation:"]])
async def test_text_of_stop_is_sampled_and_not_answered(running: Running, model: ScriptedModel, stop: Any) -> None:
    model.says = ["Thought.\nObservation:", "Done"]
    asked = client(running)
    reply = (await asked.chat.completions.create(model="tiny", messages=QUESTION, stop=stop)).choices[0].message
    assert reply.content == "Thought.\n"
    await asked.chat.completions.create(model="tiny", messages=[*QUESTION, reply, *QUESTION], stop=stop)
    first, second = running.session.turns
    assert second.parent is first
    assert "Thought.\nObservation:" in model.prompts[-1], "as it was sampled"


@pytest.mark.parametrize(("said", "stop"), [("A. END", "END"), ("A. Observation: END", "Observation:"), ("A.", None)])
async def test_messages_name_the_text_that_ended_the_reply(
    running: Running, model: ScriptedModel, said: str, stop: str | None
) -> None:
    model.says = [said, said]
    asked = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key=running.session.key, max_retries=0)
    request: Any = {"model": "tiny", "max_tokens": 64, "messages": QUESTION, "stop_sequences": ["END", "Observation:"]}
    plain = await asked.messages.create(**request)
    async with asked.messages.stream(**request) as stream:
        streamed = await stream.get_final_message()
    for message in (plain, streamed):
        reason = "end_turn" if stop is None else "stop_sequence"
        assert (message.stop_reason, message.stop_sequence) == (reason, stop)


async def test_session_whose_file_another_process_has_fails_its_rollout_only(running: Running) -> None:
    await running.session.begin()
    with raises(EpisodeError, "session_not_opened", path=running.folder) as refused:
        running.open(folder=running.folder)
    assert may_pass(refused.value)


async def test_session_of_another_group_is_not_resumed(running: Running) -> None:
    session = running.open(folder=running.folder.with_name("g00000002"))
    assert not session.resumed


BROKEN = '<tool_call>{"name": "search", "arguments": "Rome"}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_call_whose_arguments_are_no_object_is_one_for_anthropics_clients(
    running: Running, model: ScriptedModel, stream: bool
) -> None:
    model.says = [BROKEN, "Done"]
    asked: Any = anthropic.AsyncAnthropic(base_url=running.gateway.url, api_key=running.session.key)
    tools: list[Any] = [{"name": "search", "description": "Searches.", "input_schema": PARAMETERS}]
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "tools": tools}
    if stream:
        async with asked.messages.stream(messages=QUESTION, **settings) as answer:
            message = await answer.get_final_message()
    else:
        message = await asked.messages.create(messages=QUESTION, **settings)
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.input == {"INVALID_JSON": '"Rome"'}
    echo = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "no"}]
    await asked.messages.create(messages=[*QUESTION, echo, {"role": "user", "content": result}], **settings)
    first, second = running.session.turns
    assert second.parent is first


@pytest.mark.parametrize("stream", [False, True])
async def test_end_of_a_rollout_answers_the_requests_in_work(
    running: Running, model: ScriptedModel, stream: bool
) -> None:
    asked, released = threading.Event(), threading.Event()

    def hold() -> None:
        asked.set()
        released.wait(60)

    model.hold = hold
    body = {"model": "tiny", "messages": QUESTION, "stream": stream}
    headers = {"Authorization": f"Bearer {running.session.key}"}
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as http:
        request = asyncio.create_task(http.post("/chat/completions", json=body, headers=headers))
        await asyncio.to_thread(asked.wait, 60)
        await running.session.close()
        answer = await request
    released.set()
    assert "session_closed" in answer.text
    assert stream or answer.status_code == 410


async def test_session_ends_with_a_line_that_the_disk_does_not_take(
    running: Running, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = running.session
    asked = client(running, max_retries=0)
    await session.begin()
    await asked.chat.completions.create(model="tiny", messages=QUESTION)

    def full(line: bytes) -> None:
        raise OSError(28, "No space left on device")

    assert session._file is not None
    append = session._file.append
    monkeypatch.setattr(session._file, "append", full)
    with pytest.raises(openai.APIStatusError) as refused:
        await asked.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "B"}])
    assert (refused.value.status_code, session.failure and session.failure.code) == (503, "session_not_written")
    monkeypatch.setattr(session._file, "append", append)
    with pytest.raises(openai.APIStatusError) as refused:
        await asked.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "C"}])
    assert refused.value.status_code == 410
    await session.close()
    again = running.open(folder=running.folder)
    assert [turn.stored.more for turn in again.turns] == [session.turns[0].stored.more]
    await again.close()


async def test_parallel_turns_are_on_disk_in_the_order_of_their_numbers(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = running.session
    await session.begin()
    assert session._file is not None
    append, started = session._file.append, threading.Event()

    def slowly_first(line: bytes) -> None:
        if not started.is_set():
            started.set()
            while len(session.turns) < 4:  # the others would overtake it
                time.sleep(0.01)
        append(line)

    monkeypatch.setattr(session._file, "append", slowly_first)
    asked = client(running)
    requests = [
        asked.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}]) for text in "abcd"
    ]
    await asyncio.gather(*requests)
    before = [turn.stored.more for turn in session.turns]
    await session.close()
    again = running.open(folder=running.folder)
    assert [turn.stored.more for turn in again.turns] == before
    await again.close()
