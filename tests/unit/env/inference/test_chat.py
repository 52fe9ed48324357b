"""The requests to an OpenAI-compatible server, and how its answers are read. (tests/integration/env has a real
server.)"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer

from gristmill import SamplingParams
from gristmill_env.errors import InferenceError
from gristmill_env.inference import Completion, GenerationRequest, Thinking
from gristmill_env.inference.http import ServerHttp
from gristmill_env.inference.server import Dialect, generate_text
from gristmill_env.settings.run import EnvConfig

from .conftest import ASK, CHAT, answers, client, said

pytestmark = pytest.mark.slow


@pytest.fixture
def text_server(failing_server: FailingServer) -> FailingServer:
    failing_server.takes_tokens = False
    failing_server.answers[CHAT] = lambda: answers(said())
    return failing_server


async def ask(server: FailingServer, request: GenerationRequest = ASK, **options: Any) -> list[Completion]:
    async with client(server, **options) as servers:
        await servers.connect(patience=2)
        return await servers.generate(request)


async def test_chat_request_contains_only_requested_options(text_server: FailingServer) -> None:
    await ask(text_server)
    plain = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 1.0, "max_tokens": 4}
    assert text_server.bodies == [plain]


async def test_chat_request_contains_all_requested_options(text_server: FailingServer) -> None:
    text_server.answers[CHAT] = lambda: answers(said(), said("there", "length"))
    sampling = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=9)
    completions = await ask(text_server, dataclasses.replace(ASK, sampling=sampling, count=2, stop=["</a>"]))
    [body] = text_server.bodies
    assert {key: body[key] for key in ("temperature", "top_p", "max_tokens", "n", "stop")} == {
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "n": 2, "stop": ["</a>"]
    }  # fmt: skip
    assert [(c.text, c.finish_reason, c.length, c.token_ids) for c in completions] == [
        ("hi", "stop", None, []), ("there", "length", None, [])
    ]  # fmt: skip


async def test_chat_counts_the_tokens_of_a_single_completion(text_server: FailingServer) -> None:
    [completion] = await ask(text_server)
    assert completion.length == 7


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (said("72", reasoning="8 * 9\n"), "<think>\n8 * 9\n</think>\n\n72"),
        (said("72", reasoning_content="8 * 9"), "<think>\n8 * 9\n</think>\n\n72"),
        (said(None, "length", reasoning="8 *"), "<think>\n8 *"),
        (said(None, "stop", reasoning="8 * 9"), "<think>\n8 * 9\n</think>\n\n"),
        (said(None, "content_filter"), ""),
    ],
)
async def test_chat_puts_reasoning_back_where_the_model_wrote_it(
    text_server: FailingServer, choice: dict[str, Any], text: str
) -> None:
    text_server.answers[CHAT] = lambda: answers(choice)
    [completion] = await ask(text_server)
    assert (completion.text, completion.finish_reason) == (text, choice["finish_reason"])


async def test_chat_requests_an_aborted_completion_again(text_server: FailingServer) -> None:
    text_server.answers[CHAT] = lambda: answers(said(finish_reason=None if len(text_server.bodies) == 1 else "stop"))
    assert len(await ask(text_server, patience=10)) == 1
    assert len(text_server.bodies) == 2


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"prefill": "<think>"}, ["prefill"]),
        ({"stop_token_ids": [7]}, ["stop_token_ids"]),
        ({"stop_token_ids": [7], "prefill": "<"}, ["prefill", "stop_token_ids"]),
        ({"more": {"top_k": 5, "presence_penalty": 1.0}}, ["top_k"]),
        ({"template": {"chat_template": "{{ messages }}"}}, ["chat_template"]),
    ],
)
async def test_chat_refuses_vllm_options_on_other_servers(
    text_server: FailingServer, changes: dict[str, Any], settings: list[str]
) -> None:
    with raises(InferenceError, "needs_vllm", settings=settings):
        await ask(text_server, dataclasses.replace(ASK, **changes))
    assert text_server.bodies == []


async def test_chat_requests_further_sampling_and_values_of_the_template(text_server: FailingServer) -> None:
    penalty = {"presence_penalty": 1.0}
    await ask(text_server, dataclasses.replace(ASK, more=penalty))
    assert text_server.bodies[-1]["presence_penalty"] == 1.0
    text_server.answers["/v1/models"] = lambda: (200, {"data": [{"id": "tiny", "owned_by": "vllm"}]})
    template = {"chat_template": "{{ messages }}", "chat_template_kwargs": {"today": "x"}}
    request = dataclasses.replace(ASK, more={"top_k": 5, **penalty}, template=template)
    await ask(text_server, request, thinking=Thinking(enabled=True))
    body = text_server.bodies[-1]
    assert {key: body[key] for key in ("top_k", "presence_penalty", "chat_template", "chat_template_kwargs")} == {
        "top_k": 5, **penalty, **template, "chat_template_kwargs": {**switches(True), "today": "x"}
    }  # fmt: skip


def switches(on: bool) -> dict[str, bool]:
    return {"enable_thinking": on, "thinking": on}


@pytest.mark.parametrize(
    ("settings", "vllm", "openai", "other"),
    [
        ({}, {}, {}, {}),
        ({"thinking_mode": True}, {"chat_template_kwargs": switches(True)}, {"reasoning_effort": "medium"},
         {"reasoning": {"enabled": True}}),
        ({"thinking_mode": False}, {"chat_template_kwargs": switches(False)}, {},
         {"reasoning": {"enabled": False}}),
        ({"reasoning_effort": "high"},
         {"chat_template_kwargs": switches(True), "reasoning_effort": "high"}, {"reasoning_effort": "high"},
         {"reasoning": {"enabled": True, "effort": "high"}}),
        ({"reasoning_effort": "none"},
         {"chat_template_kwargs": switches(False), "reasoning_effort": "none"},
         {"reasoning_effort": "none"}, {"reasoning": {"enabled": False, "effort": "none"}}),
        ({"max_reasoning_tokens": 2048},
         {"chat_template_kwargs": switches(True), "thinking_token_budget": 2048},
         {"reasoning_effort": "medium"}, {"reasoning": {"enabled": True, "max_tokens": 2048}}),
        ({"max_reasoning_tokens": 2048, "reasoning_effort": "low"},
         {"chat_template_kwargs": switches(True), "reasoning_effort": "low", "thinking_token_budget": 2048},
         {"reasoning_effort": "low"}, {"reasoning": {"enabled": True, "effort": "low"}}),
    ],
)  # fmt: skip
def test_thinking_settings_are_translated_for_each_server(
    settings: dict[str, Any], vllm: dict[str, Any], openai: dict[str, Any], other: dict[str, Any]
) -> None:
    thinking = Thinking.of(EnvConfig(**settings))
    assert [thinking.body(dialect) for dialect in (Dialect.VLLM, Dialect.OPENAI, Dialect.OTHER)] == [
        vllm, openai, other
    ]  # fmt: skip


async def test_thinking_settings_are_sent_to_the_server(text_server: FailingServer) -> None:
    await ask(text_server, thinking=Thinking(enabled=True))
    assert text_server.bodies[0]["reasoning"] == {"enabled": True}


async def test_request_to_openai_uses_max_completion_tokens(text_server: FailingServer) -> None:
    http = ServerHttp(text_server.url, api_key=None, timeout=60)
    await generate_text(http, f"{text_server.url}{CHAT}", "m", ASK, Dialect.OPENAI, Thinking())
    await http.close()
    [body] = text_server.bodies
    assert body["max_completion_tokens"] == 4
    assert "max_tokens" not in body
