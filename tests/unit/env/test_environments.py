"""Environments by name, and the game that ships with Gristmill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.errors import raises

from gristmill.errors import PluginError
from gristmill_env.data import Item
from gristmill_env.environments import Environment, Reply, StepResult, create_environment
from gristmill_env.environments.base import DatasetEnvironment
from gristmill_env.errors import DatasetError, EpisodeError

ITEM = Item(row=0, index=0, prompt="What is 20 + 5?", answer="20 + 5\n#### 25")


async def step(environment: Environment, text: str) -> StepResult:
    turn = environment.step(Reply(text, "stop", 3))
    assert not isinstance(turn, StepResult), "the shipped ones are async"
    return await turn


async def start(**params: Any) -> Environment:
    environment = create_environment("guess", params)()
    opening = environment.reset(ITEM)
    assert not isinstance(opening, (list, tuple))
    assert list(await opening) == [{"role": "user", "content": "What is 20 + 5?"}]  # type: ignore[misc]
    return environment


async def test_guess_hints_lead_to_the_number_and_reduce_the_reward() -> None:
    game = await start(tries=4)
    for guess, hint in (
        ("<answer>20</answer>", "Higher."),
        ("the answer is 30.", "Lower."),
        ("hm", "That is no number."),
    ):
        turn = await step(game, guess)
        assert [message["content"] for message in turn.messages] == [hint]
        assert not turn.done
    assert await step(game, "\\boxed{25}") == StepResult.end(0.25)


async def test_guess_reward_is_one_for_a_right_first_guess_and_zero_for_none() -> None:
    assert await step(await start(), "25") == StepResult.end(1.0)
    game = await start(tries=1)
    assert await step(game, "24") == StepResult.end(0.0)


async def test_environments_of_one_factory_share_no_state() -> None:
    make = create_environment("guess", {"tries": 2})
    one, other = make(), make()
    for game in (one, other):
        await game.reset(ITEM)  # type: ignore[misc]
    await step(one, "1")
    assert (await step(other, "25")).reward == 1.0


async def test_guess_invalid_row_is_an_error_of_that_row() -> None:
    with raises(DatasetError, "answer_not_a_number", row=7):
        await create_environment("guess")().reset(Item(row=1, index=7, prompt="?", answer="Paris"))  # type: ignore[misc]


async def test_dataset_environment_ends_after_one_turn() -> None:
    environment = create_environment("dataset")()
    assert isinstance(environment, DatasetEnvironment)
    assert list(await environment.reset(ITEM)) == list(ITEM.messages)
    assert (await environment.step(Reply("x", "stop", 1))).done


def test_unknown_environment_names_and_options_list_the_known_ones() -> None:
    with raises(EpisodeError, "unknown_environment", name="gues") as raised:
        create_environment("gues")
    assert {"dataset", "guess"} <= set(raised.value.values["known"])
    assert "'guess'" in str(raised.value)
    with raises(EpisodeError, "unknown_parameter", name="guess", parameter="trys", known=["tries"]) as raised:
        create_environment("guess", {"trys": 2})
    assert "'tries'" in str(raised.value)
    with raises(EpisodeError, "parameter_invalid", name="guess", parameter="tries"):
        create_environment("guess", {"tries": 0})
    with raises(EpisodeError, "unknown_parameter", name="dataset", parameter="tries", known=[]):
        create_environment("dataset", {"tries": 2})


OWN = """
from gristmill_env.environments import Environment, StepResult

class Echo(Environment):
    def reset(self, item):
        return [{"role": "user", "content": item.prompt}]

    def step(self, reply):
        return StepResult.end(1.0)

number = 5
"""


def test_custom_environment_class_is_found_next_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    environment = create_environment("own.py:Echo", folder=tmp_path)()
    assert environment.step(Reply("x", "stop", 1)) == StepResult.end(1.0)
    assert create_environment("gristmill_env.environments.guess:Guess")() is not None
    with raises(PluginError, "plugin_attribute_missing", place="own.py", attribute="Ecko") as raised:
        create_environment("own.py:Ecko", folder=tmp_path)
    assert "'Echo'" in str(raised.value)
    with raises(PluginError, "plugin_file_missing") as raised:
        create_environment("other.py:Echo", folder=tmp_path)
    assert raised.value.values["candidates"][0] == tmp_path / "other.py"
    with raises(EpisodeError, "not_an_environment", name="own.py:number"):
        create_environment("own.py:number", folder=tmp_path)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with raises(PluginError, "plugin_import_failed", error="ModuleNotFoundError"):
        create_environment("broken.py:Echo", folder=tmp_path)
    with raises(PluginError, "plugin_module_missing", module="no_such_package"):
        create_environment("no_such_package:Echo")


def test_annotation_of_an_option_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "from gristmill_env.environments import Environment\n"
        "class Game(Environment):\n    def __init__(self, *, random: 'Random | None' = None): ...\n"
    )
    with raises(EpisodeError, "annotation_unreadable", name="game.py:Game"):
        create_environment("game.py:Game", {"random": 1}, folder=tmp_path)
