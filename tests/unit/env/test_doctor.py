"""The doctor's checks of a configuration: chat template, gold answers, rewards, and the sampling of a model server."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.grids import rest_is_long
from tests.unit.env.conftest import FailingServer
from tests.unit.env.gateway.conftest import TEMPLATE
from transformers import PreTrainedTokenizerFast

from gristmill.internal.check import Check
from gristmill_env.doctor import before_run, check_sampling
from gristmill_env.inference.http import ServerHttp

FORGETS = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that leaves out the replies of earlier turns."""
REWARDS = """
import random, time

def right(completion, answer):
    return float(answer.split()[-1] in completion)

def half(completion, answer):
    return 0.5 * float(answer.split()[-1] in completion)

def noise(completion):
    return random.random()

def waits(completion):
    time.sleep(60)
    return 1.0

def pauses(completion):
    time.sleep(1)
    return 1.0

def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: One number.
        b: The other number.
    '''
    return a + b

class Broken:
    def __init__(self):
        raise OSError("no model")
    def __call__(self, completion):
        return 1.0
"""
Diagnose = Callable[..., dict[str, Check]]


@pytest.fixture
def diagnose(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Diagnose:
    """Checks a configuration with some rewards, a template and other settings, and returns the checks by their name."""

    def found(*rewards: str, template: str | None = None, **settings: Any) -> dict[str, Check]:
        made = copy.deepcopy(tokenizer)
        if template is not None:
            made.chat_template = template
        made.save_pretrained(tmp_path / "tokenizer")
        (tmp_path / "rewards.py").write_text(REWARDS)
        rows = [{"question": f"{row} + 1?", "answer": str(row + 1)} for row in range(2)]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        values = {
            "group_size": 8,
            "tokenizer_name": str(tmp_path / "tokenizer"),
            "server_configs": [{"base_url": "http://127.0.0.1:1/v1"}],
            "dataset": {
                "dataset_path": str(tmp_path / "rows.jsonl"),
                "prompt_field": "question",
                "answer_field": "answer",
                "reward_functions": [
                    {"type": f"rewards.py:{name}"} if name != "accuracy" else {"type": name} for name in rewards
                ],
            },
            **settings,
        }
        (tmp_path / "run.yaml").write_text(json.dumps(values))
        environ = {"GRISTMILL_MODELS_DIR": str(tmp_path), "GRISTMILL_CONFIG_DIR": str(tmp_path)}
        return {check.name: check for check in before_run(str(tmp_path / "run.yaml"), environ)}

    return found


@pytest.mark.slow
def test_good_configuration_passes_without_a_model_server(diagnose: Diagnose) -> None:
    found = diagnose("accuracy", "right")
    server = "model server http://127.0.0.1:1"
    assert {name: check.state for name, check in found.items()} == {
        "settings": "ok", "chat template": "ok", "gold answers": "ok", "rewards": "ok", server: "warning",
    }  # fmt: skip


@pytest.mark.slow
def test_reward_that_cannot_be_made_in_its_process_fails(diagnose: Diagnose) -> None:
    found = diagnose("right", "Broken")["data and rewards"]
    assert (found.state, "no model" in found.text) == ("failed", True)


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "state"), [("dataset", "ok"), ("guess", "failed")])
def test_template_that_forgets_a_turn_fails_in_several_turns(diagnose: Diagnose, environment: str, state: str) -> None:
    found = diagnose("right", template=FORGETS, environment={"type": environment})["chat template"]
    assert found.state == state


@pytest.mark.slow
def test_template_that_writes_tools_keeps_every_turn(diagnose: Diagnose) -> None:
    tools = {"type": "tools", "params": {"tools": ["rewards.py:add"]}}
    found = diagnose("right", template=TEMPLATE, environment=tools)["chat template"]
    assert found.state == "ok", found.text


@pytest.mark.slow  # four processes
def test_gold_answer_below_1_fails(diagnose: Diagnose) -> None:
    assert diagnose("half")["gold answers"].state == "failed"
    assert diagnose("right")["gold answers"].state == "ok"


@pytest.mark.parametrize(
    ("reward", "settings", "state"),
    rest_is_long(
        ("noise", {}, "failed"),
        ("waits", {"reward_wall_timeout": 1.0}, "failed"),
        ("pauses", {"reward_wall_timeout": 10.0}, "warning"),
        first=2,
    ),
)
@pytest.mark.slow
def test_random_and_slow_rewards_are_found(
    diagnose: Diagnose, reward: str, settings: dict[str, Any], state: str
) -> None:
    assert diagnose("right", reward, **settings)["rewards"].state == state


def test_step_that_splits_a_group_fails(diagnose: Diagnose) -> None:
    trainer = {"batch_size": 12, "gradient_accumulation_steps": 1}
    assert diagnose("right", trainer=trainer)["settings"].state == "failed"


@pytest.mark.parametrize(
    ("tokens_at", "state"),
    [
        (lambda temperature: random.randrange(1000) if temperature > 1 else 7, "ok"),
        (lambda temperature: 7, "failed"),
        (lambda temperature: random.randrange(1000), "failed"),
    ],
    ids=["follows", "greedy", "ignores"],
)
async def test_server_that_ignores_the_temperature_fails(
    failing_server: FailingServer, tokens_at: Callable[[float], int], state: str
) -> None:
    def answer() -> tuple[int, Any]:
        sampling = failing_server.now.body["sampling_params"]
        tokens = [[tokens_at(sampling["temperature"])] * sampling["max_tokens"] for _ in range(sampling["n"])]
        return 200, {"choices": [{"token_ids": row} for row in tokens]}

    failing_server.answers["/inference/v1/generate"] = answer
    http = ServerHttp(failing_server.url, api_key=None, timeout=10.0)
    try:
        found = await check_sampling(http, "model server", "tiny", [1, 2, 3])
    finally:
        await http.close()
    assert (found.name, found.state) == ("model server", state)
