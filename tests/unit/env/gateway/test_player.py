"""A rollout that an agent plays: its sequences, its reward, and its failures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from tests.support.errors import raises
from tests.unit.env.gateway.conftest import SAMPLING, TEMPLATE, Running, ScriptedModel

from gristmill import Permit, TrajectoryGroup, VersionSpan
from gristmill_env import session
from gristmill_env.agents.player import AgentPlayer
from gristmill_env.agents.runners import AgentRunner
from gristmill_env.agents.task import AgentTask, Endpoint
from gristmill_env.commands import SftOptions
from gristmill_env.commands.export import Conversation, best
from gristmill_env.data import Item
from gristmill_env.environments.model import Reply, Say
from gristmill_env.errors import EnvError, EpisodeError, InferenceError, RolloutTimeoutError
from gristmill_env.evaluation.plan import evaluation_tasks
from gristmill_env.gateway import Session
from gristmill_env.gateway.dialects import RequestError
from gristmill_env.rewards import Score, Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.conversations import Conversations, GroupPrompts
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.groups import RolloutGroup, build_group
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.rollouts.turns import Ask
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved.group import Attempt, saved_group
from gristmill_env.saved.reader import from_trajectory
from gristmill_env.session import load_tasks
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.task import AgentSpec
from gristmill_env.tracking import in_words

pytestmark = pytest.mark.slow

ITEM = Item(row=3, index=3, prompt="2 + 2?", answer="4")
Agent = Callable[[AgentTask, Any, Endpoint], Awaitable[Any]]


class Written(AgentRunner):
    """Runs a function of the test with an openai client."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def result(self, task: AgentTask, endpoint: Endpoint) -> Any:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0)

        async def say(*messages: Any, **more: Any) -> str:
            answer = await client.chat.completions.create(model="tiny", messages=list(messages), **more)
            return answer.choices[0].message.content or ""

        return await self._agent(task, say, endpoint)


def player(
    running: Running, agent: Agent, *, counts: bool = True, timeout: float = 60, truncates: bool = False
) -> AgentPlayer:
    spec = AgentSpec(function="a.py:run", timeout=timeout)
    return AgentPlayer(spec, Written(agent), running.gateway, running.policy, "Be brief.", counts, truncates)


def ask(running: Running) -> Ask:
    return Ask(GroupPrompts(running.policy.prompts), SAMPLING, evaluation=False)


@pytest.fixture
async def asked(running: Running) -> AsyncIterator[Ask]:
    yield ask(running)
    assert len(running.gateway.sessions) == 1, "the session of each rollout is closed"


async def branching(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
    first = {"role": "assistant", "content": await say(*task.messages)}
    for text in ("Sure?", "Again?"):
        await say(*task.messages, first, {"role": "user", "content": text})
    await say({"role": "user", "content": "Summary."})
    return 0.5


async def test_branches_of_a_rollout_are_sequences_of_its_group(
    running: Running, model: ScriptedModel, asked: Ask
) -> None:
    model.says = ["4", "yes", "four", "done"]
    rollout = await player(running, branching).play(ITEM, asked)
    assert (rollout.reward, rollout.replies, rollout.text) == (0.5, 4, "done")
    assert [branch.text for branch in rollout.branches] == ["yes", "four", "done"]
    assert model.prompts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?")
    group = RolloutGroup(ITEM, SAMPLING, [rollout, rollout], [Score(0.5, {"episode": 0.5})] * 2, 1.0)
    spans = [[VersionSpan("1.0", span.start, span.end) for span in one.labels] for one in rollout.branches] * 2
    made = build_group(group, Permit(group_id="g00000003", row=3), "r", "e", spans, include_messages=True)
    assert made.rollout_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert made.rewards.tolist() == [0.5] * 6
    assert int(made.mask.sum()) == 2 * sum(len(text) + 1 for text in ("4", "yes", "four", "done")), "each reply once"
    assert np.isfinite(made.logprobs).all()
    assert made.messages is not None
    assert [len(messages) for messages in made.messages[:3]] == [5, 5, 2]


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("helps", [False, True])
async def test_tools_of_a_prompt_are_saved_and_exported(
    running: Running, model: ScriptedModel, asked: Ask, tmp_path: Path, helps: bool
) -> None:
    async def searching(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
        if helps:  # a sub-agent without tools
            await say({"role": "user", "content": "What is 2?"})
        await say(*task.messages, tools=[TOOL])
        return 1.0

    async def plain(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
        await say(*task.messages)
        return 0.5

    model.says = [*(["two"] if helps else []), "4", "four"]
    rollout = await player(running, searching).play(ITEM, asked)
    other = await player(running, plain).play(ITEM, asked)
    scores = [Score(1.0, {"episode": 1.0}), Score(0.5, {"episode": 0.5})]
    saved = saved_group(
        Attempt(3, ITEM, SAMPLING, [rollout, other], scores), run="r", model="tiny", settings=None, tokens=False
    )
    options = SftOptions(saved=tmp_path, out=tmp_path / "out", top_n=2)
    rows = [row for row in best(saved, options, Counter()) if isinstance(row, Conversation)]
    assert [json.loads(row.tools or "null") for row in rows] == [[TOOL], None]

    group = RolloutGroup(ITEM, SAMPLING, [rollout, rollout], scores, 1.0)
    spans = [[VersionSpan("1.0", span.start, span.end) for span in one.labels] for one in rollout.branches] * 2
    made = build_group(group, Permit(group_id="g00000003", row=3), "r", "e", spans, include_messages=True)
    archived = from_trajectory(
        TrajectoryGroup.decode(made.encode()), lambda ids, special: running.policy.prompts.decode(ids)
    )
    assert archived.tools == (None if helps else [TOOL]), "the sequences of a group have one list of tools, or none"


async def test_parts_of_an_agents_reward_are_scores_of_the_group(running: Running, asked: Ask) -> None:
    async def parted(task: AgentTask, say: Any, endpoint: Endpoint) -> Any:
        await say(*task.messages)
        return {"reward": 0.75, "parts": {"right": 0.5, "short": 0.25}}

    environments: Any = SimpleNamespace(factory=SimpleNamespace(name="agent", kind=None))
    async with Scorer([WeightedReward(create_reward("episode"), 2.0)], has_answer=True) as scorer:
        generator = RolloutGenerator(
            EnvConfig(group_size=2), running.policy, scorer, environments, player(running, parted)
        )
        group = await generator.generate_and_score(ITEM, "g1")
    assert [score.total for score in group.scores] == [1.5, 1.5]
    assert group.scores[0].parts == {"episode": 0.75, "episode/right": 0.5, "episode/short": 0.25}


async def test_agent_plays_an_evaluation_with_the_evaluations_own_prompts_and_sampling(
    running: Running, model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}')
    rows = {"dataset_path": str(tmp_path / "rows.jsonl"), "reward_functions": ["episode"]}
    settings = {
        "agent": "a.py:run",
        "dataset": {**rows, "system_prompt": "Be brief.", "stop": ["."]},
        "evaluations": [{"name": "held", "dataset": {**rows, "system_prompt": "Be exact.", "stop": ["!"]}}],
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    run = RunSettings.read(["--config", str(tmp_path / "run.yaml")], {}, "test")
    [task], [held] = load_tasks(run), evaluation_tasks(run)
    monkeypatch.setattr(session, "load_tokenizer", lambda name: model.tokenizer)
    served: Any = SimpleNamespace(name="tiny", root=None)
    known = session.Model(served, running.policy.servers, model.tokenizer, 1024, None)
    generator = replace(known.generator(task), agent=player(running, branching))
    opened = session.Session([session.Source(task, generator)], None, known)
    played = opened.evaluator(held).agent
    assert isinstance(played, AgentPlayer)
    assert (played.system_prompt, played.policy.stop) == ("Be exact.", ("!",))
    assert played.gateway is running.gateway


async def test_log_counts_branches_and_histories_that_match_nothing(
    running: Running, model: ScriptedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async def invents(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
        await branching(task, say, endpoint)
        await say(*task.messages, {"role": "assistant", "content": "It is 5."}, {"role": "user", "content": "Sure?"})
        return 0.5

    config = EnvConfig(group_size=1)
    environments: Any = SimpleNamespace(factory=SimpleNamespace(name="agent", kind=None))
    scorer = Scorer([WeightedReward(create_reward("episode"), 1.0)], has_answer=True)
    generator = RolloutGenerator(config, running.policy, scorer, environments, player(running, invents))
    with caplog.at_level(logging.INFO):
        await generator.generate(ITEM, "g1")
    (logged,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("completion")]
    assert {"turns=5", "branches=4", "conversations=3", "unknown=1"} <= set(logged.split())


async def test_error_of_an_agent_keeps_the_rollout_so_far(running: Running, asked: Ask) -> None:
    async def fails(task: AgentTask, say: Any, endpoint: Endpoint) -> None:
        await say(*task.messages)
        raise EpisodeError("agent_raised", "no idea")

    with raises(EpisodeError, "agent_raised") as failed:
        await player(running, fails).play(ITEM, asked)
    assert failed.value.unfinished is not None
    assert failed.value.unfinished.text == "4"


async def test_agent_that_asks_nothing_has_failed(running: Running, asked: Ask, tmp_path: Path) -> None:
    async def silent(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
        return 1.0

    played = player(running, silent)
    played.runner.elsewhere = True  # then the session is kept in a file
    for _ in range(2):
        with raises(EpisodeError, "agent_said_nothing"):
            await played.play(ITEM, replace(asked, kept=tmp_path / "kept"))
        assert not list((tmp_path / "kept").iterdir()), "the next attempt begins anew"


async def test_agent_that_takes_too_long_has_failed(running: Running, asked: Ask) -> None:
    async def waits(task: AgentTask, say: Any, endpoint: Endpoint) -> None:
        await asyncio.Event().wait()

    for truncates in (False, True):  # without a reply, nothing can be trained
        with raises(RolloutTimeoutError, "agent_timeout") as late:
            await player(running, waits, timeout=0.1, truncates=truncates).play(ITEM, asked)
        assert late.value.unfinished is None


async def test_replies_before_the_time_limit_are_kept_and_trained_if_that_is_set(running: Running, asked: Ask) -> None:
    async def late_after_a_reply(task: AgentTask, say: Any, endpoint: Endpoint) -> None:
        await say(*task.messages)
        raise TimeoutError  # as at the limit

    with raises(RolloutTimeoutError, "agent_timeout") as late:
        await player(running, late_after_a_reply).play(ITEM, asked)
    assert late.value.unfinished is not None
    assert (late.value.unfinished.text, late.value.unfinished.finish_reason) == ("4", "error")
    rollout = await player(running, late_after_a_reply, truncates=True).play(ITEM, asked)
    assert (rollout.text, rollout.finish_reason, rollout.reward, sum(rollout.mask)) == ("4", "length", None, 2)


@pytest.mark.parametrize("truncates", [False, True])
async def test_disk_that_did_not_take_the_rollout_is_named_after_the_time_limit(
    running: Running, asked: Ask, truncates: bool
) -> None:
    async def late_on_a_full_disk(task: AgentTask, say: Any, endpoint: Endpoint) -> None:
        await say(*task.messages)
        running.gateway.sessions.find(lambda: [endpoint.key]).failure = EnvError("session_not_written", "full")
        raise TimeoutError  # as at the limit

    with raises(EnvError, "session_not_written"):
        await player(running, late_on_a_full_disk, truncates=truncates).play(ITEM, asked)


async def test_reply_to_an_environment_has_reasoning_answer_and_calls_apart(
    running: Running, model: ScriptedModel
) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    model.says = [f"<think>two and two</think>4{call}"]
    policy = replace(running.policy, reasoning=True)
    talk = Conversations(policy, GroupPrompts(policy.prompts), SAMPLING, evaluation=False)
    reply = await talk.answer(Say(None, [{"role": "user", "content": "2 + 2?"}], [], parse=True, reward=None))
    assert isinstance(reply, Reply)
    assert (reply.reasoning, reply.answer, reply.text) == ("two and two", "4", f"<think>two and two</think>4{call}")
    assert [(one.name, one.arguments) for one in reply.tool_calls] == [("add", {"a": 2})]


async def test_reply_that_comes_after_the_end_of_play_is_refused(
    running: Running, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(running.policy, reasoning=True)
    talk = Conversations(policy, GroupPrompts(policy.prompts), SAMPLING, evaluation=False)
    ask = Say(None, [{"role": "user", "content": "2 + 2?"}], [], parse=True, reward=None)
    await talk.answer(ask)
    parse = policy.servers.parse

    async def ended(*given: Any) -> Any:
        parsed = await parse(*given)
        talk.end()
        return parsed

    monkeypatch.setattr(policy.servers, "parse", ended)
    with raises(EnvError, "rollout_ended"):
        await talk.answer(ask)
    assert len(talk.turns) == 1


async def test_thought_without_an_answer_has_an_empty_content(running: Running, model: ScriptedModel) -> None:
    model.says = ["<think>two and two</think>"]
    session = Session(replace(running.policy, reasoning=True), SAMPLING)
    running.gateway.sessions.add(session)
    client = openai.AsyncOpenAI(base_url=f"{running.gateway.url}/v1", api_key=session.key, max_retries=0)
    answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "2 + 2?"}])
    assert answer.choices[0].message.content == ""
    await session.close()


@pytest.mark.parametrize("reasoning", [False, True])
async def test_completion_of_an_agent_has_the_thought_that_the_template_opened(
    running: Running, model: ScriptedModel, asked: Ask, reasoning: bool
) -> None:
    marker = "<|im_start|>assistant\n{% endif %}"
    model.tokenizer.chat_template = TEMPLATE.replace(marker, marker.replace("{%", "<think>\n{%"))
    model.says = ["2 + 2\n</think>\n4", "<think>Again</think>5"]
    running.policy = replace(running.policy, prompts=PromptBuilder(model.tokenizer), reasoning=reasoning)

    async def asks_twice(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
        await say({"role": "user", "content": "Sure?"})
        await say(*task.messages)
        return 1.0

    rollout = await player(running, asks_twice).play(ITEM, asked)
    assert [branch.text for branch in rollout.branches] == [
        "<think>\n2 + 2\n</think>\n4", "<think>\n<think>Again</think>5"
    ]  # fmt: skip
    assert in_words(rollout.others[0]).count("<think>\n") == 1


@pytest.mark.parametrize("raises_error", [False, True])
async def test_failure_of_the_model_servers_is_not_the_agents(
    running: Running, model: ScriptedModel, asked: Ask, raises_error: bool
) -> None:
    async def gives_up(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
        await say(*task.messages)
        model.server.answers["/inference/v1/generate"] = lambda: (500, {"error": "no"})
        try:
            await say(*task.messages)
        except openai.APIError as error:
            if raises_error:
                raise EpisodeError("agent_raised", "no answer") from error
        return 0.0

    played = player(running, gives_up)
    played.runner.elsewhere = True  # then the end is written to a file
    with pytest.raises((InferenceError, EpisodeError)) as failed:
        await played.play(ITEM, replace(asked, kept=running.folder), number=1)
    assert failed.value.code != "agent_raised"
    assert not list(running.folder.glob("1-*")), "the next attempt begins anew"


async def test_number_that_no_reward_reads_is_warned_about_once(
    running: Running, asked: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    playing = player(running, branching, counts=False)
    for _ in range(2):
        await playing.play(ITEM, asked)
    assert [record.levelno for record in caplog.records if "episode" in record.getMessage()] == [logging.WARNING]


async def test_key_of_a_rollout_that_took_too_long_is_closed_and_of_a_stopping_service_is_not(
    running: Running, asked: Ask
) -> None:
    keys: list[str] = []

    async def late(task: AgentTask, say: Any, endpoint: Endpoint) -> None:
        keys.append(endpoint.key)
        await say(*task.messages)
        raise TimeoutError  # as at the limit

    async def stopped(task: AgentTask, say: Any, endpoint: Endpoint) -> None:
        keys.append(endpoint.key)
        await say(*task.messages)
        raise asyncio.CancelledError

    cases: list[tuple[Agent, type[BaseException]]] = [(late, RolloutTimeoutError), (stopped, asyncio.CancelledError)]
    for number, (agent, error) in enumerate(cases, 1):
        played = player(running, agent)
        played.runner.elsewhere = True  # then the session is kept in a file
        with pytest.raises(error):
            await played.play(ITEM, replace(asked, kept=running.folder), number=number)

    def refusal(key: str) -> tuple[int, str]:
        with pytest.raises(RequestError) as refused:
            running.gateway.sessions.find(lambda: [key])
        return refused.value.status, refused.value.code

    assert list(map(refusal, keys)) == [(410, "session_closed"), (503, "session_not_open")]


async def test_key_of_an_ended_rollout_is_refused_also_before_its_group_is_complete(
    running: Running, asked: Ask
) -> None:
    keys = []

    async def keeps(task: AgentTask, say: Any, endpoint: Endpoint) -> float:
        keys.append(endpoint)
        return float(await say(*task.messages) == "4")

    played = player(running, keeps)
    played.runner.elsewhere = True  # then the session is kept in a file
    assert (await played.play(ITEM, replace(asked, kept=running.folder), number=1)).reward == 1.0
    client = openai.OpenAI(base_url=keys[0].base_url, api_key=keys[0].key, max_retries=0)
    with pytest.raises(openai.APIStatusError) as refused:
        await asyncio.to_thread(client.models.list)
    assert (refused.value.status_code, refused.value.code) == (410, "session_closed")
