"""A real vLLM parses sampled token ids into content and tool calls, and its other routes answer as before."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.support.stack import Vllm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gristmill import Manifest

DERENDER = "/v1/chat/completions/derender"
FUNCTION = {"name": "add", "description": "Adds numbers.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALLS = (
    "Let me see.\n"
    '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 8}}</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "é <b>"}}</tool_call>'
)


@pytest.fixture
def tokenizer(vllm: Vllm) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(Manifest.read(vllm.models_dir).tokenizer_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def parsed(vllm: Vllm, token_ids: list[int], tools: list[dict[str, Any]]) -> dict[str, Any]:
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "?"}]}
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": "stop"}
    body = {
        "model": "tiny",
        "generate_response": {"request_id": "one", "choices": [choice]},
        "chat_request": {**chat, "tools": tools} if tools else chat,
    }
    answer = httpx.post(f"{vllm.url}{DERENDER}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["choices"]
    message: dict[str, Any] = found["message"]
    return message


def test_server_returns_two_parallel_calls_from_token_ids(vllm: Vllm, tokenizer: PreTrainedTokenizerFast) -> None:
    message = parsed(vllm, tokenizer.encode(CALLS), [TOOL])
    calls = [call["function"] for call in message["tool_calls"]]
    assert [call["name"] for call in calls] == ["add", "add"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"a": 17, "b": 8}, {"a": 1, "note": "é <b>"}]
    assert message["content"].strip() == "Let me see."


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_text_without_calls_stays_the_content(
    vllm: Vllm, tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, Any]]
) -> None:
    message = parsed(vllm, tokenizer.encode("<answer>25</answer>"), tools)
    assert message["content"] == "<answer>25</answer>"
    assert not message.get("tool_calls")


def test_end_token_stays_in_the_content(vllm: Vllm, tokenizer: PreTrainedTokenizerFast) -> None:
    """So a client leaves it out. docs/servers.md says so."""
    assert parsed(vllm, tokenizer.encode("25<|im_end|>"), [TOOL])["content"] == "25<|im_end|>"


def test_token_ids_beyond_the_models_length_are_refused(vllm: Vllm) -> None:
    choice = {"index": 0, "token_ids": [40] * (Manifest.read(vllm.models_dir).max_model_len + 1)}
    body = {
        "generate_response": {"choices": [choice]},
        "chat_request": {"messages": [{"role": "user", "content": "?"}]},
    }
    assert httpx.post(f"{vllm.url}{DERENDER}", json=body, timeout=60).status_code == 400


def test_chat_returns_the_text_of_the_sampled_tokens(vllm: Vllm, tokenizer: PreTrainedTokenizerFast) -> None:
    """A greedy completion has the same tokens by chat and by token ids, and all of its text is the content."""
    messages = [{"role": "user", "content": "What is 17 + 8?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0}
    chat = httpx.post(f"{vllm.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    sampling = {"max_tokens": 16, "temperature": 0}
    body = {"model": "tiny", "token_ids": prompt, "sampling_params": sampling}
    choice = httpx.post(f"{vllm.url}/inference/v1/generate", json=body, timeout=60).json()["choices"][0]
    assert chat["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert not chat.get("tool_calls")


def test_server_renders_tools_as_the_tokenizer_does(vllm: Vllm, tokenizer: PreTrainedTokenizerFast) -> None:
    """If a tool has a description: vLLM adds `"description": null` to a tool without one."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17, "b": 8}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 17 + 8?"},
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "2"}]},
        {"role": "tool", "tool_call_id": "1", "content": "25"},
        {"role": "tool", "tool_call_id": "2", "content": "é"},
    ]
    body = {"model": "tiny", "messages": messages, "tools": [TOOL], "max_tokens": 1, "return_token_ids": True}
    answer = httpx.post(f"{vllm.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(answer.json()["prompt_token_ids"]) == text


def test_manifest_names_the_parsers_of_tiny(vllm: Vllm) -> None:
    manifest = Manifest.read(vllm.models_dir)
    assert (manifest.tool_parser, manifest.reasoning_parser) == ("hermes", None)
