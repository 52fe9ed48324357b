"""Settings: the step-by-step flags, precedence, and the errors for mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, SecretStr
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill.internal.flags import parse_flag_sets
from gristmill.internal.settings import Settings
from gristmill_env.commands import COMMANDS
from gristmill_env.run_settings import RunSettings
from gristmill_env.settings.dataset import RewardSpec
from gristmill_env.settings.run import EnvConfig

STEP_BY_STEP = (
    "--group_size 4 --max_num_workers 2 --rollout_server_url http://127.0.0.1:8000 --tokenizer_name Qwen/Qwen2.5-1.5B "
    "--use_wandb --wandb_name test_env --max_token_length 512 --ensure_scores_are_not_same --dataset_name some/data "
    "--split train[:100] --prompt_field prompt --answer_field answer --reward_functions length --max_tokens 128 "
    "--temperature 0.7 --model_name Qwen/Qwen2.5-1.5B --base_url http://127.0.0.1:9001 --slurm --testing"
)


def read(arguments: str = "", **environ: str) -> RunSettings:
    return RunSettings.read(arguments.split(), environ, "gristmill-env")


def config_file(folder: Path, text: str, name: str = "sums") -> str:
    (folder / f"{name}.yaml").write_text(text)
    return str(folder)


def test_the_step_by_step_flags_work_without_a_config() -> None:
    launch = read(STEP_BY_STEP)
    config = launch.config
    assert (config.group_size, config.max_num_workers, config.max_token_length) == (4, 2, 512)
    assert (config.rollout_server_url, config.tokenizer_name) == ("http://127.0.0.1:8000", "Qwen/Qwen2.5-1.5B")
    assert (config.use_wandb, config.wandb_name, config.slurm, config.testing) == (True, "test_env", True, True)
    assert config.ensure_scores_are_not_same
    dataset = config.dataset
    assert (dataset.dataset_name, dataset.split) == ("some/data", "train[:100]")
    assert (dataset.prompt_field, dataset.answer_field) == ("prompt", "answer")
    assert (dataset.max_tokens, dataset.temperature) == (128, 0.7)
    assert dataset.rewards() == [RewardSpec(type="length")]
    assert (config.server.model_name, config.server.root_url) == ("Qwen/Qwen2.5-1.5B", "http://127.0.0.1:9001")
    assert launch.run_id == "local"


@pytest.mark.parametrize(
    ("agent", "address"),
    [
        ("external", "0.0.0.0:9100"),
        ("{external: true, address: 127.0.0.1:9300, timeout: 60}", "0.0.0.0:9100"),
        ("my_agent.py:run", None),
        ("{command: [python, agent.py]}", None),
    ],
)
def test_gateway_address_is_the_deployments_for_agents_elsewhere(
    tmp_path: Path, agent: str, address: str | None
) -> None:
    folder = config_file(tmp_path, f"agent: {agent}\ndataset: {{reward_functions: [episode]}}\n")
    launch = read("--config sums", GRISTMILL_CONFIG_DIR=folder, GRISTMILL_GATEWAY_ADDRESS="0.0.0.0:9100")
    assert launch.config.agent is not None
    assert launch.config.agent.address == address
    assert launch.config.agent.timeout == (60 if "timeout" in agent else 900)


def test_gateway_address_is_the_deployments_for_a_source_with_agents_elsewhere(tmp_path: Path) -> None:
    rows = "dataset: {dataset_path: a.jsonl}"
    sources = f"[{{name: a, {rows}}}, {{name: b, agent: external, {rows}}}, {{name: c, agent: 'a.py:run', {rows}}}]"
    folder = config_file(tmp_path, f"sources: {sources}\n")
    launch = read("--config sums", GRISTMILL_CONFIG_DIR=folder, GRISTMILL_GATEWAY_ADDRESS="0.0.0.0:9100")
    agents = [source.agent for source in launch.config.sources]
    assert [None if agent is None else agent.address for agent in agents] == [None, "0.0.0.0:9100", None]
    assert [source.name for source in launch.config.sources] == ["a", "b", "c"]


def test_several_sources_with_agents_elsewhere_keep_their_addresses(tmp_path: Path) -> None:
    own = "dataset: {dataset_path: a.jsonl}, agent: {external: true, address: '0.0.0.0:9101'}"
    folder = config_file(
        tmp_path, f"sources: [{{name: a, {own}}}, {{name: b, agent: external, dataset: {{dataset_path: a.jsonl}}}}]\n"
    )
    launch = read("--config sums", GRISTMILL_CONFIG_DIR=folder, GRISTMILL_GATEWAY_ADDRESS="0.0.0.0:9100")
    addresses = [source.agent and source.agent.address for source in launch.config.sources]
    assert addresses == ["0.0.0.0:9101", "0.0.0.0:9100"]


def test_flags_may_have_dashes_and_lists() -> None:
    config = read("--group-size 4 --reward-functions length format --no-ensure_scores_are_not_same").config
    assert config.group_size == 4
    assert [spec.type for spec in config.dataset.rewards()] == ["length", "format"]
    assert not config.ensure_scores_are_not_same


@pytest.mark.parametrize(
    "url", ["http://host:9001", "http://host:9001/", "http://host:9001/v1", "http://host:9001/v1/"]
)
def test_base_url_may_end_with_v1(url: str) -> None:
    assert read(f"--base_url {url}").config.server.root_url == "http://host:9001"


def test_command_line_overrides_variables_which_override_file_and_defaults(tmp_path: Path) -> None:
    folder = config_file(
        tmp_path,
        "rollout_server_url: http://file:1\nserver_configs: [{base_url: http://file:2, timeout: 7}]\n"
        "dataset: {split: test, seed: 5}\ngroup_size: 2\n",
    )
    from_file = read("--config sums", GRISTMILL_CONFIG_DIR=folder).config
    assert (from_file.rollout_server_url, from_file.server.base_url) == ("http://file:1", "http://file:2")
    variables = {"GRISTMILL_API_URL": "http://api:8000", "GRISTMILL_MODEL_URL": "http://model:9001"}
    launch = read("--config sums --group_size 3", GRISTMILL_CONFIG_DIR=folder, **variables)
    assert (launch.config.rollout_server_url, launch.config.server.base_url) == ("http://api:8000", "http://model:9001")
    assert (launch.config.server.timeout, launch.config.dataset.seed, launch.config.group_size) == (7, 5, 3)
    named = read("--config sums --base_url http://named:3", GRISTMILL_CONFIG_DIR=folder, **variables)
    assert named.config.server.base_url == "http://named:3"


def test_exported_ports_are_the_defaults_that_a_file_overrides(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "server_configs: [{timeout: 7}]\n")
    ports = {"GRISTMILL_CONFIG_DIR": folder, "API_PORT": "8010", "MODEL_PORT": "9011"}
    config = read("--config sums", **ports).config
    assert (config.rollout_server_url, config.server.base_url) == ("http://127.0.0.1:8010", "http://127.0.0.1:9011")
    assert config.server.timeout == 7
    linked = {"API_PORT": "tcp://10.0.0.1:8000", "MODEL_PORT": ""}  # as Kubernetes sets them
    config = read("--config sums", **ports | linked).config
    assert (config.rollout_server_url, config.server.base_url) == ("http://127.0.0.1:8000", "http://127.0.0.1:9001")
    variables = {"GRISTMILL_API_URL": "http://api:1", "GRISTMILL_MODEL_URL": "http://model:2"}
    config = read("--config sums", **ports | variables).config
    assert (config.rollout_server_url, config.server.base_url) == ("http://api:1", "http://model:2")
    folder = config_file(tmp_path, "rollout_server_url: http://file:1\nserver_configs: [{base_url: http://file:2}]\n")
    config = read("--config sums", **ports | {"GRISTMILL_CONFIG_DIR": folder}).config
    assert (config.rollout_server_url, config.server.base_url) == ("http://file:1", "http://file:2")


def test_variable_with_several_addresses_gives_each_server_the_settings_of_the_file(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "server_configs: [{base_url: http://file:2, timeout: 7}]\n")
    urls = "http://one:9001,dns+http://model:9001"
    config = read("--config sums", GRISTMILL_CONFIG_DIR=folder, GRISTMILL_MODEL_URL=urls).config
    assert [(server.base_url, server.timeout) for server in config.server_configs] == [
        ("http://one:9001", 7),
        ("dns+http://model:9001", 7),
    ]


def test_single_address_does_not_override_a_list_of_addresses(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "server_configs: [{base_url: http://a:1}, {base_url: http://b:2, weight: 2}]\n")
    servers = read("--config sums", GRISTMILL_CONFIG_DIR=folder, GRISTMILL_MODEL_URL="http://model:9001").config
    assert [(server.base_url, server.weight) for server in servers.server_configs] == [
        ("http://a:1", 1), ("http://b:2", 2)
    ]  # fmt: skip
    first = read("--config sums --base_url http://c:3", GRISTMILL_CONFIG_DIR=folder).config
    assert [server.base_url for server in first.server_configs] == ["http://c:3", "http://b:2"]


def test_record_has_thinking_settings_only_if_they_are_set() -> None:
    assert "thinking_mode" not in read().config.recorded("tiny")
    record = read("--reasoning_effort low --thinking_mode").config.recorded("tiny")
    assert (record["thinking_mode"], record["reasoning_effort"]) == (True, "low")
    with raises(ConfigError, "invalid_settings", problems={"reasoning_effort": "literal_error"}):
        read("--reasoning_effort much")


def test_run_id_comes_from_flag_variable_or_file(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "group_size: 2\n")
    assert read("--config sums", GRISTMILL_CONFIG_DIR=folder).run_id == "sums"
    assert read(f"--config={folder}/sums.yaml", GRISTMILL_RUN_ID="second").run_id == "second"
    assert (
        read("--config sums --run_id third", GRISTMILL_CONFIG_DIR=folder, GRISTMILL_RUN_ID="second").run_id == "third"
    )


def test_file_whose_name_is_no_run_id_needs_one(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "group_size: 4\n", "my sums é")
    arguments = ["--config", "my sums é"]
    with raises(ConfigError, "run_id_invalid", run_id="my sums é"):
        RunSettings.read(arguments, {"GRISTMILL_CONFIG_DIR": folder}, "prog")
    named = RunSettings.read([*arguments, "--run_id", "sums"], {"GRISTMILL_CONFIG_DIR": folder}, "prog")
    assert named.run_id == "sums"


def test_config_file_may_contain_variables(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "server_configs: [{api_key: '${KEY}', model_name: '${NAME:-tiny}'}]\n")
    server = read("--config sums", GRISTMILL_CONFIG_DIR=folder, KEY="secret").config.server
    assert (server.api_key, server.model_name) == (SecretStr("secret"), "tiny")


def test_record_describes_the_run_without_addresses_or_secrets(tmp_path: Path) -> None:
    quiet = read("--dataset_name a/b --reward_functions length --total_steps 7")
    loud = read(
        "--dataset_name a/b --reward_functions length --total_steps 7 --api_key secret --base_url http://host:1 "
        "--max_num_workers 3 --use_wandb --testing --timeout 5"
    )
    record = quiet.config.recorded("tiny")
    assert record == loud.config.recorded("tiny")
    assert record["trainer"] == {"training_steps": 7}
    assert record["dataset"]["reward_functions"] == [{"type": "length", "weight": 1.0, "params": {}}]
    assert record != read("--dataset_name a/b --reward_functions length --total_steps 7 --seed 1").config.recorded(
        "tiny"
    )
    assert record != quiet.config.recorded("smollm2")


def test_the_trainer_block_is_recorded_as_written(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "trainer: {batch_size: 64, learning_rate: 1.0e-4}\n")
    launch = read("--config sums", GRISTMILL_CONFIG_DIR=folder)
    assert launch.config.recorded("tiny")["trainer"] == {"batch_size": 64, "learning_rate": 1e-4}


def test_text_in_the_trainer_block_is_recorded_as_the_number_that_it_is(tmp_path: Path) -> None:
    text = "trainer: {training_steps: '${STEPS:-40}', learning_rate: 1e-5, checkpoint_interval: 5min}\ntotal_steps: 40"
    launch = read("--config sums", GRISTMILL_CONFIG_DIR=config_file(tmp_path, text))
    block = {"training_steps": 40, "learning_rate": 1e-5, "checkpoint_interval": "5min"}
    assert launch.config.recorded("tiny")["trainer"] == block


@pytest.mark.parametrize(
    "text",
    [
        "dataset: {dataset_name: a/b, reward_functions: [{type: length, params: {since: 2024-01-01}}]}",
        "dataset: {rows: 'a.py:f', rows_params: {since: 2024-01-01}}",
        "{agent: {function: 'a.py:f', params: {since: 2024-01-01}}, dataset: {dataset_name: a/b}}",
        "{environment: {type: 'a.py:E', params: {since: 2024-01-01}}, dataset: {dataset_name: a/b}}",
    ],
)
def test_record_has_a_date_of_yaml_as_text(tmp_path: Path, text: str) -> None:
    record = read("--config sums", GRISTMILL_CONFIG_DIR=config_file(tmp_path, text)).config.recorded("tiny")
    assert '"since": "2024-01-01"' in json.dumps(record)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("dataset: {rows: 'a.py:f', rows_params: {caps: [.inf]}}", "number_not_finite"),
        ("dataset: {top_p: .nan}", "invalid_settings"),
    ],
)
def test_number_that_no_record_can_hold_is_an_error(tmp_path: Path, text: str, code: str) -> None:
    with raises(ConfigError, code):
        read("--config sums", GRISTMILL_CONFIG_DIR=config_file(tmp_path, text))


def test_flag_of_a_hyperparameter_overrides_the_trainer_block(tmp_path: Path) -> None:
    block = "trainer: {training_steps: 4, batch_size: 8, gradient_accumulation_steps: 2, learning_rate: 1.0e-4}\n"
    folder = config_file(tmp_path, block)
    launch = read("--config sums --total_steps 9 --batch_size 32", GRISTMILL_CONFIG_DIR=folder)
    trainer = {"training_steps": 9, "batch_size": 16, "gradient_accumulation_steps": 2, "learning_rate": 1e-4}
    assert launch.config.trainer_block() == trainer


class _Options(Settings):
    samples: int = Field(default=1, ge=1)


def test_command_flags_are_read_together_with_the_runs_flags() -> None:
    launch, options = RunSettings.read_with(_Options, ["--samples", "4", "--group_size", "3"], {}, "test")
    assert (options.samples, launch.config.group_size) == (4, 3)
    with raises(ConfigError, "invalid_settings", where="command line", problems={"samples": "greater_than_equal"}):
        RunSettings.read_with(_Options, ["--samples", "0"], {}, "test")
    with raises(ConfigError, "unknown_flag", name="--samples"):
        read("--samples 4")


MISTAKES = [
    ("--config nope", "config_missing", {"name": "nope"}, "bad, hook, parts, split, steps, sums, typo, worse"),
    ("--config", "invalid_flag", {}, "--config"),
    ("--group_sise 4", "unknown_flag", {"name": "--group_sise"}, "'group_size'"),
    ("--group_size many", "invalid_settings", {"problems": {"group_size": "int_parsing"}}, "many"),
    ("--group_size 0", "invalid_settings", {"problems": {"group_size": "greater_than_equal"}}, "0"),
    (
        "--base_url localhost:9001",
        "invalid_settings",
        {"problems": {"server_configs.0.base_url": "url_scheme"}},
        "localhost:9001",
    ),
    ("--temperature 0", "invalid_settings", {"problems": {"dataset.temperature": "greater_than"}}, "0"),
    ("--run_id a/b", "invalid_settings", {"problems": {"run_id": "string_pattern_mismatch"}}, "a/b"),
    ("--config bad", "unknown_key", {"problems": {"dataset.promt_field": "unknown_key"}}, "'prompt_field'"),
    ("--config worse", "unknown_key", {"problems": {"gruop_size": "unknown_key"}}, "'group_size'"),
    ("--config steps", "invalid_settings", {"problems": {"settings": "values_contradict"}}, "training_steps is 4"),
    ("--config typo", "unknown_key", {"problems": {"learnig_rate": "unknown_key"}}, "'learning_rate'"),
    ("--config hook", "trainer_only_key", {"keys": ["on_step"]}, "trainer.yaml"),
    ("--config parts", "partial_groups", {"sequences": 20, "group_size": 8}, "parts.yaml: trainer"),
    ("--config split", "partial_groups", {"sequences": 12, "group_size": 8}, "split.yaml: trainer"),
]


@pytest.mark.parametrize(("arguments", "code", "values", "quoted"), MISTAKES)
def test_mistakes_are_reported_with_the_correction(
    tmp_path: Path, arguments: str, code: str, values: dict[str, Any], quoted: str
) -> None:
    config_file(tmp_path, "dataset: {promt_field: question}\n", "bad")
    config_file(tmp_path, "gruop_size: 4\n", "worse")
    config_file(tmp_path, "total_steps: 3\ntrainer: {training_steps: 4}\n", "steps")
    config_file(tmp_path, "trainer: {learnig_rate: 1.0e-6}\n", "typo")
    config_file(tmp_path, "trainer: {on_step: mine.py:f}\n", "hook")
    config_file(tmp_path, "trainer: {batch_size: 10, gradient_accumulation_steps: 2}\n", "parts")
    config_file(tmp_path, "batch_size: 12\n", "split")
    folder = config_file(tmp_path, "group_size: 2\n")
    with raises(ConfigError, code, **values) as raised:
        read(arguments, GRISTMILL_CONFIG_DIR=folder)
    assert quoted in str(raised.value)
    file = arguments.removeprefix("--config ")
    if (tmp_path / f"{file}.yaml").is_file():
        assert f"{file}.yaml" in str(raised.value)


@pytest.mark.parametrize("name", ["quickstart", "gsm8k", "gsm8k_debug"])
def test_the_shipped_configs_are_valid(name: str) -> None:
    folder = Path(__file__).resolve().parents[3] / "configs"
    launch = read(f"--config {name}", GRISTMILL_CONFIG_DIR=str(folder))
    trainer = launch.config.trainer
    sequences = trainer["batch_size"] * trainer["gradient_accumulation_steps"]
    assert sequences % launch.config.group_size == 0
    assert launch.config.dataset.rewards()[1] == RewardSpec(type="accuracy", weight=0.8)
    assert launch.warnings() == []


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("dataset: {top_p: 0.9}", ["top_p"]),
        ("group_size: 1", ["group_size"]),
        ("max_token_length: 64\ndataset: {max_tokens: 65}", ["max_tokens"]),
        ("max_token_length: 300\ntrainer: {seq_len: 299}", ["trainer.seq_len"]),
        ("max_token_length: 300\ntrainer: {token_budget: 299}", ["trainer.token_budget"]),
        ("max_token_length: 64\ndataset: {max_tokens: 8}\ntrainer: {seq_len: 64, token_budget: 64}", []),
        ("trainer: {overlong_buffer: 300}", ["trainer.overlong_buffer"]),
        ("dataset: {max_tokens: 64}\ntrainer: {overlong_buffer: 64}", ["trainer.overlong_buffer"]),
        ("dataset: {max_tokens: 64}\ntrainer: {overlong_buffer: 63}", []),
        ("trainer: {training_steps: 5, warmup_steps: 6}", ["trainer.warmup_steps"]),
        ("trainer: {training_steps: 5}\ndataset: {min_tokens: 5, length_warmup_steps: 6}", ["length_warmup_steps"]),
        (
            "dataset: {max_tokens: 64, reward_functions: [{type: soft_overlong, params: {max_tokens: 65}}, "
            "{type: length, params: {target_tokens: 65}}, {type: cosine_length, params: {max_tokens: 64}}]}",
            ["max_tokens", "target_tokens"],
        ),
        (
            "environment: guess\n"
            "dataset: {max_tokens: 8, reward_functions: [{type: length, params: {target_tokens: 65}}]}",
            [],
        ),
        ("reward_timeout: 700", ["reward_timeout"]),
        ("thinking_mode: false\nreasoning_effort: high", ["thinking_mode"]),
        ("dataset: {min_tokens: 5}", ["min_tokens"]),
        ("dataset: {min_tokens: 5, length_warmup_steps: 5}", []),
        ("dataset: {min_tokens: 256, length_warmup_steps: 5}", ["length_warmup_steps"]),
        ("dataset: {prompt_field: a, prompt_template: b}", ["prompt_field"]),
        ("dataset: {answer_field: a, ground_truth_field: b}", ["answer_field"]),
        ("dataset: {seed: 1, shuffle_dataset: false}", ["seed"]),
        ("dataset: {dataset_path: rows.jsonl, dataset_config: main}", ["dataset_config"]),
        ("dataset: {dataset_name: rows.csv, dataset_config: main}", ["dataset_config"]),
        ("dataset: {dataset_name: openai/gsm8k, dataset_config: main}", []),
        ("dataset: {dataset_path: folder, dataset_config: main}", []),
        ("dataset: {eval_dataset_config: main}", ["eval_dataset_config"]),
        ("dataset: {eval_dataset_revision: main}", ["eval_dataset_revision"]),
        ("steps_per_eval: 5", ["steps_per_eval"]),
        ("steps_per_eval: 5\ndataset: {eval_split: test}", []),
        ("eval_handling: NONE", ["eval_handling"]),
        ("eval_limit_ratio: 0.1\ndataset: {eval_split: test}", ["eval_limit_ratio"]),
        ("max_num_workers_per_node: 4", ["max_num_workers_per_node"]),
        ("max_num_workers_per_node: 4\nmax_num_workers: -1", []),
        ("wandb_name: a\nnum_rollouts_to_keep: 4", ["wandb_name", "num_rollouts_to_keep"]),
        ("wandb_name: a\nuse_wandb: true", []),
        ("reward_processes: 4", ["reward_processes"]),
        (
            "rollout_timeout: 60\ngroup_timeout: 60\nworker_timeout: 60",
            ["worker_timeout", "group_timeout", "rollout_timeout"],
        ),
        ("rollout_timeout: 60\nrollout_timeout_action: truncate", []),
        ("rollout_timeout_action: truncate", ["rollout_timeout_action"]),
        ("server_configs: [{timeout: 60}]", []),
        ("environment: {step_timeout: 4}", ["environment.step_timeout"]),
        ("environment: {type: guess, step_timeout: 4}", []),
    ],
)
def test_settings_without_effect_and_limits_that_contradict_are_named(
    tmp_path: Path, text: str, keys: list[str]
) -> None:
    folder = config_file(tmp_path, f"config_format: gristmill\n{text}\n", "run")
    found = read("--config run", GRISTMILL_CONFIG_DIR=folder).warnings()
    assert [warning.split()[0] for warning in found] == keys


def test_limits_of_the_trainers_file_are_compared_too(tmp_path: Path) -> None:
    config_file(tmp_path, "token_budget: 64\n", "trainer")
    folder = config_file(tmp_path, "max_token_length: 65\ndataset: {max_tokens: 8}\n", "run")
    (warning,) = read("--config run", GRISTMILL_CONFIG_DIR=folder).warnings()
    assert warning.startswith("trainer.token_budget is 64")


def test_record_has_the_text_of_each_chat_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ 'Hi' }}")
    source = "{name: a, dataset: {dataset_path: a.jsonl, chat_template: own.jinja}}"
    folder = config_file(tmp_path, f"dataset: {{chat_template: own.jinja}}\nsources: [{source}]\n", "run")
    recorded = read("--config run", GRISTMILL_CONFIG_DIR=folder).config.recorded("tiny")
    assert recorded["dataset"]["chat_template"] == "{{ 'Hi' }}"
    assert recorded["sources"]["a"]["dataset"]["chat_template"] == "{{ 'Hi' }}"


@pytest.mark.parametrize(("name", "content"), [("none.jinja", None), ("latin.jinja", b"{{ '\xff' }}")])
def test_chat_template_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    folder = config_file(
        tmp_path, f"evaluations: [{{name: held, dataset: {{dataset_path: a.jsonl, chat_template: {name}}}}}]\n", "run"
    )
    with raises(ConfigError, "chat_template_missing", path=name):
        read("--config run", GRISTMILL_CONFIG_DIR=folder)


def test_sampling_that_biases_the_ratio_is_recorded_and_warned_about_in_each_source(tmp_path: Path) -> None:
    dataset = "{dataset_path: a.jsonl, top_k: 5, min_p: 0.1, chat_template_kwargs: {day: Monday}}"
    folder = config_file(tmp_path, f"sources: [{{name: a, dataset: {dataset}}}]\n", "run")
    launch = read("--config run", GRISTMILL_CONFIG_DIR=folder)
    assert [warning.split()[2] for warning in launch.warnings()] == ["top_k", "min_p"]
    recorded = launch.config.recorded("tiny")
    assert recorded["sources"]["a"]["dataset"].items() >= {"top_k": 5, "min_p": 0.1}.items()
    assert recorded["sources"]["a"]["dataset"]["chat_template_kwargs"] == {"day": "Monday"}
    new = {"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "chat_template"}
    assert not (new | {"chat_template_kwargs"}) & recorded["dataset"].keys(), "a record is as before"


@pytest.mark.parametrize(
    "text", ["thinking_mode: true\ndataset: {chat_template_kwargs: {enable_thinking: false}}",
             "reasoning_effort: low\ndataset: {chat_template_kwargs: {reasoning_effort: high}}"]
)  # fmt: skip
def test_switch_of_thinking_in_two_places_is_refused(tmp_path: Path, text: str) -> None:
    folder = config_file(tmp_path, f"{text}\n", "run")
    with raises(ConfigError, "invalid_settings", problems={"settings": "values_contradict"}):
        read("--config run", GRISTMILL_CONFIG_DIR=folder)


@pytest.mark.parametrize("key", ["temperature", "eval_temperature"])
def test_temperature_above_the_servers_limit_is_refused(key: str) -> None:
    with raises(ConfigError, "invalid_settings", problems={f"dataset.{key}": "less_than_equal"}):
        read(f"--{key} 2.1")


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_of_a_command_are_not_those_of_a_section(name: str) -> None:
    """A section's key is a flag of every command, so a new key may take the name of a command's own flag."""
    parse_flag_sets([], {"its flags": COMMANDS[name].options, "settings of the run": EnvConfig}, name)


@pytest.mark.parametrize(
    ("task", "flags", "key", "value"),
    [
        ("environment: my_env.py:Game", "--step_timeout 60", "step_timeout", 60),
        ("environment: my_env.py:Game", "--set environment.params.tries=5", "params", {"tries": 5}),
        ("agent: my_agent.py:run", "--set agent.timeout=60", "timeout", 60),
        ("agent: external", "--set agent.timeout=60", "timeout", 60),
    ],
)
def test_key_below_a_short_form_keeps_what_the_short_form_says(
    tmp_path: Path, task: str, flags: str, key: str, value: object
) -> None:
    section = task.partition(":")[0]
    for text, at in ((task, ""), (f"sources: [{{name: a, {task}, dataset: {{dataset_path: a.jsonl}}}}]", "sources.0.")):
        if at and "--set" not in flags:
            continue  # a flag is of the whole run
        folder = config_file(tmp_path, f"{text}\ndataset: {{reward_functions: [episode]}}\n")
        config = read(f"--config sums {flags.replace('--set ', f'--set {at}')}", GRISTMILL_CONFIG_DIR=folder).config
        found = getattr(config.sources[0] if at else config, section)
        assert getattr(found, key) == value
        assert task.partition(": ")[2] in (getattr(found, "type", None), getattr(found, "function", None), "external")


@pytest.mark.parametrize(
    ("in_file", "assigned", "place", "value"),
    [
        ("dataset: {reward_functions: [{type: format, weight: 0.2}, {type: accuracy}]}",
         "dataset.reward_functions=[{type: length}]", "reward_functions", [RewardSpec(type="length")]),
        ("dataset: {chat_template_kwargs: {enable_thinking: true}}", "dataset.chat_template_kwargs={}",
         "chat_template_kwargs", {}),
        ("dataset: {chat_template_kwargs: {a: 1, b: 2}}", "dataset.chat_template_kwargs.b=3",
         "chat_template_kwargs", {"a": 1, "b": 3}),
    ],
)  # fmt: skip
def test_set_of_a_whole_value_replaces_the_value_of_the_file(
    tmp_path: Path, in_file: str, assigned: str, place: str, value: object
) -> None:
    folder = config_file(tmp_path, in_file)
    run = RunSettings.read(["--config", "sums", "--set", assigned], {"GRISTMILL_CONFIG_DIR": folder}, "gristmill-env")
    assert getattr(run.config.dataset, place) == value


def test_set_of_a_list_of_servers_replaces_the_list_of_the_file(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "server_configs: [{base_url: 'http://a:1'}, {base_url: 'http://b:1', timeout: 3}]")

    def urls(word: str) -> list[str]:
        read_again = RunSettings.read(["--config", "sums", "--set", word], {"GRISTMILL_CONFIG_DIR": folder}, "prog")
        return [server.root_url for server in read_again.config.server_configs]

    assert urls("server_configs=[{base_url: 'http://c:1'}]") == ["http://c:1"]
    assert urls("server_configs.1.base_url=http://c:1") == ["http://a:1", "http://c:1"]
    assert urls("server_configs.2.base_url=http://c:1") == ["http://a:1", "http://b:1", "http://c:1"]
    with raises(ConfigError, "invalid_flag", value="server_configs.3.base_url"):
        urls("server_configs.3.base_url=http://c:1")


def test_set_overrides_the_file_and_its_other_names_for_the_same_setting(tmp_path: Path) -> None:
    folder = config_file(
        tmp_path, "total_steps: 5\ngroup_size: 2\ntrainer: {batch_size: 8}\ndataset: {max_tokens: 9}\n"
    )
    flags = "--config sums --set trainer.training_steps=7 --set=dataset.max_tokens=64 --group_size 4 --model tiny"
    config = read(flags, GRISTMILL_CONFIG_DIR=folder).config
    assert config.trainer_block() == {"batch_size": 8, "training_steps": 7}
    assert (config.dataset.max_tokens, config.group_size, config.server.model_name) == (64, 4, "tiny")
    assert read("--config sums --set total_steps=3", GRISTMILL_CONFIG_DIR=folder).config.total_steps == 3


@pytest.mark.parametrize(
    ("word", "code", "named"),
    [
        ("trainer.learning_rat=1", "unknown_key", "learning_rate"),
        ("learning_rate=1", "unknown_key", "trainer.learning_rate"),
        ("trainer.publisher=none", "trainer_only_key", "publisher"),
        ("group_size=none", "invalid_settings", "group_size"),
    ],
)
def test_set_of_a_wrong_key_or_value_is_an_error(word: str, code: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(f"--set {word}")
    assert refused.value.code == code
    assert named in str(refused.value)
