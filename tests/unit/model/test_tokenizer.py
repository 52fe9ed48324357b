"""tiny's tokenizer gives back every string, also after it was saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gristmill_model.tokenizer import IM_END_ID, VOCAB_SIZE, byte_tokenizer

TEXTS = [
    "What is 17 + 8?",
    "  two  spaces,\ta tab \r\n and a line ",
    "<answer>25</answer>",
    "#### 25 and ##### and user\n or What is What is",
    "é, 漢字, 🙂, don't ,.!",
    "",
]


@pytest.fixture(scope="module", params=["built", "loaded"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    built = byte_tokenizer(128)
    if request.param == "built":
        return built
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    built.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.mark.parametrize("text", TEXTS)
def test_decoded_text_equals_the_encoded_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_small_token_ids_are_utf_8_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("a é") == list("a é".encode())


def test_tokenizer_length_is_the_models_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCAB_SIZE


def test_answers_keep_their_tags_and_lose_the_end_marker(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = [*tokenizer.encode("<answer>25</answer>"), IM_END_ID]
    assert len(tokens) == 5
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "<answer>25</answer>"


def test_chat_template_ends_with_the_generation_marker(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 8?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 17 + 8?<|im_end|>\n<|im_start|>assistant\n"
    )
    without = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert text == f"{without}<|im_start|>assistant\n"


def test_end_of_turn_ends_a_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token_id == IM_END_ID == tokenizer.convert_tokens_to_ids("<|im_end|>")
