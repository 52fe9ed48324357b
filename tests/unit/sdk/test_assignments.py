"""`--set KEY=VALUE`: the value of a dotted key, and the errors for mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field
from tests.support.errors import raises

from gristmill.errors import ConfigError, UnknownKeyError
from gristmill.internal.assignments import assigned, parse_assignments
from gristmill.internal.settings import Settings


class Server(Settings):
    url: str = ""
    timeout: float = 1.0


class Data(Settings):
    max_tokens: int = 1
    rewards: list[str | Server] = Field(default_factory=list)


class Run(Settings):
    group_size: int = 8
    data: Data = Data()
    servers: list[Server] = Field(default_factory=list)
    trainer: dict[str, Any] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["group_size=4", "data.max_tokens=64"], {"group_size": 4, "data": {"max_tokens": 64}}),
        (["data.rewards=[length, format]"], {"data": {"rewards": ["length", "format"]}}),
        (["trainer.kl_beta=1e-5", "trainer.packing=false"], {"trainer": {"kl_beta": 1e-5, "packing": False}}),
        (["servers.url=http://a?b=c"], {"servers": [{"url": "http://a?b=c"}]}),
        (["servers.url=a", "servers.1.timeout=2"], {"servers": [{"url": "a"}, {"timeout": 2}]}),
        (["servers=[{url: a}]", "servers.0.timeout=2"], {"servers": [{"url": "a", "timeout": 2}]}),
        (["data={max_tokens: 3}"], {"data": {"max_tokens": 3}}),
        (["group_size=4", "group_size=2"], {"group_size": 2}),
    ],
)  # fmt: skip
def test_assignment_is_nested_as_the_settings(words: list[str], values: dict[str, Any]) -> None:
    assert assigned({}, parse_assignments(words, Run), Run) == values


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("data.max_tokns=1", "data.max_tokens"),
        ("gruop_size=1", "group_size"),
        ("learning_rate=1", "trainer.learning_rate"),
        ("group_size.x=1", "group_size"),
        ("data.rewards.0=length", "data.rewards"),
        ("servers.0.urll=x", "servers.url"),
    ],
)
def test_unknown_key_is_an_error_with_the_nearest_key(word: str, nearest: str) -> None:
    key = word.partition("=")[0]
    with raises(UnknownKeyError, "unknown_key", where="--set", problems={key: "unknown_key"}) as refused:
        parse_assignments([word], Run, ["trainer.learning_rate"])
    assert f"'{nearest}'?" in str(refused.value)


@pytest.mark.parametrize("words", [["group_size"], ["=1"], ["data=[1"], ["data=2024-13-45"]])
def test_word_that_is_no_assignment_is_an_error(words: list[str]) -> None:
    with raises(ConfigError, "invalid_flag", flag="--set", value=words[-1]):
        parse_assignments(words, Run)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["data=1", "data.max_tokens=2"], "data.max_tokens"),
        (["servers.1.timeout=2"], "servers.1.timeout"),
        (["servers=a", "servers.0.timeout=2"], "servers.0.timeout"),
    ],
)
def test_place_that_is_no_section_is_an_error(words: list[str], key: str) -> None:
    with raises(ConfigError, "invalid_flag", flag="--set", value=key):
        assigned({}, parse_assignments(words, Run), Run)
