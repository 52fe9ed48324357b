"""Several turns against a real vLLM: the sent and the trained tokens, which form one conversation."""

from __future__ import annotations

import json

from tests.integration.env.conftest import Environments, HandTrainer

from gristmill import Manifest, PolicyVersion
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer

GAME = """
from gristmill_env.environments import Environment, StepResult

class Nag(Environment):
    \"\"\"Asks again, whatever is said.\"\"\"

    def reset(self, item):
        self.left = 2
        return [{"role": "user", "content": item.prompt}]

    def step(self, reply):
        self.left -= 1
        if self.left < 0:
            return StepResult.end(1.0)
        return StepResult(({"role": "user", "content": f"Once more. {self.left}"},))
"""


def test_each_reply_continues_the_very_tokens_before_it(environments: Environments, trainer: HandTrainer) -> None:
    (environments.folder / "nag.py").write_text(GAME)
    with (environments.folder / "sums.yaml").open("a") as config:
        config.write("environment: nag.py:Nag\ninclude_messages: true\n")
    environments.here(trainer.url, "--max_token_length", "512", "--max_tokens", "24")
    trainer.take()
    groups = trainer.train(until=1)
    prompts = PromptBuilder(load_tokenizer(Manifest.read(environments.vllm.models_dir).tokenizer_path))
    whole = 0
    for group in groups:
        assert group.messages is not None
        first = 0
        for length, messages, spans in zip(group.lengths, group.messages, group.versions, strict=True):
            tokens, mask = group.tokens[first : first + length], group.mask[first : first + length]
            logprobs = group.logprobs[first : first + length]
            first += length
            assert not logprobs[~mask].any()
            assert (logprobs[mask] < 0).all()
            # Every trained token has a version, and no other token has one.
            opening = len(prompts.build(messages[:1]).token_ids)
            under = {opening + position for span in spans for position in range(span.start, span.end)}
            assert under == set(mask.nonzero()[0].tolist())
            assert {PolicyVersion.parse(span.version).step for span in spans} == {0}
            assert not mask[:opening].any()
            assert mask[-1], "the last reply is trained on"
            replies = [message["content"] for message in messages if message["role"] == "assistant"]
            sampled = [prompts.decode(run) for run in _runs(tokens.tolist(), mask.tolist())]
            assert sampled == replies
            if len(messages) == 6:
                whole += 1
                asked = [message["content"] for message in messages if message["role"] == "user"][1:]
                assert asked == ["Once more. 1", "Once more. 0"]
                # The template over the whole conversation produces the same text, up to the end of the last reply.
                ending = prompts.decode(tokens.tolist(), special=True)
                assert prompts.build(messages).text.startswith(ending)
    assert whole > 0, "no attempt came to its third reply"
    assert json.dumps(groups[0].messages)


def _runs(tokens: list[int], mask: list[bool]) -> list[list[int]]:
    """Returns the stretches of trained tokens."""
    runs: list[list[int]] = []
    for position, (token, trained) in enumerate(zip(tokens, mask, strict=True)):
        if trained and (position == 0 or not mask[position - 1]):
            runs.append([])
        if trained:
            runs[-1].append(token)
    return runs
