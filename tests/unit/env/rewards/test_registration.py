"""The four ways by which a reward gets into a run, and what is told when it does not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_env.errors import RewardError
from gristmill_env.rewards import create_reward, registry, reward, reward_names
from gristmill_env.settings import RewardSpec

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


def test_by_the_decorator() -> None:
    @reward("ends_well")
    def ends_well(completion: str, *, mark: str = ".") -> float:
        return float(completion.endswith(mark))

    assert "ends_well" in reward_names()
    assert create_reward("ends_well").score(["Yes.", "Yes"]) == [1.0, 0.0]
    assert create_reward({"type": "ends_well", "params": {"mark": "s"}}).score(["Yes.", "Yes"]) == [0.0, 1.0]
    assert create_reward(RewardSpec(type="ends_well")).name == "ends_well"


def test_by_a_file_beside_the_configuration(folder: Path) -> None:
    made = create_reward("mine/rewards.py:ends_well", {"mark": "!"}, folder=folder)
    assert made.name == "ends_well"
    assert made.score(["Yes!", "Yes."]) == [1.0, 0.0]
    counts = create_reward({"type": "mine/rewards.py:Counts", "name": "yes", "params": {"word": "Yes"}}, folder=folder)
    assert counts.name == "yes"
    assert counts.score(["Yes! Yes!"]) == [2.0]


def test_by_a_file_in_the_working_directory_or_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_that_registers_its_reward_itself(folder: Path) -> None:
    (folder / "own.py").write_text(
        "from gristmill_env.rewards import reward\n@reward('own_name')\ndef function(completion): return 2.0"
    )
    assert create_reward("own.py:function", folder=folder).name == "own_name"
    assert create_reward("own_name").score(["."]) == [2.0]


def test_by_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "rewards_of_a_test.py").write_text("def half(completion): return 0.5")
    importlib.invalidate_caches()
    assert create_reward("rewards_of_a_test:half").score(["."]) == [0.5]


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str, code: str) -> None:
    """Install a package, as far as Python can tell, that offers a reward."""
    information = folder / "some_rewards-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: some-rewards\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[gristmill.rewards]\n{entry}\n")
    (folder / "rewards_of_a_test_package.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_by_an_entry_point(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def politeness(completion, *, word: str = 'please'): return float(word in completion)"
    installed(folder, monkeypatch, "polite = rewards_of_a_test_package:politeness", code)
    assert "polite" in reward_names()
    assert "rewards_of_a_test_package" not in sys.modules  # names are listed without importing anything
    made = create_reward("polite", {"word": "thanks"})
    assert made.name == "polite"
    assert made.score(["no", "thanks"]) == [0.0, 1.0]


def test_an_entry_point_that_cannot_be_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(folder, monkeypatch, "polite = rewards_of_a_test_package:politeness", "import no_such_package")
    with pytest.raises(RewardError, match=r"entry point 'polite' .*cannot be imported.*No module named 'no_such_pack"):
        create_reward("polite")


def test_by_the_function_or_class_itself() -> None:
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
    with pytest.raises(RewardError, match=r"no reward 'acuracy_reward'"):
        create_reward("acuracy_reward")


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (
            "mine/reward.py:ends_well",
            r"mine/reward.py is not there; looked at .*/configs/mine/reward.py, .*/elsewhere/mine",
        ),
        ("mine/rewards.py:ends_wel", r"has no 'ends_wel'; it has Counts, ends_well.*Did you mean 'ends_well'\?"),
        ("mine/rewards.py:NUMBER", r"is 3; a function or a class is wanted"),
        ("mine/rewards.py:", r"names no code; write path/to/file.py:name or package.module:name"),
        ("no_such_package.rewards:f", r"there is no no_such_package. Install it, put its folder on PYTHONPATH"),
        ("json:lods", r"json has no 'lods'; it has .*dumps.*Did you mean 'loads'\?"),
    ],
)
def test_a_reference_to_nothing(folder: Path, reference: str, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        create_reward(reference, folder=folder)


def test_user_code_that_fails_on_import_is_shown_with_its_traceback(folder: Path) -> None:
    path = folder / "broken.py"
    path.write_text("def divide(n):\n    return 1 / n\n\nSHARE = divide(0)\n\ndef f(completion): return 1.0\n")
    with pytest.raises(RewardError) as error:
        create_reward("broken.py:f", folder=folder)
    told = str(error.value)
    assert told.startswith(f"reward 'broken.py:f': {path} cannot be imported: ZeroDivisionError: division by zero\n")
    assert "line 4, in <module>\n    SHARE = divide(0)" in told
    assert "line 2, in divide" in told
    assert "importlib" not in told
    assert "plugins.py" not in told
    path.write_text("def divide(n:\n")
    with pytest.raises(RewardError, match=r"cannot be imported: SyntaxError"):
        create_reward("broken.py:f", folder=folder)
    path.write_text("import helper_of_rewards")
    with pytest.raises(RewardError, match=r"cannot be imported: ModuleNotFoundError: No module named 'helper_of_rew"):
        create_reward("broken.py:f", folder=folder)
    path.write_text("def f(completion): return 1.0")
    assert create_reward("broken.py:f", folder=folder).score([""]) == [1.0]  # mended: nothing of it has stayed


def test_two_rewards_cannot_have_one_name() -> None:
    with pytest.raises(RewardError, match=r"'length' is registered twice.*rewards\.length"):
        reward("length")(lambda completion: 0.0)


def test_a_definition_that_is_run_again_replaces_itself() -> None:
    def define(value: float) -> Callable[..., Any]:
        @reward("notebook_cell")
        def cell(completion: str) -> float:
            return value

        return cell

    define(1.0)
    define(2.0)
    assert create_reward("notebook_cell").score([""]) == [2.0]


def test_an_unknown_reward_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"no reward 'lenght'.*accuracy, .*format, length.*Did you mean 'length'\?"):
        create_reward("lenght")


def test_an_unknown_parameter_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"'length' has no parameter 'target'.*target_tokens.*'target_tokens'\?"):
        create_reward("length", {"target": 10})


@pytest.mark.parametrize("value", [0, -1, "many"])
def test_a_parameter_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(RewardError, match="parameter 'target_tokens' of reward 'length'"):
        create_reward("length", {"target_tokens": value})


class Picky:
    def __init__(self, *, low: int, high: int = 5) -> None:
        if low > high:
            raise ValueError("low is above high")

    def __call__(self, completion: str) -> float:
        return 1.0


def test_a_parameter_without_a_default_must_be_set() -> None:
    with pytest.raises(RewardError, match=r"'Picky' needs the parameter 'low'; set it under params"):
        create_reward(Picky)
    with pytest.raises(RewardError, match=r"'Picky' cannot be made with these params: ValueError: low is above high"):
        create_reward(Picky, {"low": 9})


@pytest.mark.parametrize(
    ("specification", "told"),
    [
        ({"tipe": "length"}, r"unknown key 'tipe'"),
        ({}, r"'type' is missing"),
        ({"type": "length", "weight": float("nan")}, "weight"),
        (7, r"a reward is a name, a specification, a function or a class, not 7"),
        (lambda completion: 1.0, r"a lambda has no name"),
    ],
)
def test_a_specification_that_is_none(specification: Any, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        create_reward(specification)
