"""Chat templates that open `<think>` themselves: rewards see the whole thought, and only the sampled tokens are
trained."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer
from tests.unit.env.inference.conftest import GENERATE, answers, choice
from transformers import PreTrainedTokenizerFast

from gristmill_env.commands.replay import score_group
from gristmill_env.data import Item
from gristmill_env.environments import EnvironmentRunner, create_environment
from gristmill_env.errors import PromptError
from gristmill_env.gateway import Policy
from gristmill_env.inference import ModelServers
from gristmill_env.rewards import Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.rollouts.prompts import PromptBuilder, opened_thought
from gristmill_env.saved import SavedCompletion, SavedGroup
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.servers import ServerConfig
from gristmill_env.tracking import in_words

R1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1] %}<|Assistant|>{{ content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
QWQ = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen3's template: without thinking, it writes an empty thought."""
FORGETFUL = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
"""Leaves earlier replies out."""

ITEM = Item(row=0, index=0, prompt="What is 2 + 3? Answer after <think>.", answer="5")
REWARDS: list[str | dict[str, Any]] = [
    "accuracy", {"type": "format", "params": {"strict": True}},
    {"type": "tag_count", "params": {"preferred_tags": ["think"]}},
]  # fmt: skip


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    return made


@asynccontextmanager
async def rolling(
    tokenizer: PreTrainedTokenizerFast, server: FailingServer, *replies: tuple[str, str], **environment: Any
) -> AsyncIterator[Callable[[], Any]]:
    """Returns a generator whose model gives these (text, finish_reason) one after the other, under weights named
    "default"."""
    left = iter(replies)

    def answer() -> tuple[int, Any]:
        text, finish = next(left)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [tokenizer.eos_token_id] if finish == "stop" else []
        logprobs = {"content": [{"token_id": token, "logprob": -0.5} for token in ids]}
        return answers(choice(token_ids=ids, logprobs=logprobs, finish_reason=finish))

    server.answers[GENERATE] = answer
    config = EnvConfig(group_size=1)
    rewards = [WeightedReward(create_reward(spec), 1.0) for spec in REWARDS]
    environments = EnvironmentRunner(create_environment(environment.pop("name", "dataset"), environment), 60)
    async with (
        Scorer(rewards, has_answer=True) as scorer,
        ModelServers([ServerConfig(base_url=server.url)], patience=5) as servers,
    ):
        await servers.connect(patience=5)
        generator = RolloutGenerator(
            config, Policy("tiny", PromptBuilder(tokenizer), servers, 1024), scorer, environments
        )
        yield lambda: generator.generate_and_score(ITEM, "test")


def parts(group: RolloutGroup) -> tuple[float | None, ...]:
    return tuple(group.scores[0].parts.values())


@pytest.mark.parametrize("template", [R1, QWQ], ids=["R1", "QwQ"])
async def test_truncated_thought_is_not_taken_for_the_answer(
    tokenizer: PreTrainedTokenizerFast, failing_server: FailingServer, template: str
) -> None:
    tokenizer = with_template(tokenizer, template)
    async with rolling(tokenizer, failing_server, ("2 + 3, so \\boxed{5}. But wait", "length")) as roll:
        group = await roll()
    assert group.rollouts[0].text == "<think>\n2 + 3, so \\boxed{5}. But wait"
    assert parts(group) == (0.0, 0.0, 0.5)


@pytest.mark.parametrize("template", [R1, QWQ], ids=["R1", "QwQ"])
async def test_finished_thought_has_the_strict_format_and_all_tags(
    tokenizer: PreTrainedTokenizerFast, failing_server: FailingServer, template: str
) -> None:
    tokenizer = with_template(tokenizer, template)
    reply = "2 + 3 = 5.\n</think>\n\n\\boxed{5}"
    async with rolling(tokenizer, failing_server, (reply, "stop")) as roll:
        group = await roll()
    (rollout,) = group.rollouts
    assert parts(group) == (1.0, 1.0, 1.0)
    # The trained tokens are the sampled tokens, and the opened thought is in the prompt.
    sampled = tokenizer(reply, add_special_tokens=False)["input_ids"]
    assert rollout.token_ids == [*sampled, tokenizer.eos_token_id]
    assert rollout.prompt.text.endswith("<think>\n")
    assert tuple(failing_server.bodies[0]["token_ids"]) == rollout.prompt.token_ids
    assert in_words(rollout).count("<think>\n") == 1


async def test_template_opens_a_thought_in_later_turns(
    tokenizer: PreTrainedTokenizerFast, failing_server: FailingServer
) -> None:
    tokenizer = with_template(tokenizer, R1)
    replies = ("4?\n</think>\n\n\\boxed{4}", "stop"), ("Not 5", "length")
    async with rolling(tokenizer, failing_server, *replies, name="guess", tries=3) as roll:
        group = await roll()
    (rollout,) = group.rollouts
    assert rollout.text == "<think>\nNot 5"
    first = "<think>\n4?\n</think>\n\n\\boxed{4}"
    assert [message["content"] for message in rollout.messages[1:]] == [first, "Higher.", rollout.text]
    text = str(tokenizer.decode([*rollout.prompt.token_ids, *rollout.token_ids]))
    assert text.endswith("\\boxed{4}<|im_end|><|User|>Higher.<|Assistant|><think>\nNot 5")
    assert parts(group)[0] == 0.0


@pytest.mark.parametrize(
    ("template", "options", "begun"),
    [
        (R1, {}, "<think>\n"),
        (QWQ, {}, "<think>\n"),
        (QWQ, {"prefill": "Okay"}, "<think>\nOkay"),
        (HYBRID, {}, ""),
        (HYBRID, {"thinking": True}, ""),
        (HYBRID, {"thinking": False}, ""),
        (HYBRID, {"prefill": "<think>\n"}, "<think>\n"),
    ],
)
def test_only_an_open_thought_belongs_to_the_reply(
    tokenizer: PreTrainedTokenizerFast, template: str, options: dict[str, Any], begun: str
) -> None:
    prompt = PromptBuilder(with_template(tokenizer, template), **options).build(ITEM.messages)
    assert prompt.begun == begun
    assert prompt.text.endswith(begun)


def test_thought_in_the_middle_of_a_prompt_is_not_part_of_the_reply() -> None:
    assert opened_thought("Write <think>...</think>, then the answer.\nassistant:") == ""
    assert opened_thought("Begin with <think>\nassistant:") == ""


async def test_group_archived_as_tokens_is_scored_with_the_opened_thought() -> None:
    group = SavedGroup(
        run="r", prompt="", prompt_text="<|User|>2 + 3?<|Assistant|><think>\n", answer="5",
        completions=[SavedCompletion(text="\\boxed{5}. But wait"), SavedCompletion(text="5.\n</think>\n\\boxed{5}")],
    )  # fmt: skip
    rewards = [WeightedReward(create_reward("accuracy"), 1.0)]
    async with Scorer(rewards, has_answer=True) as scorer:
        assert [score.total for score in await score_group(scorer, group, None)] == [0.0, 1.0]


@pytest.mark.slow
async def test_conversation_of_a_group_archived_as_tokens_has_the_opened_thought(tmp_path: Path) -> None:
    code = """
def closed(completion, conversation):
    assert [message["content"] for message in conversation] == [completion]
    return float(completion == "<think>\\n5.\\n</think>\\n5")
"""
    (tmp_path / "code.py").write_text(code)
    group = SavedGroup(
        run="r", prompt="", prompt_text="<|User|>2 + 3?<|Assistant|><think>\n",
        completions=[SavedCompletion(text="5. But wait"), SavedCompletion(text="5.\n</think>\n5")],
    )  # fmt: skip
    rewards = [WeightedReward(create_reward(f"{tmp_path / 'code.py'}:closed"), 1.0)]
    async with Scorer(rewards, has_answer=True) as scorer:
        scores = await score_group(scorer, group, None)
    assert [(score.total, score.error) for score in scores] == [(0.0, None), (1.0, None)]


def test_template_that_leaves_a_reply_out_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = PromptBuilder(with_template(tokenizer, FORGETFUL))
    said = prompts.build(ITEM.messages).messages
    with raises(PromptError, "chat_template_drops_replies"):
        prompts.continuation_tokens(said, ({"role": "user", "content": "Higher."},), None)
