"""The chat template of `tiny`: ChatML, with tools in the form of the Hermes models and Qwen2.5.

This template is not in `tokenizer.py`, because the digest of the weights' recipe covers that module's code. A
conversation without tools has the same text in both templates.
"""

from __future__ import annotations

from typing import Final

_TOOLS = (
    r"{% if tools %}"
    r"{{ '<|im_start|>system\n' }}"
    r"{% if messages[0]['role'] == 'system' %}{{ (messages[0]['content'] or '') + '\n\n' }}{% endif %}"
    r"{{ 'You may call these functions:\n<tools>' }}"
    r"{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    r"{{ '\n</tools>\nTo call functions, answer with one line per call:\n' }}"
    r"""{{ '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\n' }}"""
    r"{% endif %}"
)
_RESULT = (
    r"{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    r"{{ '\n<tool_response>\n' + (message['content'] or '') + '\n</tool_response>' }}"
    r"{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    r"{% for call in message['tool_calls'] or [] %}"
    r"{% set function = call['function'] or call %}"
    r"{% set arguments = function['arguments'] %}"
    r"{{ '\n' if message['content'] or not loop.first }}"
    r"""{{ '<tool_call>{"name": ' + function['name'] | tojson + ', "arguments": ' }}"""
    r"{{ arguments if arguments is string else arguments | tojson }}"
    r"{{ '}</tool_call>' }}"
    r"{% endfor %}"
)
CHAT_TEMPLATE: Final = (
    _TOOLS + r"{% for message in messages %}"
    r"{% if tools and loop.first and message['role'] == 'system' %}"
    r"{% elif message['role'] == 'tool' %}" + _RESULT + r"{% else %}"
    r"{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}" + _CALLS + r"{{ '<|im_end|>\n' }}"
    r"{% endif %}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
