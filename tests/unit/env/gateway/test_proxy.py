"""The proxy of managed servers answers as atroposlib's does. integration/loop/test_atropos.py trains behind it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.unit.env.gateway.conftest import Running, ScriptedModel

from gristmill_env.commands.proxy import ManagedProxy, serving_managed
from gristmill_env.gateway import serving

QUESTION = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving_managed(running.policy, ("127.0.0.1", 0), {}) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield client


async def opened(http: httpx.AsyncClient) -> str:
    return str((await http.post("/sessions/create", json={"tool_parser": "hermes"})).json()["uuid"])


async def chat(http: httpx.AsyncClient, uuid: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    return (await http.post(f"/{uuid}/v1/chat/completions", json={"messages": messages, **more})).json()


async def nodes(http: httpx.AsyncClient, uuid: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get(f"/{uuid}/nodes")).json()["nodes"]
    return found


async def test_each_reply_of_a_request_is_a_node(http: httpx.AsyncClient, model: ScriptedModel) -> None:
    model.says = ["four", "five", "six"]
    uuid = await opened(http)
    answer = await chat(http, uuid, QUESTION, n=3, max_tokens=7, temperature=0.5)
    said = [choice["message"]["content"] for choice in answer["choices"]]
    assert sorted(said) == ["five", "four", "six"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    asked = [body["sampling_params"] for body in model.server.bodies if "sampling_params" in body]
    assert [(one["temperature"], one["max_tokens"]) for one in asked] == [(0.5, 7)] * 3
    found = await nodes(http, uuid)
    texts = [node["full_text"].removeprefix(model.prompts[0]) for node in found]
    assert sorted(texts) == sorted(f"{text}<|im_end|>" for text in said)
    for node in found:
        prompt = len(model.tokenizer(model.prompts[0], add_special_tokens=False)["input_ids"])
        own = len(node["tokens"]) - prompt
        assert own > 0
        assert node["masked_tokens"] == [-100] * prompt + node["tokens"][prompt:]
        assert node["logprobs"] == [1.0] * prompt + [-0.25] * own
        assert node["metadata"] == {"finish_reason": "stop"}


async def test_nodes_are_in_the_order_of_the_choices(http: httpx.AsyncClient, model: ScriptedModel) -> None:
    model.says = ["four", "five", "six"]
    asked, others_asked = itertools.count(1), threading.Event()

    def answer_the_first_request_last() -> None:
        if (number := next(asked)) == 3:
            others_asked.set()
        elif number == 1:
            assert others_asked.wait(30)

    model.hold = answer_the_first_request_last
    uuid = await opened(http)
    first = await chat(http, uuid, QUESTION, n=3)
    said = [choice["message"]["content"] for choice in first["choices"]]
    assert [node["full_text"].rpartition("\n")[2] for node in await nodes(http, uuid)] == [
        f"{one}<|im_end|>" for one in said
    ]
    more = [*QUESTION, {"role": "assistant", "content": said[0]}, {"role": "user", "content": "sure?"}]
    for _ in range(2):
        await chat(http, uuid, more)
    starts = [node["full_text"].split("assistant\n")[1].partition("<")[0] for node in await nodes(http, uuid)]
    assert starts == [*said, said[0]], "a second reply to the same messages is another node, at the end"


async def test_second_turn_extends_its_node(http: httpx.AsyncClient, model: ScriptedModel) -> None:
    model.says = ["four", "sure"]
    uuid = await opened(http)
    more = [*QUESTION, {"role": "assistant", "content": "four"}, {"role": "user", "content": "sure?"}]
    assert (await chat(http, uuid, QUESTION))["choices"][0]["message"]["content"] == "four"
    rendered = (await http.post(f"/{uuid}/v1/chat/completions/render", json={"messages": more})).json()
    assert len(rendered["token_ids"]) == rendered["num_tokens"]
    assert (await chat(http, uuid, more))["choices"][0]["message"]["content"] == "sure"
    assert rendered["prompt_text"] == model.prompts[1]
    [node] = await nodes(http, uuid)
    trained = [token for token in node["masked_tokens"] if token != -100]
    assert model.tokenizer.decode(trained) == "four<|im_end|>sure<|im_end|>"
    assert node["tokens"][: rendered["num_tokens"]] == rendered["token_ids"]


async def test_session_streams_at_the_path_of_the_gateway(http: httpx.AsyncClient) -> None:
    uuid = await opened(http)
    streamed = await http.post(f"/s/{uuid}/v1/chat/completions", json={"messages": QUESTION, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    answer = await http.post(f"/s/{uuid}/v1/messages", json={"messages": QUESTION, "max_tokens": 8})
    assert answer.json()["content"] == [{"type": "text", "text": "4"}]
    assert len(await nodes(http, uuid)) == 2


async def test_tool_calls_need_no_parser_of_the_environment(http: httpx.AsyncClient, model: ScriptedModel) -> None:
    model.says = ['<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>']
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    [choice] = (await chat(http, await opened(http), QUESTION, tools=tools))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


async def test_repeated_request_for_several_replies_gets_the_same(
    http: httpx.AsyncClient, model: ScriptedModel
) -> None:
    model.says = ["four", "five", "six", "seven"]
    uuid = await opened(http)
    first = await chat(http, uuid, QUESTION, n=2)
    body = {"messages": QUESTION, "n": 2}
    headers = {"x-stainless-retry-count": "1"}
    again = (await http.post(f"/{uuid}/v1/chat/completions", json=body, headers=headers)).json()
    assert again["choices"] == first["choices"]
    assert (await chat(http, uuid, QUESTION, n=2))["choices"] != first["choices"]
    assert len(await nodes(http, uuid)) == 4


async def test_deleted_and_unknown_sessions_are_refused(http: httpx.AsyncClient) -> None:
    uuid = await opened(http)
    assert (await http.get("/health")).json() == {"status": "ok", "model": "tiny", "sessions": 1}
    assert (await http.delete(f"/{uuid}")).json() == {"status": "deleted", "uuid": uuid}
    for answer in (await http.get(f"/{uuid}/nodes"), await http.delete(f"/{uuid}"), await http.get("/x/nodes")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_session")
    assert (await chat(http, uuid, QUESTION))["error"]["code"] == "unknown_session"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"n": 0}, "bad_request"),
        ({"n": "2"}, "bad_request"),
        ({"temperature": "hot"}, "bad_request"),
        ({"temperature": -1}, "bad_request"),
        ({"stream": True}, "stream"),
        ({"response_format": {"type": "json_object"}}, "other_distribution"),
    ],
)
async def test_request_that_the_proxy_cannot_serve_is_refused(
    http: httpx.AsyncClient, more: dict[str, Any], code: str
) -> None:
    uuid = await opened(http)
    assert (await chat(http, uuid, QUESTION, **more))["error"]["code"] == code
    assert await nodes(http, uuid) == []


async def test_session_that_was_unused_the_longest_makes_room(running: Running) -> None:
    managed = ManagedProxy(running.policy, most=2)
    async with (
        serving(managed.sessions, "tiny", ("127.0.0.1", 0), {}, managed.routes()) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        first, second = await opened(http), await opened(http)
        await nodes(http, first)
        third = await opened(http)
        found = [(await http.get(f"/{uuid}/nodes")).status_code for uuid in (first, second, third)]
        await managed.close()
    assert found == [200, 404, 200]
