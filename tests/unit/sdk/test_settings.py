"""Settings: layers, variables, flags, and errors that name the key and its nearest match."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill.internal.assignments import assigned, by_place
from gristmill.internal.config_files import find_config, load_yaml
from gristmill.internal.flags import parse_flag_sets, parse_flags
from gristmill.internal.settings import Settings, parse


class _Data(Settings):
    dataset_name: str | None = None
    split: str = "train"
    reward_functions: list[str | dict[str, Any]] = []


class _Server(Settings):
    base_url: str = "http://default"
    model_name: str | None = None


class _Run(Settings):
    group_size: int = 8
    use_wandb: bool = False
    dataset: _Data = _Data()
    server_configs: list[_Server] = [_Server()]
    trainer: dict[str, Any] = {}


def _flags(text: str) -> dict[str, Any]:
    return parse_flags(text.split(), _Run, "test")


@pytest.mark.parametrize("text", ["--group_size 4", "--group-size 4", "--group_size=4", "--group-size=4"])
def test_flag_may_have_dashes_or_underscores(text: str) -> None:
    assert parse(_Run, _flags(text), "here").group_size == 4


def test_flat_flags_set_values_in_sections() -> None:
    words = [
        "--split",
        "train[:100]",
        "--base_url",
        "http://x",
        "--reward_functions",
        "length",
        "format",
        "--use_wandb",
    ]
    in_file = {"server_configs": [{"model_name": "m"}], "dataset": {"split": "test"}}
    run = parse(_Run, assigned(in_file, parse_flag_sets(words, {"": _Run}, "test")[0], _Run), "here")
    assert run.dataset.split == "train[:100]"
    assert run.dataset.reward_functions == ["length", "format"]
    assert run.server_configs == [_Server(base_url="http://x", model_name="m")]
    assert run.use_wandb


@pytest.mark.parametrize(
    ("text", "value"), [("--use_wandb", True), ("--use_wandb false", False), ("--no-use-wandb", False)]
)
def test_boolean_flag_is_set_with_and_without_a_value(text: str, value: bool) -> None:
    assert parse(_Run, _flags(text), "here").use_wandb is value


def test_an_unknown_flag_is_an_error_with_its_nearest_match() -> None:
    with raises(ConfigError, "unknown_flag", name="--grup_size") as raised:
        _flags("--grup_size 4")
    assert "'group_size'" in str(raised.value)


def test_an_unknown_key_is_an_error_with_its_place_and_nearest_match() -> None:
    with raises(ConfigError, "unknown_key", where="run.yaml", problems={"dataset.splitt": "unknown_key"}) as raised:
        parse(_Run, {"dataset": {"splitt": "x"}}, "run.yaml")
    assert "'split'" in str(raised.value)


@pytest.mark.parametrize(
    ("item", "keys"),
    [
        ({"base_ulr": "x"}, ["servers.0.base_ulr", "servers.0.base_url", "servers.0.count"]),
        ({"base_url": 5, "count": 1}, ["servers.0.base_url"]),
        ({"count": "many", "base_url": 5}, ["servers.0.base_url", "servers.0.count"]),
        ({"base_url": "x", "name": {}}, ["servers.0.count"]),
        (5, ["servers.0"]),
    ],
)
def test_errors_of_a_setting_of_several_types_have_the_keys_that_were_written(item: object, keys: list[str]) -> None:
    class Counted(Settings):
        base_url: str
        count: int
        name: dict[str, Any] = {}

    class Several(Settings):
        servers: list[str | Counted] = []

    with pytest.raises(ConfigError) as caught:
        parse(Several, {"servers": [item]}, "run.yaml")
    assert sorted(caught.value.values["problems"]) == keys
    assert "Counted" not in str(caught.value)


def test_every_wrong_key_is_named() -> None:
    problems = {"group_size": "int_parsing", "nonsense": "unknown_key"}
    with raises(ConfigError, "unknown_key", problems=problems) as caught:
        parse(_Run, {"group_size": "many", "nonsense": 1}, "run.yaml")
    assert all(word in str(caught.value) for word in ("group_size", "many", "nonsense"))


def test_variables_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text('key: ${SET}\nother: ["${UNSET:-fallback}/v1", $$5]\nempty: ${EMPTY:-used}\n')
    loaded = load_yaml(path, {"SET": "value", "EMPTY": ""})
    assert loaded == {"key": "value", "other": ["fallback/v1", "$5"], "empty": "used"}


def test_an_unset_variable_is_an_error_that_names_it_and_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("outer:\n  api_key: ${MISSING}\n")
    with raises(ConfigError, "variable_unset", where=f"{path}: outer: api_key", variable="MISSING"):
        load_yaml(path, {})


def test_config_is_found_by_path_or_by_name(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.yaml").write_text("group_size: 2\n")
    assert find_config("gsm8k", tmp_path) == tmp_path / "gsm8k.yaml"
    assert find_config(str(tmp_path / "gsm8k.yaml"), Path("elsewhere")) == tmp_path / "gsm8k.yaml"


def test_unknown_config_lists_the_available_configs(tmp_path: Path) -> None:
    for name in ("gsm8k", "quickstart"):
        (tmp_path / f"{name}.yaml").write_text("")
    with raises(ConfigError, "config_missing", name="gsm8") as raised:
        find_config("gsm8", tmp_path)
    assert "gsm8k, quickstart" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"a: [1\n", "line 2, column 1: while parsing a flow sequence, expected ',' or ']'"),
        (b"a:\n\tb: 1\n", "line 2, column 1: while scanning for the next token, found character"),
        (b"a: *x\n", "line 1, column 4: found undefined alias 'x'"),
        (b"a: \x00\n", "unacceptable character"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff"),
        (b"on: true\n", "the key True is not text"),
        (b"a: [{b: {1: 2}}]\n", "the key 1 is not text"),
        (b"a: 2024-13-45\n", "month must be in 1..12"),
        (b"a: &a {b: *a}\n", "it contains itself"),
    ],
    ids=["bracket", "tab", "alias", "control", "utf-8", "truth", "number", "date", "itself"],
)
def test_broken_yaml_is_an_error_of_one_line_that_names_file_and_place(
    tmp_path: Path, text: bytes, problem: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text)
    with raises(ConfigError, "invalid_yaml", path=path) as raised:
        load_yaml(path)
    assert str(raised.value).startswith(f"{path} is not valid YAML: {problem}")
    assert "\n" not in str(raised.value)


class _Options(Settings):
    samples: int = 1
    compare: list[Path] = []


@pytest.mark.parametrize(
    ("text", "key", "line", "first"),
    [
        ("group_size: 4\nuse_wandb: true\ngroup_size: 8\n", "group_size", 3, 1),
        ("dataset:\n  split: a\n  split: a\n", "split", 3, 2),
        ("dataset: {split: a}\ntrainer: {}\ndataset: {}\n", "dataset", 3, 1),
        ("dataset:\n  reward_functions:\n  - type: x\n    'type': y\n", "type", 4, 3),
        ('{"group_size": 4, "group_size": 8}', "group_size", 1, 1),
        ("trainer:\n  1: a\n  1: b\n", "1", 3, 2),
    ],
)
def test_key_that_is_set_twice_is_an_error_with_both_lines(
    tmp_path: Path, text: str, key: object, line: int, first: int
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with raises(ConfigError, "duplicate_key", key=key, line=line, first=first):
        load_yaml(tmp_path / "c.yaml")


def test_merged_mapping_may_be_overridden_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    text = "\ufeffone: &one {a: 1, b: 1}\nin: {two: &two {<<: *one, a: 2}}\nthree: {<<: *two, b: 3}\n"
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    loaded = load_yaml(tmp_path / "c.yaml")
    assert (loaded["in"], loaded["three"]) == ({"two": {"a": 2, "b": 1}}, {"a": 2, "b": 3})


@pytest.mark.parametrize("values", [{"split": "\ud83d"}, {"reward_functions": ["a", {"type": "x", "p": ["\udc80"]}]}])
def test_half_a_character_in_a_setting_is_an_error_with_its_key(values: dict[str, Any]) -> None:
    with raises(ConfigError, "half_character", where="here") as raised:
        parse(_Run, {"dataset": values}, "here")
    assert raised.value.values["key"].startswith(f"dataset.{min(values)}")


def test_flags_of_two_models_are_parsed_from_one_command_line() -> None:
    models: dict[str, type[Settings]] = {"options": _Options, "settings": _Run}
    options, settings = parse_flag_sets(["--samples", "4", "--split", "test", "--compare", "a", "b"], models, "test")
    assert parse(_Options, by_place(options), "here") == _Options(samples=4, compare=[Path("a"), Path("b")])
    assert settings == [(("dataset", "split"), "test")]
    with raises(ConfigError, "unknown_flag", name="--sample"):
        parse_flag_sets(["--sample", "4"], models, "test")
    with raises(ConfigError, "unknown_flag", name="--grup_size"):
        parse_flag_sets(["--grup_size", "4"], models, "test")


def test_two_models_cannot_share_a_flag() -> None:
    with pytest.raises(ValueError, match="the flag --dataset_name is taken"):
        parse_flag_sets([], {"options": _Data, "settings": _Run}, "test")


def test_help_of_a_flag_lists_the_words_that_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    class Words(Settings):
        publisher: Literal["filesystem", "none"] = "none"
        recompute: bool | Literal["offload"] = False
        folder: str | None = None

    with pytest.raises(SystemExit):
        parse_flags(["--help"], Words, "prog")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {"--publisher filesystem|none", "--recompute [BOOL|offload]", "--folder VALUE"} <= {*lines}
