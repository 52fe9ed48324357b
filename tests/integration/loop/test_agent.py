"""An agent in a separate process is trained through the gateway, with the openai client and a real vLLM."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import yaml
from tests.support.launcher import launch
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import TrajectoryGroup, read_rollouts
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack

BRANCHING = """
from openai import AsyncOpenAI


async def run(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)

    async def say(messages):
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
        return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

    first = await say(task.messages)
    await say([*first, {"role": "user", "content": "Again?"}])
    last = await say([*first, {"role": "user", "content": "Sure?"}])
    last = await say([{"role": "user", "content": "Summary. " + task.prompt}])
    right = task.answer.rpartition("####")[2].strip()
    return float(f"<answer>{right}</answer>" in last[-1]["content"])
"""


def test_branches_of_an_agents_rollouts_are_trained_as_they_were_sampled(vllm: Vllm, tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "configs" / "agent.yaml").read_text())
    dataset = settings["dataset"]
    dataset["dataset_path"] = str(ROOT / "configs" / dataset["dataset_path"])
    settings |= {"agent": "branching.py:run", "steps_per_eval": 0, "group_size": 4}
    settings["trainer"] |= {"training_steps": 3, "batch_size": 16}
    (tmp_path / "branching.py").write_text(BRANCHING)
    (tmp_path / "branching.yaml").write_text(yaml.safe_dump(settings))
    process, _ = launch(tmp_path, vllm, "--config", str(tmp_path / "branching.yaml"))
    output, _ = process.communicate(timeout=420)
    assert process.returncode == 0, output
    rows = read_jsonl(tmp_path / "runs/branching/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    # A token that was tokenized again, or a wrong mask, would show here.
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
    groups = list(read_rollouts(tmp_path / "runs/branching"))
    assert len(groups) == 3 * 8
    for group in groups:
        assert group.rollout_of.tolist() == [rollout for rollout in range(4) for _ in range(3)]
        again, sure, summary = (_trained(group, branch) for branch in range(3))
        assert (again, sure, summary) == (2, 1, 1), "the shared first reply is trained in one branch"
        assert np.unique(group.rewards[:3]).size == 1


@pytest.mark.long
def test_tiny_learns_through_the_gateway(vllm: Vllm, tmp_path: Path) -> None:
    process, _ = launch(tmp_path, vllm, "--config", "agent")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    rewards = [row["reward_mean"] for row in read_jsonl(tmp_path / "runs/agent/metrics.jsonl")]
    assert rewards[0] <= 0.4, rewards
    assert fmean(rewards[-5:]) >= 0.8, rewards


def _trained(group: TrajectoryGroup, sequence: int) -> int:
    """Returns the number of trained stretches of a sequence."""
    start = int(group.lengths[:sequence].sum())
    mask = group.mask[start : start + int(group.lengths[sequence])].astype(int)
    return int((np.diff(mask, prepend=0) == 1).sum())


PROGRAM = """
import sys, threading, time
from pathlib import Path

import httpx
from openai import OpenAI

url, turns, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).open("a", buffering=1)


def asked(path, **body):
    while True:
        try:
            return httpx.post(url + path, json=body, timeout=60)
        except httpx.TransportError:
            time.sleep(0.2)  # the environment is away


def work():
    while True:
        given = asked("/agent/task")
        if given.status_code != 200:
            continue
        task, endpoint = given.json()["task"], given.json()["endpoint"]
        log.write(f"begin {endpoint['key']}\\n")
        client = OpenAI(base_url=endpoint["base_url"], api_key=endpoint["key"], max_retries=60)
        messages = list(task["messages"])
        for turn in range(turns):
            answer = client.chat.completions.create(model="tiny", messages=messages)
            log.write(f"turn {endpoint['key']}\\n")
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "Again?"}]
        right = task["answer"].rpartition("####")[2].strip()
        while True:
            reported = asked(f"/s/{endpoint['key']}/reward", reward=float(right in messages[-2]["content"]))
            if reported.status_code == 200:
                break
            assert reported.status_code == 503, reported.text  # the rollout continues in a moment
            time.sleep(0.2)
        log.write(f"end {endpoint['key']}\\n")


for _ in range(16):
    threading.Thread(target=work, daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.long
def test_killed_environment_goes_on_with_the_rollouts_of_a_program_elsewhere(vllm: Vllm, tmp_path: Path) -> None:
    turns, address, log = 20, f"127.0.0.1:{free_port()}", tmp_path / "program.log"
    settings = yaml.safe_load((ROOT / "configs" / "agent.yaml").read_text())
    dataset = settings["dataset"]
    dataset["dataset_path"] = str(ROOT / "configs" / dataset["dataset_path"])
    settings |= {"agent": {"external": True, "address": address}, "steps_per_eval": 0, "group_size": 4}
    settings["max_token_length"] = 1024
    settings["trainer"] |= {"training_steps": 3, "batch_size": 16, "gradient_accumulation_steps": 1}
    (tmp_path / "elsewhere.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "program.py").write_text(PROGRAM)

    def said(word: str) -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{word} ")]

    with LocalStack(Output().add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port, GRISTMILL_RUNS_DIR=str(tmp_path / "runs"))
        environ = vllm.environ(f"http://127.0.0.1:{api_port}", tmp_path / "runs", tmp_path)
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer"], environ)
        serve = [sys.executable, "-m", "gristmill_env", "serve", "--config", "elsewhere"]
        env = stack.start("env", serve, environ)
        program = [sys.executable, str(tmp_path / "program.py"), f"http://{address}", str(turns), str(log)]
        stack.start("program", program)
        for kills in (1, 2):
            # In the middle of rollouts: more have begun than have ended.
            wanted = 100 * kills
            stack.wait_until(trainer, lambda: len(said("turn")) >= wanted, timeout=240)  # noqa: B023
            env.process.kill()
            env.process.wait()
            assert set(said("begin")) > set(said("end"))
            env = stack.start("env", serve, environ)
        stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=300)
    groups = list(read_rollouts(tmp_path / "runs/elsewhere"))
    assert len(groups) == 3 * 4
    for group in groups:
        assert group.size == 4
        assert [_trained(group, sequence) for sequence in range(4)] == [turns] * 4
    # Each rollout was played once, from its first to its last turn, although the environment was killed twice.
    assert len(said("begin")) == len(set(said("begin")))
    played = Counter(said("turn"))
    assert {played[key] for key in said("end")} == {turns}
    rows = read_jsonl(tmp_path / "runs/elsewhere/metrics.jsonl")
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
