"""Functions and objects as tools: the calls that the model writes, their results, and their errors."""

from __future__ import annotations

import json
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.http_server import Answer, HttpServer, Request
from tests.unit.env.environments.conftest import ITEM, Roll, trained
from tests.unit.env.gateway.conftest import TEMPLATE, TIED, ScriptedModel

from gristmill.errors import PluginError
from gristmill_env import sandbox
from gristmill_env.data import Item
from gristmill_env.environments import EnvironmentRunner, Model, create_environment
from gristmill_env.environments.functions import ArgumentsError, checked_arguments, result_text, schema_of
from gristmill_env.errors import EnvError, EpisodeError, InferenceError
from gristmill_env.rollouts.groups import Rollout

pytestmark = pytest.mark.slow

TOOLS = '''
import threading
import httpx

BOTH = threading.Barrier(2)

def search(query: str, most: int = 3) -> str:
    """Searches.

    Args:
        query: What to search for.
        most: How many results.
    """
    return f"{query} x {most}"

async def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: The other number.
    """
    return a + b

def meet(name: str) -> str:
    """Waits until two calls run.

    Args:
        name: A name.
    """
    BOTH.wait(60)
    return name

def fails(name: str) -> str:
    """Fails.

    Args:
        name: A name.
    """
    raise ValueError(f"no {name}")

def is_away(name: str) -> str:
    """Is away.

    Args:
        name: A name.
    """
    raise ConnectionRefusedError("no index")

def untold(a, b):
    return 1

NUMBER = 3
'''
WORDS = '''
class WordGame:
    """Guess a word. In the shape of TRL's environments."""

    def __init__(self):
        self.word, self.guesses = None, 0

    def reset(self, **row):
        self.word = row["answer"]
        return f" It has {len(self.word)} letters."

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: Your guess.

        Returns:
            Whether it is right.
        """
        self.guesses += 1
        return "right" if word == self.word else "wrong"

    def _private(self):
        raise AssertionError

    def get_reward(self) -> float:
        return 1.0 / self.guesses if self.guesses else 0.0

class Sized(WordGame):
    def __init__(self, *, size: int):
        super().__init__()
        self.size = size

    def tell(self, times: int = 1) -> str:
        """Tell the size.

        Args:
            times: How often.
        """
        return str(self.size) * times

class Silent:
    def reset(self, **row):
        return None

    def look(self) -> str:
        """Look."""
        return "nothing"

class Wrong(Silent):
    def reset(self, **row):
        return 3
'''


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "words.py").write_text(WORDS)
    return tmp_path


def tools(folder: Path, *names: str, **params: Any) -> Any:
    return create_environment("tools", {"tools": [f"tools.py:{name}" for name in names], **params}, folder)


def results(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]


async def test_parallel_calls_run_at_the_same_time_and_return_in_order(
    roll: Roll,
    model: ScriptedModel,
    folder: Path,
) -> None:
    model.says = [f"Well. {call('meet', name='a')}{call('meet', name='b')}", call("add", a=2, b="2"), "4"]
    rollout = await roll(tools(folder, "meet", "add"), tools=True)
    assert (rollout.text, rollout.replies, rollout.reward, rollout.others) == ("4", 3, None, ())
    assert results(rollout) == ["a", "b", "4"]
    first = rollout.messages[2]
    assert (first["content"], [one["function"]["arguments"] for one in first["tool_calls"]]) == (
        "Well. ", [{"name": "a"}, {"name": "b"}]
    )  # fmt: skip
    ids = [one["id"] for one in first["tool_calls"]]
    assert [message.get("tool_call_id") for message in rollout.messages[3:5]] == ids
    assert '"name": "meet"' in model.prompts[0], "the prompt has the schemas"
    (sampled,) = trained(model, rollout)
    assert sampled.split("<|im_end|>") == [f"Well. {call('meet', name='a')}{call('meet', name='b')}",
                                           call("add", a=2, b="2"), "4", ""]  # fmt: skip


CALLS = {
    call("find", query="x"): "Error: there is no tool find; there are search, fails",
    call("search"): "Error: the argument query is missing",
    call("search", query="x", at=1): "Error: unknown argument at; known are query, most",
    call("search", query="x", most="many"): "Error: argument most: Input should be a valid integer",
    call("fails", name="board"): "Error: ValueError: no board",
    '<tool_call>{"name": "search", "arguments": [1]}</tool_call>': "Error: the arguments are not a JSON object",
    call("search", query="x", most=2): "x x 2",
}


async def test_what_is_wrong_with_a_call_is_its_result(roll: Roll, model: ScriptedModel, folder: Path) -> None:
    model.says = [*CALLS, "done"]
    rollout = await roll(tools(folder, "search", "fails", max_turns=9), tools=True, max_length=8192)
    found = results(rollout)
    assert [text[: len(result)] for text, result in zip(found, CALLS.values(), strict=True)] == list(CALLS.values())
    assert (rollout.text, rollout.replies) == ("done", 8)


async def test_service_of_a_tool_that_is_away_fails_the_rollout(
    roll: Roll,
    model: ScriptedModel,
    folder: Path,
) -> None:
    model.says = [call("is_away", name="x")] * 9
    with raises(EnvError, "service_unavailable"):  # after its repetitions
        await roll(tools(folder, "is_away"), tools=True, patience=0.1)
    assert set(model.prompts) == {model.prompts[0]}, "no reply to a failed call was asked for"


async def test_error_of_our_own_is_no_result(roll: Roll, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> Answer:
        return Answer(413 if b"long" in request.body else 404, {})

    with closing(HttpServer(answer)) as server:
        monkeypatch.setenv(sandbox.URL, server.url)
        environment = create_environment("tools", {"tools": ["gristmill_env.sandbox:python"]})
        model.says = [call("python", code="long"), call("python", code="1"), "done"]
        with raises(EpisodeError, "environment_raised", error="SandboxError"):
            await roll(environment, tools=True)
    assert len(model.prompts) == 2, "the model reads what is wrong with its program only"


async def test_calls_end_at_the_number_of_turns(roll: Roll, model: ScriptedModel, folder: Path) -> None:
    model.says = [call("search", query=str(number)) for number in range(9)]
    rollout = await roll(tools(folder, "search", max_turns=2), tools=True)
    assert (rollout.replies, rollout.finish_reason, results(rollout)) == (2, "turns", ["0 x 3"])


async def test_model_server_without_a_parser_is_named(roll: Roll, folder: Path) -> None:
    with raises(InferenceError, "no_tool_parser") as refused:
        await roll(tools(folder, "search"), tools=False)
    assert "MODEL_TOOL_PARSER" in str(refused.value)


async def test_class_of_trl_is_an_environment(roll: Roll, model: ScriptedModel, folder: Path) -> None:
    model.says = [call("guess", word="five"), call("guess", word="four"), "It is four."]
    rollout = await roll(create_environment("words.py:WordGame", folder=folder), tools=True, columns={"answer": "four"})
    assert (rollout.reward, results(rollout)) == (0.5, ["wrong", "right"])
    assert rollout.messages[1]["content"] == "2 + 2? It has 4 letters."
    assert "_private" not in model.prompts[0]
    assert '"name": "guess"' in model.prompts[0]


async def test_class_of_trl_has_options(roll: Roll, model: ScriptedModel, folder: Path) -> None:
    model.says = [call("tell", times=2), call("tell", self=1), "5"]
    made = create_environment("words.py:Sized", {"size": 5}, folder=folder)
    rollout = await roll(made, tools=True, columns={"answer": "four"})
    assert results(rollout) == ["55", "Error: unknown argument self; known are times"]
    with raises(EpisodeError, "unknown_parameter", parameter="wide", known=["size"]):
        create_environment("words.py:Sized", {"wide": 5}, folder=folder)


def test_objects_whose_methods_were_called_are_freed() -> None:
    class Tool:
        def look(self) -> str:
            return "nothing"

    tool = Tool()
    assert checked_arguments(tool.look, {}) == {}
    freed = weakref.ref(tool)
    del tool
    assert freed() is None


async def test_class_of_trl_without_reward_and_observation(
    roll: Roll,
    model: ScriptedModel,
    folder: Path,
) -> None:
    model.says = [call("look"), "Nothing."]
    rollout = await roll(create_environment("words.py:Silent", folder=folder), tools=True)
    assert (rollout.reward, results(rollout), rollout.messages[1]["content"]) == (None, ["nothing"], "2 + 2?")
    with raises(EpisodeError, "environment_value", method="Wrong.reset", row=3):
        await roll(create_environment("words.py:Wrong", folder=folder), tools=True)


@pytest.mark.parametrize("template", [TEMPLATE, *TIED])
async def test_play_gets_the_calls_of_its_own_tools(roll: Roll, model: ScriptedModel, template: str) -> None:
    model.tokenizer.chat_template = template
    written = f"Well. {call('double', number=2)}"
    model.says = [written, "4", "done"]

    def double(number: int) -> int:
        """Doubles.

        Args:
            number: A number.
        """
        return 2 * number

    async def play(item: Item, model: Model) -> float:
        reply = await model.say(item.messages, tools=[double])
        (one,) = reply.tool_calls
        assert (reply.text, reply.answer, one.name, one.arguments) == (written, "Well. ", "double", {"number": 2})
        result = {"role": "tool", "tool_call_id": one.id, "content": str(double(**(one.arguments or {})))}
        second = await model.say(result)
        assert (second.text, second.answer, second.tool_calls) == ("4", "4", ())
        await model.say("Stop.", tools=[])
        return 1.0

    rollout = await roll(play, tools=True)
    assert (rollout.reward, rollout.replies, rollout.text) == (1.0, 3, "done")
    sequences = [f"{written}<|im_end|>", "4<|im_end|>done<|im_end|>"]
    assert trained(model, rollout) == (["".join(sequences)] if template == TEMPLATE else sequences)
    assert rollout.counts == ({} if template == TEMPLATE else {"rendered": 1})
    assert "<|im_start|>tool\n4<|im_end|>" in model.prompts[1]


async def test_opening_has_the_tools(folder: Path) -> None:

    async with EnvironmentRunner(tools(folder, "add"), 60) as environments:
        opening = await environments.opening(ITEM)
    assert [tool["function"]["name"] for tool in opening.options["tools"]] == ["add"]


def test_what_cannot_be_a_tool_is_refused_at_the_start(folder: Path) -> None:
    for name, code in (("NUMBER", "not_a_tool"), ("untold", "tool_without_schema")):
        with raises(EpisodeError, code):
            tools(folder, name)
    with raises(PluginError, "plugin_attribute_missing"):
        tools(folder, "gone")
    with raises(EpisodeError, "parameter_invalid"):
        create_environment("tools", {"tools": []}, folder)


def test_results_are_text() -> None:
    assert [result_text(value) for value in ("a", 1, None, {"a": [1]}, {1})] == ["a", "1", "null", '{"a": [1]}', "{1}"]
    assert [result_text(value) for value in ("\ud83d", ["\ud83d"], {"\ud83d": 1})] == [
        "\ufffd",
        '["\ufffd"]',
        '{"\ufffd": 1}',
    ]


def test_arguments_are_converted_to_the_types_of_the_hints() -> None:
    def tool(count: int, names: list[str], ratio: float = 0.5) -> None:
        """Does nothing.

        Args:
            count: A count.
            names: Some names.
            ratio: A ratio.
        """

    assert checked_arguments(tool, {"count": "3", "names": ["a"]}) == {"count": 3, "names": ["a"]}
    with pytest.raises(ArgumentsError):
        checked_arguments(tool, {"count": 1, "names": "a"})
    schema = schema_of(tool)["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("tool", ["count", "names"])
