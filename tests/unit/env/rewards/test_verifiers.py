"""Unchanged single-turn environments of verifiers: rows and the reward, compared with verifiers itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import verifiers as vf
from tests.support.errors import raises
from transformers import PreTrainedTokenizerFast
from verifiers.types import ClientConfig, Response, ResponseMessage, Usage

from gristmill import ConfigError
from gristmill.errors import PluginError
from gristmill.settings import parse
from gristmill_env.data import PromptDataset
from gristmill_env.errors import DatasetError, RewardError
from gristmill_env.rewards import Sample, Score, Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import Task
from gristmill_env.settings.dataset import DatasetConfig

pytestmark = pytest.mark.slow

SUMS = """
    import asyncio
    import verifiers as vf
    from datasets import Dataset

    def load_environment(rows=4, system_prompt="Add up.", bonus=0.5):
        def rows_of(first):
            return Dataset.from_list([
                {"question": f"{n} + {n}?", "answer": str(2 * n), "info": {"hint": n}, "level": n}
                for n in range(first, first + rows)
            ])

        parser = vf.XMLParser(["answer"])

        async def right(completion, answer, parser, state):
            await asyncio.sleep(0)
            state["stated"] = parser.parse_answer(completion)
            return 1.0 if state["stated"] == answer else 0.0

        def near(state, info, level, **kwargs):
            return 1.0 if state["stated"] and abs(int(state["stated"]) - info["hint"] - level) < 2 else 0.25

        def length(completion, prompt) -> float:
            return len(completion[-1]["content"]) + len(prompt) / 8

        rubric = vf.Rubric([right, near, parser.get_format_reward_func(), length], [1.0, bonus, 0.2, 0.0], parser)
        return vf.SingleTurnEnv(
            dataset=rows_of(1), eval_dataset=lambda: rows_of(100), system_prompt=system_prompt, parser=parser,
            rubric=rubric, few_shot=[{"role": "user", "content": "0 + 0?"}, {"role": "assistant", "content": "0"}],
        )
"""
COMPLETIONS = ["<answer>4</answer>", "<answer>5</answer>", "four", "<answer>9</answer> is wrong"]

Package = Callable[[str], str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Installs an environment with this code. Returns its id, a new one each time."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def install(code: str) -> str:
        names.append(f"{tmp_path.name.replace('-', '_')}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(textwrap.dedent(code))
        return names[-1].replace("_", "-")

    yield install
    for name in names:
        sys.modules.pop(name, None)


def simple(functions: str, listed: str, weights: str = "None", **changes: str) -> str:
    """Returns the code of an environment with one row and these reward functions."""
    kind, arguments = changes.get("kind", "vf.SingleTurnEnv"), changes.get("arguments", "")
    return (
        "import verifiers as vf\nfrom datasets import Dataset\n"
        f"{textwrap.dedent(functions)}\n"
        "def load_environment():\n"
        "    rows = Dataset.from_list([{'question': 'q', 'answer': 'a'}])\n"
        f"    return {kind}(dataset=rows, rubric=vf.Rubric([{listed}], {weights}), {arguments})\n"
    )


def config(**values: Any) -> DatasetConfig:
    return parse(DatasetConfig, {"shuffle_dataset": False, "reward_functions": ["verifiers"], **values}, "test")


def scorer(settings: DatasetConfig, columns: Sequence[str]) -> Scorer:
    """Makes a scorer that calls the rubric in this process, because another process takes long to start."""
    return Scorer(
        [WeightedReward(create_reward(spec).here(), spec.weight) for spec in settings.rewards()],
        has_answer=settings.gold_field is not None,
        columns=columns,
    )


async def scores(settings: DatasetConfig, completions: Sequence[str], row: int = 1) -> list[Score]:
    """Returns the scores of a row's completions, as a run scores them."""
    dataset = PromptDataset(settings, None)
    columns = dataset.item_at(row).columns
    async with scorer(settings, dataset.columns) as all_rewards:
        return await all_rewards.score([Sample(text, row=columns, tokens=(1, 2)) for text in completions])


async def their_scores(environment: Any, row: Mapping[str, Any], completions: Sequence[str]) -> list[Any]:
    """Returns verifiers' scores of the completions in a separate group, with a client that returns them in order."""

    class Saying(vf.OpenAIChatCompletionsClient):  # type: ignore[misc]
        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            said = ResponseMessage(content=next(texts), finish_reason="stop", is_truncated=False)
            usage = Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=2, total_tokens=2)
            return Response(id="1", created=0, model=model, usage=usage, message=said)

    texts = iter(completions)
    os.environ.setdefault("UNUSED_KEY", "none")
    client = Saying(ClientConfig(api_key_var="UNUSED_KEY"))
    outputs: list[Any] = await environment.run_group([dict(row) for _ in completions], client, "m", {})
    return outputs


def test_verifiers_rows_have_the_system_prompt_once(package: Package, tokenizer: PreTrainedTokenizerFast) -> None:
    settings = config(dataset_name=f"verifiers:{package(SUMS)}", answer_field="answer", system_prompt="Not this.")
    dataset = PromptDataset(settings, None)
    item = dataset.item_at(1)
    assert len(dataset) == 4
    assert PromptBuilder(tokenizer, settings.system_prompt).build(item.messages).text == (
        "<|im_start|>system\nAdd up.<|im_end|>\n<|im_start|>user\n0 + 0?<|im_end|>\n"
        "<|im_start|>assistant\n0<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (item.answer, item.columns["info"], item.columns["level"]) == ("4", {"hint": 2}, 2)


async def test_verifiers_split_eval_reads_the_eval_rows_and_allows_slices(package: Package) -> None:
    name = f"verifiers:{package(SUMS)}"
    dataset = PromptDataset(config(dataset_name=name, split="eval[1:3]", dataset_args={"rows": 9}), None)
    assert [dataset.item_at(at).prompt for at in range(len(dataset))] == ["101 + 101?", "102 + 102?"]


async def test_verifiers_scores_and_parts_match_verifiers(package: Package) -> None:
    settings = config(dataset_name=f"verifiers:{package(SUMS)}", dataset_args={"bonus": 0.3})
    ours = await scores(settings, COMPLETIONS)
    theirs = vf.load_environment(settings.verifiers_id, **settings.dataset_args)
    expected = await their_scores(theirs, theirs.get_dataset()[1], COMPLETIONS)
    assert len({score.total for score in ours}) == len(COMPLETIONS)
    for score, output in zip(ours, expected, strict=True):
        assert score.error is None
        assert score.total == pytest.approx(output["reward"], abs=1e-9)
        assert score.parts == pytest.approx(
            {"verifiers": output["reward"]} | {f"verifiers/{name}": v for name, v in output["metrics"].items()}
        )
    assert set(ours[0].parts) > {"verifiers/right", "verifiers/near", "verifiers/format_reward_func"}


async def test_verifiers_environment_runs_from_a_few_lines_of_yaml(package: Package, tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(
        f"dataset:\n  dataset_name: verifiers:{package(SUMS)}\n  dataset_args: {{rows: 2}}\n"
        "  reward_functions: [verifiers]\n"
    )
    task = Task.load(RunSettings.read(["--config", str(tmp_path / "sums.yaml")], {}, "test"))
    async with task.scorer:
        assert task.dataset.label.startswith("verifiers environment '")
        items = [task.dataset.item_at(at) for at in range(len(task.dataset))]
        found = await asyncio.gather(
            *(task.scorer.score([Sample(f"<answer>{2 * n}</answer>", row=items[n - 1].columns)]) for n in (1, 2))
        )
    assert [score.total for (score,) in found] == pytest.approx([1.7, 1.7])


async def test_verifiers_reward_weight_multiplies_the_rubric_weights(package: Package) -> None:
    rewards = [{"type": "verifiers", "weight": 2.0, "name": "sums"}, {"type": "length", "weight": 0.0}]
    settings = config(dataset_name=f"verifiers:{package(SUMS)}", reward_functions=rewards)
    (score,) = await scores(settings, ["<answer>4</answer>"])
    assert score.total == pytest.approx(2 * (1 + 0.5 + 0.2))
    assert score.parts["sums"] == pytest.approx(1.7)
    assert score.parts["sums/right"] == 1


async def test_verifiers_group_functions_get_the_whole_group(package: Package) -> None:
    code = simple(
        """
        def longest(completions) -> list[float]:
            sizes = [len(completion[-1]["content"]) for completion in completions]
            return [float(size == max(sizes)) for size in sizes]

        def one(completion):
            return 1.0
        """,
        "longest, one",
        "[1.0, 0.5]",
    )
    found = await scores(config(dataset_name=f"verifiers:{package(code)}"), ["a", "abc", "ab"], row=0)
    assert [score.total for score in found] == [0.5, 1.5, 0.5]
    assert [score.parts["verifiers/longest"] for score in found] == [0, 1, 0]


async def test_verifiers_failing_function_gives_an_error_instead_of_zero(package: Package) -> None:
    code = simple(
        """
        def picky(completion):
            return float(completion[-1]["content"])
        """,
        "picky",
    )
    good, bad, infinite = await scores(config(dataset_name=f"verifiers:{package(code)}"), ["2", "two", "inf"], row=0)
    assert (good.total, good.error) == (2.0, None)
    assert bad.total is None
    assert (bad.failed["verifiers"].code, bad.failed["verifiers"].values) == ("reward_raised", {"error": "ValueError"})
    assert str(bad.error).startswith("verifiers: picky: ")
    assert infinite.total is None
    assert infinite.failed["verifiers"].code == "value_invalid"


@pytest.mark.parametrize("returned", ["[1.0]", "None", "{'a': 1.0}", "'much'"])
async def test_verifiers_value_that_is_not_a_number_is_an_error(package: Package, returned: str) -> None:
    code = simple(f"def odd(completion):\n    return {returned}", "odd")
    (score,) = await scores(config(dataset_name=f"verifiers:{package(code)}"), ["a"], row=0)
    assert score.total is None
    assert score.failed["verifiers"].code == "reward_raised"
    assert str(score.error).startswith("verifiers: odd: ")


async def test_verifiers_failing_metric_does_not_affect_the_total(package: Package) -> None:
    code = simple(
        """
        def right(completion):
            return 0.75

        def watch(completion):
            return completion[-1]["content"].index("x")
        """,
        "right, watch",
        "[1.0, 0.0]",
    )
    with_x, without = await scores(config(dataset_name=f"verifiers:{package(code)}"), ["..x", "..."], row=0)
    assert (with_x.total, with_x.parts["verifiers/watch"], with_x.failed) == (0.75, 2, {})
    assert (without.total, without.error, without.parts["verifiers/watch"]) == (0.75, None, None)
    assert list(without.failed) == ["verifiers/watch"]
    assert without.failed["verifiers/watch"].code == "reward_raised"
    assert without.failed["verifiers/watch"].values == {"error": "ValueError"}


async def test_verifiers_rubrics_read_what_setup_state_stored(package: Package) -> None:
    code = """
        import verifiers as vf
        from datasets import Dataset

        class Prepared(vf.SingleTurnEnv):
            async def setup_state(self, state):
                state["wanted"] = state["answer"] * 2
                return state

        def wanted(state, completion):
            return float(completion[-1]["content"] == state["wanted"])

        def tokens(state):
            return state["usage"]["output_tokens"]

        def cut(state):
            return float(state["is_truncated"])

        def load_environment():
            rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "answer": "ab"}])
            group = vf.RubricGroup([vf.Rubric([wanted]), vf.Rubric([tokens, cut], [0.5, 0.0])])
            return Prepared(dataset=rows, rubric=group)
    """
    settings = config(dataset_name=f"verifiers:{package(code)}")
    columns = PromptDataset(settings, None).item_at(0).columns
    async with scorer(settings, list(columns)) as all_rewards:
        whole, cut = await all_rewards.score(
            [Sample("abab", row=columns, tokens=(1, 2)), Sample("ab", row=columns, tokens=(1,), finish_reason="length")]
        )
    assert (whole.total, whole.parts["verifiers/wanted"], whole.parts["verifiers/cut"]) == (2.0, 1, 0)
    assert (cut.total, cut.parts["verifiers/tokens"], cut.parts["verifiers/cut"]) == (0.5, 1, 1)


async def test_verifiers_prompt_changed_in_setup_is_refused(package: Package) -> None:
    code = """
        import verifiers as vf
        from datasets import Dataset

        class Changed(vf.SingleTurnEnv):
            async def setup_state(self, state):
                state["prompt"] = [vf.types.UserMessage(content="another question")]

        def one(completion):
            return 1.0

        def load_environment():
            return Changed(dataset=Dataset.from_list([{"question": "q", "answer": "a"}]), rubric=vf.Rubric([one]))
    """
    (score,) = await scores(config(dataset_name=f"verifiers:{package(code)}"), ["a"], row=0)
    assert score.failed["verifiers"].code == "prompt_changed"


async def test_verifiers_functions_get_the_prompt_of_the_model(package: Package) -> None:
    code = simple("def first(prompt):\n    return float(prompt[0]['content'] == 'Of the run.')", "first")
    settings = config(dataset_name=f"verifiers:{package(code)}")
    columns = PromptDataset(settings, None).item_at(0).columns
    given = ({"role": "system", "content": "Of the run."}, *columns["prompt"])
    async with scorer(settings, list(columns)) as all_rewards:
        (score,) = await all_rewards.score([Sample("a", row=columns, messages=given)])
    assert score.total == 1


def test_verifiers_reward_works_as_a_library(package: Package) -> None:
    name = package(SUMS)
    reward = create_reward({"type": "verifiers", "params": {"id": name}})
    row = vf.load_environment(name).get_dataset()[1]
    assert reward.score(["<answer>4</answer>", "no"], row=row) == pytest.approx([1.7, 0.125], abs=0.2)


def test_verifiers_environment_keeps_the_runs_signal_handlers(package: Package) -> None:
    def ours(number: int, frame: object) -> None:
        """The signal handler that the run has set."""

    before = signal.signal(signal.SIGTERM, ours)
    try:
        PromptDataset(config(dataset_name=f"verifiers:{package(SUMS)}"), None)
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"kind": "vf.ToolEnv", "arguments": "tools=[]"}, "ToolEnv"),
        ({"arguments": "tool_defs=[{'name': 't', 'description': '', 'parameters': {}}]"}, "tools"),
        ({"arguments": "message_type='completion'"}, "completion"),
    ],
)
@pytest.mark.filterwarnings("ignore:message_type is deprecated")
def test_verifiers_environment_that_is_not_single_turn_is_refused(
    package: Package, changes: dict[str, str], found: str
) -> None:
    name = package(simple("def one(completion):\n    return 1.0", "one", **changes))
    with raises(PluginError, "environment_unsupported", found=found):
        PromptDataset(config(dataset_name=f"verifiers:{name}"), None)


def test_verifiers_environment_that_cannot_be_loaded_reports_the_reason(package: Package) -> None:
    def load(**values: Any) -> None:
        PromptDataset(config(**values), None)

    with raises(PluginError, "environment_not_loaded", environment="not-there", error="ModuleNotFoundError"):
        load(dataset_name="verifiers:not-there")
    with raises(PluginError, "environment_not_loaded", error="TypeError") as raised:
        load(dataset_name=f"verifiers:{package(SUMS)}", dataset_args={"rowz": 3})
    assert "'rowz'" in str(raised.value)
    with raises(DatasetError, "split_missing", split="test", known=["train", "eval"]):
        load(dataset_name=f"verifiers:{package(SUMS)}", split="test")
    one = package(simple("def one(completion):\n    return 1.0", "one"))
    with raises(DatasetError, "split_missing", environment=one, split="eval"):
        load(dataset_name=f"verifiers:{one}", split="eval")
    with raises(ConfigError, "invalid_settings", problems={"settings": "args_without_taker"}):
        load(dataset_name="openai/gsm8k", dataset_args={"rows": 3})


def test_verifiers_reward_requires_an_environment_and_its_rows(package: Package) -> None:
    with raises(RewardError, "invalid_settings", problems={"id": "missing"}) as raised:
        create_reward("verifiers")
    assert "verifiers:<id>" in str(raised.value)
    reward = create_reward({"type": "verifiers", "params": {"id": package(SUMS)}})
    with raises(RewardError, "unknown_input", input="prompt", columns=["question", "answer"]):
        Scorer([WeightedReward(reward, 1.0)], has_answer=False, columns=["question", "answer"])


def test_verifiers_not_installed_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = 'pip install "verifiers>=0.2,<0.4"'
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with raises(PluginError, "package_missing", extra="verifiers") as raised:
        PromptDataset(config(dataset_name="verifiers:any"), None)
    assert remedy in str(raised.value)
    later = ModuleType("verifiers")
    later.__dict__["__version__"] = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", later)
    with raises(PluginError, "extra_version", extra="verifiers", version="0.4.0") as raised:
        PromptDataset(config(dataset_name="verifiers:any"), None)
    assert remedy in str(raised.value)
