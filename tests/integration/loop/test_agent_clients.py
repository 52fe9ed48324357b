"""Agents of others, unchanged, at the gateway before a real vLLM: their sequences are the sampled tokens.

`tiny` writes no tool calls and no code without help. Tests of tools force its replies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.grids import rest_is_long
from tests.support.sampled_by import furthest_from_its_weights
from tests.support.stack import Vllm

from gristmill import Manifest, Permit, PolicyVersion, SamplingParams, TrajectoryGroup, VersionSpan
from gristmill_env.agents.player import agents
from gristmill_env.data import Item
from gristmill_env.gateway import Policy
from gristmill_env.inference import GenerationRequest, ModelServers
from gristmill_env.rewards import Score
from gristmill_env.rollouts.conversations import GroupPrompts
from gristmill_env.rollouts.groups import Rollout, RolloutGroup, build_group
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.rollouts.turns import Ask
from gristmill_env.settings.servers import ServerConfig
from gristmill_env.settings.task import AgentSpec
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.policy import Policy as Trained
from gristmill_trainer.publish.pool import ModelServers as Published
from gristmill_trainer.publish.publisher import FilesystemTransport, claim_publishing
from gristmill_trainer.publish.servers import ModelServer

OPENAI = """
from openai import OpenAI

client, messages = OpenAI(), [{"role": "user", "content": "What is 3 + 4?"}]
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
for _ in range(2):
    with client.chat.completions.stream(model="tiny", messages=messages, tools=[tool]) as stream:
        reply = stream.get_final_completion().choices[0].message
    messages += [reply, {"role": "user", "content": "Sure?"}]
# The same history again: another branch from the first reply on.
messages[2:] = [{"role": "user", "content": "Why?"}]
client.chat.completions.create(model="tiny", messages=messages, tools=[tool])
"""
RESPONSES = """
from openai import OpenAI

client, said = OpenAI(), [{"role": "user", "content": "What is 3 + 4?"}]
for _ in range(3):
    said += client.responses.create(model="tiny", input=said).output
    said.append({"role": "user", "content": "Sure?"})
"""
ANTHROPIC = """
from anthropic import Anthropic

client, messages = Anthropic(), [{"role": "user", "content": "What is 3 + 4?"}]
for _ in range(3):
    with client.messages.stream(model="tiny", max_tokens=24, system="Be brief.", messages=messages) as stream:
        reply = stream.get_final_message()
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Sure?"}]
"""
OPENAI_AGENTS = """
import json
from typing import Literal
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
checker = Agent(name="checker", model="tiny")

@function_tool
async def add(a: Literal["3"], b: Literal["4"]) -> str:
    "Adds two numbers."
    agent.model_settings = ModelSettings()  # the next replies are free
    await Runner.run(checker, f"Is {a} + {b} = 7?")
    return str(int(a) + int(b))

forced = ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_body={"logit_bias": BIAS})
agent = Agent(name="sums", instructions="Be brief.", model="tiny", tools=[add], model_settings=forced)
said = Runner.run_sync(agent, "What is 3 + 4?").to_input_list()
call, result = said[1:3]
assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": "3", "b": "4"}), said
assert (result["call_id"], result["output"]) == (call["call_id"], "7"), said
for text in ("Sure?", "Why?"):
    Runner.run_sync(agent, [*said, {"role": "user", "content": text}])
"""
FORCED = """
import json
from openai import OpenAI

client, said = OpenAI(), [{"role": "user", "content": "What is 3 + 4?"}]
schema = {"type": "object", "properties": {"x": {"enum": ["3", "4"]}}, "required": ["x"], "additionalProperties": False}
tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
named = {"type": "function", "function": {"name": "add"}}
for choice in ("required", named):
    reply = client.chat.completions.create(
        model="tiny", messages=said, tools=tools, tool_choice=choice, parallel_tool_calls=False, logit_bias=BIAS
    ).choices[0]
    (call,) = reply.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["x"] in "34", reply
form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
reply = client.chat.completions.create(model="tiny", messages=said, response_format=form, logit_bias=BIAS).choices[0]
assert json.loads(reply.message.content)["x"] in "34", reply
client.chat.completions.create(model="tiny", messages=[*said, reply.message, {"role": "user", "content": "Sure?"}])
"""
PARALLEL = """
import json
from openai import OpenAI

client, said = OpenAI(), [{"role": "user", "content": "What is 3 + 4, and 5 + 6?"}]
schema = {"type": "object", "properties": {"a": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
calls = "".join('<tool_call>{"name": "add", "arguments": {"a": "%s"}}</tool_call>' % a for a in "35")
forced = {"structured_outputs": {"regex": calls.replace("{", "[{]").replace("}", "[}]")}}
with client.chat.completions.stream(model="tiny", messages=said, tools=tools, extra_body=forced) as stream:
    reply = stream.get_final_completion().choices[0]
assert reply.finish_reason == "tool_calls", reply
assert [json.loads(call.function.arguments) for call in reply.message.tool_calls] == [{"a": "3"}, {"a": "5"}], reply
said.append(reply.message)
for call, result in zip(reply.message.tool_calls, ("7", "11")):
    said.append({"role": "tool", "tool_call_id": call.id, "content": result})
with client.chat.completions.stream(model="tiny", messages=said, tools=tools) as stream:
    stream.get_final_completion()
"""
SMOLAGENTS = """
from smolagents import CodeAgent, OpenAIModel
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

texts = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Solve the task with Python code."}
texts["final_answer"] = {"pre_messages": "Steps:", "post_messages": "Answer {{ task }}"}
model = OpenAIModel("tiny")
CodeAgent([], model, prompt_templates=texts, max_steps=2, code_block_tags=("<c>", "</c>")).run("3 + 4?")
"""


@pytest.fixture
def weights(vllm: Vllm) -> Path:
    """Publishes the model's own weights, because other tests publish others."""
    manifest = Manifest.read(vllm.models_dir)
    source = ModelSource(manifest.weights_path, manifest.tokenizer_path, None, 512)
    server = ModelServer(vllm.url, claim_publishing(vllm.weights_dir), patience=30)
    transport = FilesystemTransport(Published([server]), vllm.weights_dir / "agents", Path(manifest.serve_path))
    transport.publish(Trained(source, "cpu").served_tensors(), PolicyVersion(1, 0))
    return Path(manifest.weights_path)


@pytest.mark.parametrize(
    ("program", "turns", "branches"),
    rest_is_long(
        pytest.param(OPENAI, 3, 2, id="openai"),
        pytest.param(RESPONSES, 3, 1, id="responses"),
        pytest.param(ANTHROPIC, 3, 1, id="anthropic"),
        # It adds "</c>" to the replies in its history, so that no request continues a reply: each is a branch.
        pytest.param(SMOLAGENTS, 3, 3, id="smolagents"),
    ),
)
async def test_sequences_of_a_client_are_what_the_model_sampled(
    vllm: Vllm, weights: Path, tmp_path: Path, program: str, turns: int, branches: int
) -> None:
    rollout, group = await played(vllm, tmp_path, program)
    log = (tmp_path / "agent.log").read_text()
    assert (rollout.replies, len(rollout.branches)) == (turns, branches), log
    trained = int(group.mask.sum())
    assert trained == sum(branch.sampled or 0 for branch in rollout.branches), "each sampled token once"
    # A token that was tokenized again, or a wrong place of the mask, would show here.
    assert max(furthest_from_its_weights([group], lambda _: weights).values()) <= 1e-3


async def test_forced_replies_have_their_form_and_are_context(vllm: Vllm, weights: Path, tmp_path: Path) -> None:
    """vLLM's structured outputs."""
    rollout, group = await played(vllm, tmp_path, FORCED, tokens=200, off_policy=True)
    log = (tmp_path / "agent.log").read_text()
    assert rollout.replies == 4, log
    (branch,) = rollout.branches  # those without a trained reply are left out
    assert branch.sampled is not None
    assert 0 < sum(branch.mask) < branch.sampled, "the last reply alone is trained"
    assert int(group.mask.sum()) == sum(branch.mask)
    assert max(furthest_from_its_weights([group], lambda _: weights).values()) <= 1e-3


@pytest.mark.long
async def test_parallel_calls_in_a_stream_are_parsed_from_the_sampled_tokens(
    vllm: Vllm, weights: Path, tmp_path: Path
) -> None:
    """The first reply is forced to be two calls. vLLM's own parser reads them."""
    rollout, group = await played(vllm, tmp_path, PARALLEL, tokens=200, off_policy=True)
    assert (rollout.replies, rollout.counts) == (2, {"untrained": 1}), (tmp_path / "agent.log").read_text()
    (branch,) = rollout.branches
    assert [message["role"] for message in branch.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    text = PromptBuilder(load_tokenizer(Manifest.read(vllm.models_dir).tokenizer_path)).decode(
        branch.token_ids, special=True
    )
    assert text.count("<tool_call>") == 2, "the calls are there as they were sampled, and once"
    assert text.index("</tool_call>") < text.index("7") < text.index("11")
    assert int(group.mask.sum()) == sum(branch.mask) > 0
    assert max(furthest_from_its_weights([group], lambda _: weights).values()) <= 1e-3


@pytest.mark.long
async def test_tools_and_sub_agent_of_openai_agents_are_branches_of_the_sampled_tokens(
    vllm: Vllm, weights: Path, tmp_path: Path
) -> None:
    """The first reply is forced to call a tool, which asks a sub-agent. The later replies are free."""
    rollout, group = await played(vllm, tmp_path, OPENAI_AGENTS, tokens=200, off_policy=True)
    log = (tmp_path / "agent.log").read_text()
    assert (rollout.replies, rollout.counts) == (5, {"conversations": 2, "untrained": 1}), log
    checker, sure, why = rollout.branches
    for branch, text in ((sure, "Sure?"), (why, "Why?")):
        system, question, call, result, _, again, _ = branch.messages
        assert (system["content"], question["content"], again["content"]) == ("Be brief.", "What is 3 + 4?", text)
        assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": "3", "b": "4"}}
        assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "7", call["tool_calls"][0]["id"])
    assert checker.messages[0]["content"] == "Is 3 + 4 = 7?"
    prompts = PromptBuilder(load_tokenizer(Manifest.read(vllm.models_dir).tokenizer_path))
    forced, _, given = prompts.decode(sure.token_ids[: sure.mask.index(True)]).partition("]")
    assert json.loads(forced + "]") == [{"name": "add", "parameters": {"a": "3", "b": "4"}}], "as it was sampled"
    assert "7" in given
    shared = next(n for n, (one, other) in enumerate(zip(sure.token_ids, why.token_ids, strict=False)) if one != other)
    assert sum(sure.mask[:shared]) > 0
    assert not any(why.mask[:shared]), "the shared answer is trained in one branch"
    assert sure.sampled is not None
    assert 0 < sum(sure.mask) < sure.sampled
    assert (sum(checker.mask), sum(why.mask)) == (checker.sampled, why.sampled)
    assert int(group.mask.sum()) == sum(sum(branch.mask) for branch in rollout.branches)
    assert max(furthest_from_its_weights([group], lambda _: weights).values()) <= 1e-3


@pytest.mark.parametrize("more", [{"top_k": 1}, {"min_p": 1.0}])
async def test_further_sampling_parameters_act_on_tokens(vllm: Vllm, weights: Path, more: dict[str, float]) -> None:
    prompts = PromptBuilder(load_tokenizer(Manifest.read(vllm.models_dir).tokenizer_path))
    ids = prompts.build([{"role": "user", "content": "What is 3 + 4?"}]).token_ids
    sampling = SamplingParams(temperature=1.0, max_tokens=24)
    async with ModelServers([ServerConfig(base_url=vllm.url)], patience=30) as servers:
        await servers.connect(patience=30)
        free, most_likely = [
            await servers.generate(GenerationRequest(token_ids=ids, sampling=sampling, count=8, more=chosen))
            for chosen in ({}, more)
        ]
    assert len({tuple(completion.token_ids) for completion in free}) > 1
    assert len({tuple(completion.token_ids) for completion in most_likely}) == 1


async def played(
    vllm: Vllm, folder: Path, program: str, *, tokens: int = 24, off_policy: bool = False
) -> tuple[Rollout, TrajectoryGroup]:
    """Runs a program as the agent of one rollout. Returns the rollout, and a group of it alone."""
    tokenizer = load_tokenizer(Manifest.read(vllm.models_dir).tokenizer_path)
    # JSON may have any number of spaces, and `tiny` would write no end of them.
    spaces = {n: -100 for n in range(len(tokenizer)) if str(tokenizer.decode([n])).isspace()}
    (folder / "agent.py").write_text(program.replace("BIAS", repr(spaces)))
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens)
    item = Item(row=0, index=0, prompt="What is 3 + 4?", answer="7")
    async with ModelServers([ServerConfig(base_url=vllm.url)], patience=30) as servers:
        await servers.connect(patience=30)
        prompts = PromptBuilder(load_tokenizer(Manifest.read(vllm.models_dir).tokenizer_path))
        policy = Policy("tiny", prompts, servers, 2048, tools=True, untrained=off_policy)
        spec = AgentSpec(command=[sys.executable, "agent.py"])
        async with agents(spec, policy, folder, folder / "agent.log", {}) as player:
            rollout = await player.play(item, Ask(GroupPrompts(prompts), sampling, evaluation=False))
    versions = [[VersionSpan("1.0", 0, len(branch.token_ids))] for branch in rollout.branches]
    score = Score(1.0, {"episode": 1.0})
    scored = RolloutGroup(item, sampling, [rollout], [score], 1.0)
    return rollout, build_group(scored, Permit(group_id="g00000000", row=0), "agents", "env-1", versions)
