"""tiny's chat template: the same text as before for conversations without tools, and tools in the Hermes form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gristmill_model import tiny
from gristmill_model.tokenizer import byte_tokenizer

Messages = list[dict[str, Any]]

CONVERSATIONS: list[Messages] = [
    [{"role": "user", "content": "What is 17 + 8?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 8?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": " c\n"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "<answer>25</answer>"}],
    [{"role": "user", "content": '<tool_call>{{ 1 }}</tool_call> & "é"'}, {"role": "system", "content": "Late."}],
    [{"role": "judge", "content": "A role that ChatML does not name."}],
]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "L'heure, à Paris <now>"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.build(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Messages | None = None) -> str:
    loose: Any = tokenizer
    text = loose.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def turns(text: str) -> list[tuple[str, str]]:
    """Returns role and text of each turn before the generation prompt."""
    *complete, prompt = text.split("<|im_start|>")[1:]
    assert prompt == "assistant\n"
    assert all(turn.endswith("<|im_end|>\n") for turn in complete)
    pairs = [turn.removesuffix("<|im_end|>\n").partition("\n") for turn in complete]
    return [(role, content) for role, _, content in pairs]


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("prompt", [True, False])
def test_template_renders_conversations_without_tools_as_the_plain_template_does(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Messages | None, prompt: bool
) -> None:
    plain: Any = byte_tokenizer(tiny.MAX_LENGTH)
    expected = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    expected += "<|im_start|>assistant\n" if prompt else ""
    one: Any
    for one in (plain, tokenizer):
        text = one.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        assert text == expected


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_template_lists_the_tools_in_one_system_turn(tokenizer: PreTrainedTokenizerFast, system: str) -> None:
    messages = [{"role": "user", "content": "What is 17 + 8?"}]
    given: Messages = [{"role": "system", "content": system}, *messages] if system else messages
    (role, section), user = turns(rendered(tokenizer, given, [ADD, CLOCK]))
    assert (role, user) == ("system", ("user", "What is 17 + 8?"))
    opening, _, rest = section.partition("<tools>\n")
    assert opening == f"{system}\n\n" * bool(system) + "You may call these functions:\n"
    tools, _, instruction = rest.partition("\n</tools>\n")
    assert [json.loads(line) for line in tools.splitlines()] == [ADD, CLOCK]
    assert "L'heure, à Paris <now>" in tools
    assert instruction.endswith('\n<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>')


@pytest.mark.parametrize("content", [None, "", "Let me see."])
@pytest.mark.parametrize("as_text", [True, False])
def test_template_renders_parallel_calls_as_the_model_writes_them(
    tokenizer: PreTrainedTokenizerFast, content: str | None, as_text: bool
) -> None:
    arguments = {"a": 17, "text": 'é "quoted" <b>'}
    given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    message = {"role": "assistant", "content": content, "tool_calls": [call("add", given), call("clock", {})]}
    _, _, (role, text) = turns(rendered(tokenizer, [{"role": "user", "content": "?"}, message], [ADD, CLOCK]))
    assert role == "assistant"
    *said, first, second = text.split("\n")
    assert said == ([content] if content else [])
    assert first == '<tool_call>{"name": "add", "arguments": {"a": 17, "text": "é \\"quoted\\" <b>"}}</tool_call>'
    assert second == '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


def test_template_accepts_an_assistant_message_without_a_content_key(tokenizer: PreTrainedTokenizerFast) -> None:
    messages: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call("clock", {})]}]
    assert turns(rendered(tokenizer, messages, [CLOCK]))[2] == (
        "assistant",
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
    )


@pytest.mark.parametrize("tools", [[ADD], None])
def test_template_puts_results_in_a_row_into_one_user_turn(
    tokenizer: PreTrainedTokenizerFast, tools: Messages | None
) -> None:
    def result(text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "call-add", "content": text}

    messages: Messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 1}), call("add", {"a": 2})]},
        result("1"),
        result("2"),
        {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 3})]},
        result("3"),
        {"role": "user", "content": "And?"},
    ]
    text = rendered(tokenizer, messages, tools)
    answers = [content for role, content in turns(text) if role == "user"]
    assert answers == [
        "?",
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        "<tool_response>\n3\n</tool_response>",
        "And?",
    ]


def test_short_tool_conversation_fits_into_the_context(tokenizer: PreTrainedTokenizerFast) -> None:
    messages: Messages = [
        {"role": "user", "content": "What is 17 + 8, and what time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 17}), call("clock", {})]},
        {"role": "tool", "content": "25"},
        {"role": "tool", "content": "12:00"},
    ]
    assert len(tokenizer.encode(rendered(tokenizer, messages, [ADD, CLOCK]))) < 1000 < tiny.MAX_LENGTH
