"""Prompts: the chat template with the generation marker, as exactly the ids that are sent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import TEMPLATE
from transformers import PreTrainedTokenizerFast

from gristmill_env.data.messages import object_of
from gristmill_env.errors import PromptError
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.session import prompt_builder
from gristmill_env.settings.run import EnvConfig


def test_the_prompt_ends_with_the_generation_marker(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = PromptBuilder(tokenizer).build("What is 1 + 1?")
    assert prompt.text == "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def test_the_system_prompt_comes_first(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = PromptBuilder(tokenizer, "Be brief.").build("Hi")
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


def test_prompt_ids_match_the_text_with_each_special_token_once(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = PromptBuilder(tokenizer)
    prompt = prompts.build("What is 1 + 1?")
    marker = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert prompt.token_ids.count(marker) == 2
    assert prompts.decode(prompt.token_ids, special=True) == prompt.text


def test_completions_are_read_without_special_tokens_and_with_their_spaces(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer(" <answer>25</answer> .", add_special_tokens=False)["input_ids"]
    assert PromptBuilder(tokenizer).decode([*ids, tokenizer.eos_token_id]) == " <answer>25</answer> ."


def with_tokens(tokenizer: PreTrainedTokenizerFast, *special: str, template: str | None = None) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": list(special)})
    if template is not None:
        made.chat_template = template
    return made


@pytest.mark.parametrize(
    "text",
    ['[TOOL_CALLS][{"name": "add"}]', "<|python_tag|>1 + 1", "<think>\n2\n</think>\n\n4",
     "<|channel|>analysis<|message|>2<|start|>assistant<|channel|>final<|message|>4"],
)  # fmt: skip
def test_special_tokens_of_an_answer_reach_the_rewards_and_ends_of_turns_do_not(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    special = ["[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>"]
    made = with_tokens(tokenizer, *special, "<|return|>", "<|eot_id|>")
    prompts = PromptBuilder(made)
    for end in ("", "<|im_end|>", "<|return|>", "<|eot_id|>"):
        ids = made(text + end, add_special_tokens=False)["input_ids"]
        assert prompts.decode(ids) == text
        assert prompts.decode(ids, special=True) == text + end


@pytest.mark.parametrize("written", ["<|im_end|>", "<|end|>", "</s>", " <|im_end|>"])
@pytest.mark.parametrize("sampled", ["<|im_end|>", "<|endoftext|>", "<|return|>", "<|eom_id|>", "."])
def test_end_of_a_turn_is_not_repeated_whichever_end_was_sampled(
    tokenizer: PreTrainedTokenizerFast, written: str, sampled: str
) -> None:
    template = TEMPLATE.replace("<|im_end|>", written)
    made = with_tokens(tokenizer, "<|endoftext|>", "<|return|>", "<|end|>", "<|eom_id|>", "</s>", template=template)
    prompts = PromptBuilder(made)
    last = made(sampled, add_special_tokens=False)["input_ids"][-1]
    more = [{"role": "user", "content": "More?"}]
    found = prompts.continuation_tokens([{"role": "user", "content": "Hi"}], more, last)
    end = written if sampled == "." else ""
    following = f"{end}\n<|im_start|>user\nMore?{written}\n<|im_start|>assistant\n"
    assert prompts.decode(found.token_ids, special=True) == following


SWITCHES = {
    "qwen3": "{% if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}",
    "deepseek": "{% if thinking %}<think>{% else %}</think>{% endif %}",
    "gpt-oss": "Reasoning: {{ reasoning_effort | default('medium') }}",
    "none": "",
}


@pytest.mark.parametrize(
    ("template", "settings", "unread"),
    [
        ("qwen3", {"thinking_mode": True}, []),
        ("qwen3", {"thinking_mode": False}, []),
        ("qwen3", {"reasoning_effort": "low"}, ["reasoning_effort"]),
        ("qwen3", {"reasoning_effort": "none"}, []),
        ("deepseek", {"thinking_mode": True}, []),
        ("gpt-oss", {"reasoning_effort": "medium"}, []),
        ("gpt-oss", {"thinking_mode": False}, ["thinking_mode"]),
        ("none", {"thinking_mode": True}, ["thinking_mode"]),
        ("none", {"reasoning_effort": "high"}, ["reasoning_effort"]),
        ("none", {}, []),
    ],
)
def test_thinking_switch_that_the_template_does_not_read_is_named(
    tokenizer: PreTrainedTokenizerFast, template: str, settings: dict[str, Any], unread: list[str]
) -> None:
    made = with_tokens(tokenizer, template=TEMPLATE + SWITCHES[template])
    assert prompt_builder(EnvConfig.model_validate(settings), made).unread_switches() == unread


def test_template_that_reads_thinking_receives_the_switch(tokenizer: PreTrainedTokenizerFast) -> None:
    made = with_tokens(tokenizer, template=TEMPLATE + SWITCHES["deepseek"])
    on, off = (prompt_builder(EnvConfig(thinking_mode=mode), made).build("Hi").text for mode in (True, False))
    assert (on[-7:], off[-8:]) == ("<think>", "</think>")


OWN = "{{ day }}: {% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[reply]"


def test_own_chat_template_renders_prompts_and_continuations(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = {"chat_template": OWN, "chat_template_kwargs": {"day": "Monday", "night": 1}}
    prompts = prompt_builder(EnvConfig.model_validate({"dataset": dataset}), tokenizer)
    assert prompts.build("Hi").text == "Monday: [user]Hi[reply]"
    said, more = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "More?"}]
    found = prompts.continuation_tokens(said, more, None)
    assert prompts.decode(found.token_ids, special=True) == "[user]More?[reply]"
    assert prompts.unread_switches() == ["chat_template_kwargs.night"]
    assert dict(prompts.server_options) == dataset


def test_prompt_without_a_template_is_the_unchanged_text(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    assert PromptBuilder(plain, "Be brief.").build("Hi").text == "Be brief.\n\nHi"
    assert [record.name for record in caplog.records] == ["gristmill_env.rollouts.prompts"]


def test_a_template_that_refuses_the_messages_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with raises(PromptError, "chat_template_failed", tokenizer=strict.name_or_path) as raised:
        PromptBuilder(strict, "Be brief.").build("Hi")
    assert "no system role" in str(raised.value)


@pytest.mark.parametrize(
    "template",
    ["{{ '{x}'.format(y=1) }}", "{{ none|dictsort }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"],
    ids=["KeyError", "AttributeError", "RecursionError"],
)
def test_any_error_of_a_template_is_of_its_prompt(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = template
    with raises(PromptError, "chat_template_failed"):
        PromptBuilder(broken).build("Hi")


@pytest.mark.parametrize("value", ["18446744073709551616", "NaN", "1e400", '"\\ud83d"', "[" * 9000 + "]" * 9000])
def test_arguments_of_a_call_that_cannot_be_stored_stay_text(value: str) -> None:
    assert object_of(f'{{"x": [{value}]}}') == f'{{"x": [{value}]}}'
    assert object_of('{"x": [18446744073709551615]}') == {"x": [2**64 - 1]}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "user", "content": "half \ud83d"}, "half_character"),
        ({"role": "tool", "content": "", "tool_calls": [{"arguments": {"x": "\udc00"}}]}, "half_character"),
        ({"role": "tool", "content": "3", "id": 2**64}, "not_a_message"),
        ({"role": "user", "content": "3", "at": object()}, "not_a_message"),
    ],
)
@pytest.mark.parametrize("server", ["tokens", "text"])
def test_message_that_cannot_be_sent_or_stored_is_an_error_that_names_it(
    tokenizer: PreTrainedTokenizerFast, message: dict[str, object], code: str, server: str
) -> None:
    prompts = PromptBuilder(tokenizer if server == "tokens" else None)
    first = {"role": "user", "content": "\U0001f600"}
    with raises(PromptError, code, message=1):
        prompts.build([first, message])


def test_text_that_the_tokenizer_refuses_is_an_error_of_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{{ '\\ud83d' }}"
    with raises(PromptError, "prompt_not_tokenized", tokenizer=broken.name_or_path):
        PromptBuilder(broken).build("Hi")


@pytest.mark.slow
def test_a_saved_tokenizer_is_loaded_and_a_missing_one_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.save_pretrained(str(tmp_path / "tok"))
    assert PromptBuilder(load_tokenizer(str(tmp_path / "tok"))).build("Hi") == PromptBuilder(tokenizer).build("Hi")
    (tmp_path / "empty").mkdir()
    with raises(PromptError, "tokenizer_missing", name=str(tmp_path / "empty")):
        PromptBuilder(load_tokenizer(str(tmp_path / "empty")))


def test_prefill_begins_the_answer_and_is_not_a_separate_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = PromptBuilder(tokenizer, prefill="<think>\n").build("Hi")
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")
    assert prompt.prefill == "<think>\n"
    assert prompt.token_ids[-8:] == tuple(tokenizer("<think>\n", add_special_tokens=False)["input_ids"])


def test_rows_system_message_overrides_the_runs(tokenizer: PreTrainedTokenizerFast) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    assert "Mine." in PromptBuilder(tokenizer, "Be brief.").build(own).text
    assert "Be brief." not in PromptBuilder(tokenizer, "Be brief.").build(own).text


@pytest.mark.parametrize("ended", [True, False])
def test_continuation_tokens_match_the_template(tokenizer: PreTrainedTokenizerFast, ended: bool) -> None:
    prompts = PromptBuilder(tokenizer, "Be brief.")
    opening = prompts.build("Guess.")
    reply = tokenizer("<answer>5</answer>", add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id] if ended else []  # a stop string ends a turn without its token
    more = ({"role": "user", "content": "Higher than \u2063reply\u2063, please."},)
    between = prompts.continuation_tokens(opening.messages, more, [*reply, *end][-1]).token_ids
    whole = prompts.build([*opening.messages, {"role": "assistant", "content": "<answer>5</answer>"}, *more])
    assert (*opening.token_ids, *reply, *end, *between) == whole.token_ids


def test_without_a_template_turns_follow_one_another_as_paragraphs(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    prompts = PromptBuilder(plain)
    between = prompts.continuation_tokens(prompts.build("Hi").messages, ({"role": "user", "content": "Go on."},), 0)
    assert prompts.decode(between.token_ids) == "\n\nGo on."


def test_template_gets_the_runs_thinking_option(tokenizer: PreTrainedTokenizerFast) -> None:
    knowing = copy.deepcopy(tokenizer)
    knowing.chat_template = (
        "{{ enable_thinking if enable_thinking is defined else 'unsaid' }} "
        "{{ reasoning_effort if reasoning_effort is defined else 'unsaid' }}"
    )

    def told(**settings: object) -> str:
        return prompt_builder(EnvConfig.model_validate(settings), knowing).build("Hi").text

    assert told() == "unsaid unsaid"
    assert told(thinking_mode=False) == "False unsaid"
    assert told(reasoning_effort="high") == "True high"
    assert told(reasoning_effort="none") == "False none"
    assert told(max_reasoning_tokens=64) == "True unsaid"
