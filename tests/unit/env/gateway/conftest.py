"""A gateway over a model server that answers with prescribed texts.

The real server cannot be made to say what these tests need: `tiny` writes no tool calls.
tests/integration/loop/test_agent_clients.py has the real one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.unit.env.conftest import FailingServer
from transformers import PreTrainedTokenizerFast

from gristmill import SamplingParams
from gristmill_env.gateway import Gateway, Policy, Session, Sessions, serving
from gristmill_env.inference import ModelServers
from gristmill_env.inference.server import PARSE
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.settings.servers import ServerConfig

GENERATE = "/inference/v1/generate"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EACH = "{% for m in messages %}"
_WITHOUT_CALL = (
    "{% set seen = namespace(call=none) %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set seen.call = m.tool_calls[0] %}{% endif %}"
    "{% if m.role == 'tool' and not seen.call %}"
)
TIED = [
    TEMPLATE.replace(_EACH, _WITHOUT_CALL + "{% continue %}{% endif %}"),
    TEMPLATE.replace(_EACH, _WITHOUT_CALL + "{{ raise_exception('no call') }}{% endif %}"),
    TEMPLATE.replace(_EACH, _WITHOUT_CALL + "{{ m.tool_call_id }}{% endif %}"),
]
"""Templates that skip, refuse, or write otherwise a result without the call before it."""
THOUGHT = re.compile("<think>(.*?)</think>", re.DOTALL)
CALL = re.compile("<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass
class ScriptedModel:
    """Says the next text at each request for tokens."""

    tokenizer: PreTrainedTokenizerFast
    server: FailingServer
    says: list[str] = field(default_factory=list)
    """The texts of the next replies; "4" if the list is empty."""
    hold: Callable[[], None] | None = None
    """Called before each answer."""
    calls: int = 0

    def __post_init__(self) -> None:
        self.server.answers |= {GENERATE: self._generate, PARSE: self._parse}

    @property
    def prompts(self) -> list[str]:
        """The prompts that were asked for, as text."""
        asked = [body for body in self.server.bodies if "sampling_params" in body]
        return [str(self.tokenizer.decode(body["token_ids"])) for body in asked]

    def _generate(self) -> tuple[int, Any]:
        if self.hold is not None:
            self.hold()
        ids = [*self.tokenizer(self.says.pop(0) if self.says else "4")["input_ids"], self.tokenizer.eos_token_id]
        content = [{"token_id": token, "logprob": -0.25, "rank": 1} for token in ids]
        choice = {"finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
        return 200, {"choices": [choice | {"weight_versions": [{"version": "1.0", "start": 0, "end": len(ids)}]}]}

    def _parse(self) -> tuple[int, Any]:
        text = str(self.tokenizer.decode(self.server.now.body["generate_response"]["choices"][0]["token_ids"]))
        calls = []
        for written in CALL.findall(text):
            call = json.loads(written)
            self.calls += 1
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": f"call_{self.calls}", "type": "function", "function": function})
        said = THOUGHT.sub("", CALL.sub("", text))
        message = {"content": said or None, "tool_calls": calls, "reasoning": "".join(THOUGHT.findall(text)) or None}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast, failing_server: FailingServer) -> ScriptedModel:
    return ScriptedModel(tokenizer, failing_server)


@dataclass
class Running:
    """A gateway with one session."""

    gateway: Gateway
    policy: Policy
    session: Session
    folder: Path
    """Of the sessions of a group, in the folder of the run's sessions."""

    @property
    def url(self) -> str:
        return f"{self.gateway.url}/v1"

    def open(self, most_turns: int = 500, folder: Path | None = None) -> Session:
        """Opens another session."""
        session = Session(self.policy, SAMPLING, most_turns=most_turns, folder=folder)
        self.gateway.sessions.add(session)
        return session


SAMPLING = SamplingParams(temperature=1.0, max_tokens=64)


@pytest.fixture
async def running(model: ScriptedModel, tmp_path: Path) -> AsyncIterator[Running]:
    model.tokenizer.chat_template, before = TEMPLATE, model.tokenizer.chat_template
    servers = ModelServers([ServerConfig(base_url=model.server.url)], patience=0.5)
    try:
        async with servers:
            await servers.connect(patience=5)
            policy = Policy("tiny", PromptBuilder(model.tokenizer), servers, 1024)
            folder = tmp_path / "1a2b" / "g00000001"
            sessions = Sessions(folder=tmp_path)
            async with serving(sessions, "tiny", ("127.0.0.1", 0), {}) as gateway:
                session = Session(policy, SAMPLING, folder=folder)
                sessions.add(session)
                yield Running(gateway, policy, session, folder)
                await session.close()
    finally:
        model.tokenizer.chat_template = before


async def until(happened: Callable[[], bool]) -> None:
    """Waits until an event that has no signal."""
    async with asyncio.timeout(30):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
