"""Completions as text, from the examples of the API."""

from __future__ import annotations

import pytest

from gristmill import Example
from gristmill_view.samples import one_line, question, read_tokenizer, samples_of

EXAMPLE = Example(
    group_id="g1", env_id="env-1", sequences=2, lengths=[3, 3], cut=False, rewards=[1.0, 0.0],
    reward_parts={"accuracy": [1.0, None]}, finish_reasons=["stop", "length"], version="1.8",
    tokens=[[5, 6, 7], [5, 6, 8]], trained=[[False, False, True], [False, False, True]], messages=None,
)  # fmt: skip
CHAT = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is 97 + 3?<|im_end|>\n<|im_start|>assistant\n"


class Letters:
    """A tokenizer that writes each id as a word."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def test_samples_have_the_text_of_the_tokens() -> None:
    first, second = samples_of(EXAMPLE, Letters())
    assert (first.prompt, first.completion, first.reward, first.finish_reason) == ("5 6", "7", 1.0, "stop")
    assert (second.completion, second.parts) == ("8", {"accuracy": None})


def test_samples_without_a_tokenizer_are_messages_or_token_ids() -> None:
    assert samples_of(EXAMPLE, None)[0].completion == "5 6 7"
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (sample, _) = samples_of(EXAMPLE.model_copy(update={"messages": [turns, turns]}), None)
    assert (sample.prompt, sample.completion) == ("2 + 2?", "4")


def test_rollout_is_one_sample_whatever_its_number_of_branches() -> None:
    example = EXAMPLE.model_copy(
        update={
            "rollouts": [0, 0, 1],
            "rewards": [1.0, 1.0, 0.0],
            "reward_parts": {"accuracy": [1.0, 1.0, None]},
            "finish_reasons": ["length", "stop", "stop"],
            "tokens": [*EXAMPLE.tokens, [5, 9]],
            "trained": [*EXAMPLE.trained, [False, True]],
        }
    )
    shown = [
        (one.completion, one.reward, one.parts["accuracy"], one.finish_reason) for one in samples_of(example, Letters())
    ]
    assert shown == [("8", 1.0, 1.0, "stop"), ("9", 0.0, None, "stop")]


def test_reply_that_only_calls_tools_shows_its_calls() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    sample = samples_of(EXAMPLE.model_copy(update={"messages": [turns, turns]}), None)[0]
    assert sample.completion == "add(a=1, b=2)\nadd(a=1, b=2)"


def test_group_of_atropos_has_no_finish_reasons() -> None:
    sample = samples_of(EXAMPLE.model_copy(update={"finish_reasons": [], "version": None}), Letters())[0]
    assert (sample.finish_reason, sample.version) == (None, None)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (CHAT, "What is 97 + 3?"),
        ("<s>2 + 2 =</s>", "2 + 2 ="),
        ("plain", "plain"),
        (CHAT.replace("97", "1") + CHAT, "What is 97 + 3?"),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|><|start_header_id|>assistant",
            "2 + 2?",
        ),
        ("<bos><start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n", "2 + 2?"),
        ("<|start|>system<|message|>a<|end|><|start|>user<|message|>2 + 2?<|end|><|start|>assistant", "2 + 2?"),
        ("<｜begin▁of▁sentence｜><｜User｜>2 + 2?<｜Assistant｜><think>", "2 + 2?"),
        ("<|system|>\na</s>\n<|user|>\n2 + 2?</s>\n<|assistant|>\n", "2 + 2?"),
        ("<s>[INST] 1 + 1? [/INST] 2</s>[INST] 2 + 2? [/INST]", "2 + 2?"),
        ("<|im_start|>user\nnot ended", "user\nnot ended"),
    ],
)
def test_question_is_the_last_message_of_the_user(prompt: str, text: str) -> None:
    assert question(prompt) == text


def test_one_line_shows_control_characters() -> None:
    assert one_line("a\nb\x1b[2J\u202e") == "a ⏎ b\\x1b[2J\\u202e"
    assert one_line("x" * 50, 10) == "x" * 9 + "…"


def test_run_without_a_tokenizer_has_none() -> None:
    assert read_tokenizer(None) is None
