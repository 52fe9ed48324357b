"""The four ways by which a reward gets into a run, and the errors when it does not."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards import create_reward, registry, reward, reward_names
from gristmill_env.settings.dataset import RewardSpec

CODE = """
from helper_of_rewards import MARK

def ends_well(completion, *, mark: str = MARK):
    return float(completion.endswith(mark))

class Counts:
    def __init__(self, *, word: str):
        self.word = word
    def __call__(self, completion):
        return completion.count(self.word)

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with rewards.py; it is neither the working directory nor on the path."""
    made = tmp_path / "configs"
    (made / "mine").mkdir(parents=True)
    (made / "mine" / "rewards.py").write_text(CODE.replace("from helper_of_rewards import MARK", "MARK = '.'"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if name.startswith(("gristmill_plugin_", "rewards_of_a_test")):
            del sys.modules[name]


def test_reward_is_registered_by_the_decorator() -> None:
    @reward("ends_well")
    def ends_well(completion: str, *, mark: str = ".") -> float:
        return float(completion.endswith(mark))

    assert "ends_well" in reward_names()
    assert create_reward("ends_well").score(["Yes.", "Yes"]) == [1.0, 0.0]
    assert create_reward({"type": "ends_well", "params": {"mark": "s"}}).score(["Yes.", "Yes"]) == [0.0, 1.0]
    assert create_reward(RewardSpec(type="ends_well")).name == "ends_well"


def test_reward_is_registered_from_a_file_next_to_the_configuration(folder: Path) -> None:
    made = create_reward("mine/rewards.py:ends_well", {"mark": "!"}, folder=folder)
    assert made.name == "ends_well"
    assert made.score(["Yes!", "Yes."]) == [1.0, 0.0]
    counts = create_reward({"type": "mine/rewards.py:Counts", "name": "yes", "params": {"word": "Yes"}}, folder=folder)
    assert counts.name == "yes"
    assert counts.score(["Yes! Yes!"]) == [2.0]


def test_reward_is_registered_from_a_file_in_the_working_directory_or_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert create_reward(f"{folder}/mine/rewards.py:ends_well").score(["."]) == [1.0]
    monkeypatch.chdir(folder / "mine")
    assert create_reward("rewards.py:ends_well", folder=folder).score(["."]) == [1.0]


def test_the_configurations_folder_comes_before_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "elsewhere" / "mine").mkdir()
    (folder.parent / "elsewhere" / "mine" / "rewards.py").write_text("def ends_well(completion): return 9")
    assert create_reward("mine/rewards.py:ends_well", folder=folder).score(["."]) == [1.0]


def test_functions_of_one_file_share_its_module(folder: Path) -> None:
    (folder / "shared.py").write_text("seen = []\ndef a(completion): seen.append(1); return len(seen)\nb = a")
    assert create_reward("shared.py:a", folder=folder).score(["."]) == [1.0]
    assert create_reward("shared.py:b", folder=folder, name="b").score(["."]) == [2.0]


def test_reward_may_be_registered_by_its_own_file(folder: Path) -> None:
    (folder / "own.py").write_text(
        "from gristmill_env.rewards import reward\n@reward('own_name')\ndef function(completion): return 2.0"
    )
    assert create_reward("own.py:function", folder=folder).name == "own_name"
    assert create_reward("own_name").score(["."]) == [2.0]


def test_reward_is_registered_from_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "rewards_of_a_test.py").write_text("def half(completion): return 0.5")
    importlib.invalidate_caches()
    assert create_reward("rewards_of_a_test:half").score(["."]) == [0.5]


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str, code: str) -> None:
    """Adds the metadata of an installed package that offers a reward."""
    information = folder / "some_rewards-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: some-rewards\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[gristmill.rewards]\n{entry}\n")
    (folder / "rewards_of_a_test_package.py").write_text(code)
    if str(folder) not in sys.path:
        monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_reward_is_registered_by_an_entry_point(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def politeness(completion, *, word: str = 'please'): return float(word in completion)"
    installed(folder, monkeypatch, "polite = rewards_of_a_test_package:politeness", code)
    assert "polite" in reward_names()
    assert "rewards_of_a_test_package" not in sys.modules  # names are listed without importing anything
    made = create_reward("polite", {"word": "thanks"})
    assert made.name == "polite"
    assert made.score(["no", "thanks"]) == [0.0, 1.0]


def test_installed_packages_are_read_again_only_after_an_installation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    os.utime(folder, (1, 1))
    create_reward("format")
    with monkeypatch.context() as patch:
        patch.setattr(registry, "entry_points", None)
        create_reward("format")
    installed(folder, monkeypatch, "polite = rewards_of_a_test_package:politeness", "")
    assert "polite" in reward_names()


def test_entry_point_that_cannot_be_imported_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(folder, monkeypatch, "polite = rewards_of_a_test_package:politeness", "import no_such_package")
    with raises(RewardError, "plugin_import_failed", error="ModuleNotFoundError") as raised:
        create_reward("polite")
    assert "polite" in raised.value.values["what"]
    assert "'no_such_package'" in str(raised.value)


def test_reward_may_be_given_as_a_function_or_class() -> None:
    def short(completion: str, *, most: int = 3) -> float:
        return float(len(completion) <= most)

    class Within:
        def __init__(self, *, most: int = 3) -> None:
            self.most = most

        async def __call__(self, completion: str) -> float:
            return float(len(completion) <= self.most)

    for target in (short, Within):
        assert create_reward(target).name == target.__name__
        assert create_reward(target).score(["abc", "abcd"]) == [1.0, 0.0]
        assert create_reward(target, {"most": 4}, name="four").score(["abc", "abcd"]) == [1.0, 1.0]
    assert create_reward(Within(most=1), name="one").score(["a", "ab"]) == [1.0, 0.0]
    assert create_reward(lambda completion: 7, name="seven").score([""]) == [7.0]


def test_names_of_atropos_configurations_are_understood() -> None:
    assert create_reward("accuracy_reward").name == "accuracy"
    assert create_reward("format_reward").name == "format"
    with raises(RewardError, "unknown_reward", reward="acuracy_reward"):
        create_reward("acuracy_reward")


@pytest.mark.parametrize(
    ("reference", "code", "values", "told"),
    [
        ("mine/reward.py:ends_well", "plugin_file_missing", {}, "/configs/mine/reward.py, "),
        ("mine/rewards.py:ends_wel", "plugin_attribute_missing", {"attribute": "ends_wel"}, "'ends_well'"),
        ("mine/rewards.py:NUMBER", "reward_not_callable", {}, " 3"),
        ("mine/rewards.py:", "plugin_name", {"name": "mine/rewards.py:"}, ""),
        ("no_such_package.rewards:f", "plugin_module_missing", {"module": "no_such_package"}, "PYTHONPATH"),
        ("json:lods", "plugin_attribute_missing", {"place": "json", "attribute": "lods"}, "'loads'"),
    ],
)
def test_reward_reference_that_leads_nowhere_is_refused_with_the_reason(
    folder: Path, reference: str, code: str, values: dict[str, Any], told: str
) -> None:
    with raises(RewardError, code, reward=reference, **values) as raised:
        create_reward(reference, folder=folder)
    assert told in str(raised.value)


def test_user_code_that_fails_on_import_is_shown_with_its_traceback(folder: Path) -> None:
    path = folder / "broken.py"
    path.write_text("def divide(n):\n    return 1 / n\n\nSHARE = divide(0)\n\ndef f(completion): return 1.0\n")
    values = {"reward": "broken.py:f", "what": str(path)}
    with raises(RewardError, "plugin_import_failed", **values, error="ZeroDivisionError") as error:
        create_reward("broken.py:f", folder=folder)
    told = str(error.value)
    assert "line 4, in <module>\n    SHARE = divide(0)" in told
    assert "line 2, in divide" in told
    assert "importlib" not in told
    assert "plugins.py" not in told
    path.write_text("def divide(n:\n")
    with raises(RewardError, "plugin_import_failed", **values, error="SyntaxError"):
        create_reward("broken.py:f", folder=folder)
    path.write_text("import helper_of_rewards")
    with raises(RewardError, "plugin_import_failed", **values, error="ModuleNotFoundError") as error:
        create_reward("broken.py:f", folder=folder)
    assert "'helper_of_rewards'" in str(error.value)
    path.write_text("def f(completion): return 1.0")
    assert create_reward("broken.py:f", folder=folder).score([""]) == [1.0]  # fixed: nothing of the error remains


def test_two_rewards_cannot_have_one_name() -> None:
    with raises(RewardError, "reward_registered_twice", reward="length") as raised:
        reward("length")(lambda completion: 0.0)
    assert raised.value.values["places"][0].startswith("gristmill_env.rewards.builtin.")


def test_repeated_reward_definition_replaces_itself() -> None:
    def define(value: float) -> Callable[..., Any]:
        @reward("notebook_cell")
        def cell(completion: str) -> float:
            return value

        return cell

    define(1.0)
    define(2.0)
    assert create_reward("notebook_cell").score([""]) == [2.0]


def test_an_unknown_reward_lists_the_known_and_the_nearest() -> None:
    with raises(RewardError, "unknown_reward", reward="lenght") as raised:
        create_reward("lenght")
    assert {"accuracy", "format", "length"} <= set(raised.value.values["known"])
    assert "'length'" in str(raised.value)


def test_an_unknown_parameter_lists_the_known_and_the_nearest() -> None:
    values = {"reward": "length", "parameter": "target", "known": ["target_tokens", "min_reward", "max_reward"]}
    with raises(RewardError, "unknown_parameter", **values) as raised:
        create_reward("length", {"target": 10})
    assert "'target_tokens'" in str(raised.value)


@pytest.mark.parametrize(("value", "problem"), [(0, "greater_than"), (-1, "greater_than"), ("many", "int_parsing")])
def test_a_parameter_of_another_kind_is_refused(value: object, problem: str) -> None:
    with raises(RewardError, "parameter_invalid", reward="length", parameter="target_tokens", problem=problem):
        create_reward("length", {"target_tokens": value})


class Picky:
    def __init__(self, *, low: int, high: int = 5) -> None:
        if low > high:
            raise ValueError("low is above high")

    def __call__(self, completion: str) -> float:
        return 1.0


def test_a_parameter_without_a_default_must_be_set() -> None:
    with raises(RewardError, "parameter_missing", reward="Picky", parameter="low"):
        create_reward(Picky)
    with raises(RewardError, "reward_not_made", reward="Picky", error="ValueError"):
        create_reward(Picky, {"low": 9})


@pytest.mark.parametrize(
    ("specification", "code", "values"),
    [
        ({"tipe": "length"}, "unknown_key", {"problems": {"tipe": "unknown_key", "type": "missing"}}),
        ({}, "invalid_settings", {"problems": {"type": "missing"}}),
        ({"type": "length", "weight": float("nan")}, "invalid_settings", {"problems": {"weight": "finite_number"}}),
        (7, "not_a_reward", {}),
        (lambda completion: 1.0, "reward_unnamed", {}),
    ],
)
def test_invalid_reward_specification_is_refused(specification: Any, code: str, values: dict[str, Any]) -> None:
    with raises(RewardError, code, **values):
        create_reward(specification)
