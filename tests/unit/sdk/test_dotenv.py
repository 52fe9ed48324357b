"""`.env` files have the meaning that Docker Compose gives them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill.deployment import env_file
from gristmill.internal import dotenv
from gristmill.internal.dotenv import DotenvError, read_env_file

ENVIRON = {"SET": "outer", "FROMENV": "1"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=b", "b"),
        ("A = b", "b"),
        ("A= b  ", "b"),
        ("A=b # c", "b"),
        ("A=b#c", "b#c"),
        ("A=# c", "# c"),
        ("A='b # c' # d", "b # c"),
        ('A="b # c" # d', "b # c"),
        ('A="x\\ny"', "x\ny"),
        ("A='x\\ny'", "x\\ny"),
        ("A=x\\ny", "x\\ny"),
        ("export A=b", "b"),
        ("A: b", "b"),
        ("A:b", "b"),
        ("A=", ""),
        ("A=''", ""),
        ('A=""', ""),
        ("A # c", None),
        ("B=1\nA=${B}2", "12"),
        ("B=1\nA='${B}'", "${B}"),
        ('B=1\nA="${B}x"', "1x"),
        ("A=$HOMEX", ""),
        ("A=${X:-y}", "y"),
        ("A=${X-y}", "y"),
        ("X=\nA=${X:-y}", "y"),
        ("X=\nA=${X-y}", ""),
        ("A=$$x", "$x"),
        ("A='$$x'", "$$x"),
        ('A="\\$x"', "$x"),
        ("A=${SET}", "outer"),
        ("A=${SET:+yes}", "yes"),
        ("A=${X:+yes}", ""),
        ("SET=other\nA=${SET}", "outer"),
        ("A=${X:-${SET}}", "outer"),
        ("A=a b c", "a b c"),
        ('A="multi\nline"', "multi\nline"),
        ("A='multi\nline'", "multi\nline"),
        ("A=it's", "it's"),
        ("A='it\\'s'", "it's"),
        ('A="say \\"hi\\""', 'say "hi"'),
        ("A=b\r\nB=c", "b"),
        ('A={"x": 1}', '{"x": 1}'),
        ("A=b=c", "b=c"),
        ("# c\n\n A=b", "b"),
        ("A='b'x", None),
        ("A='b", None),
        ("A.B=x\nA=y", "y"),
        ("A-B=x\nA=y", "y"),
        ("a b=c", None),
        ("A=${X:?no}", None),
        ("A=${X", None),
        ("A=\\$x", "\\"),
        ('A="\\\\n"', "\\n"),
        ("A=http://x/#y", "http://x/#y"),
        ("A=x\t# c", "x\t# c"),
        ("A=$", "$"),
        ("A=a$", "a$"),
        ("A=${}", None),
        ("2A=b\nA=c", "c"),
        ("A=x;y", "x;y"),
        ("A=${X:-a b}", "a b"),
        ("A=${X:-it's}", "it's"),
        ('A="${X:-y}"', "y"),
        ('A="a"#c', "a"),
        ("=b\nA=c", None),
        ("A=${SET}}", "outer}"),
        ('A="$$x"', "$x"),
        ("A=x'y'", "x'y'"),
        ("A='x' 'y'", None),
        ('A="tab\\tx"', "tab\tx"),
        ('A="\\x"', "\\x"),
        ("\ufeffA=b", "b"),
        ("A=$SET-x", "outer-x"),
        ("A=${SET}-${X:-z}", "outer-z"),
        ("A=\\\\", "\\\\"),
        ("A= # c", "# c"),
        ("A=b  #c", "b"),
        ("FROMENV\nA=${FROMENV}x", "1x"),
        ("A=${1x}", None),
        ("A=${X:-${Y:-z}}", "z"),
        ('A="${X:-\\"q\\"}"', '"q"'),
        ("export SET=mine\nA=$SET", "outer"),
        ('A="# x"', "# x"),
        ('A="a\\$$b"', "a$"),
        ("A =b", "b"),
        ("A=${SET?x}y", "outery"),
        ("A=${FROMENV:+a b}", "a b"),
        ("A=b;#c", "b;#c"),
        ("A='#'", "#"),
        ("A=/a/b:/c", "/a/b:/c"),
        (":A=b", None),
        ("A=é", "é"),
        ('A="${X}', None),
        ("A=[1, 2]", "[1, 2]"),
        ("A=a\\ b", "a\\ b"),
        ("A=${SET:-a}#b", "outer#b"),
        ("A=x # y $Z ${", "x"),
        ('A="b" ', "b"),
        ("A='$SET'", "$SET"),
        ("X=1\nX=2\nA=$X", "2"),
        ('A:"b c"', "b c"),
        ("A='b\"c'", 'b"c'),
        ('A="x\\\\"', "x\\"),
    ],
)
def test_value_of_a_variable_is_the_one_of_compose(tmp_path: Path, text: str, value: str | None) -> None:
    """The values equal `docker compose config`'s (2.26). None: Compose refuses the file."""
    file = tmp_path / ".env"
    file.write_text(text, encoding="utf-8", newline="")
    if value is None:
        with pytest.raises(DotenvError):
            read_env_file(file, ENVIRON)
        with raises(ConfigError, "env_file_invalid", path=file):
            env_file(tmp_path, ENVIRON)
    else:
        assert read_env_file(file, ENVIRON)["A"] == value


def test_environment_overrides_the_file_and_may_turn_it_off(tmp_path: Path) -> None:
    assert env_file(tmp_path, {}) == {}
    (tmp_path / ".env").write_text("A=file\nB=file\n")
    assert env_file(tmp_path, {"A": "environment"}) == {"B": "file"}
    assert env_file(tmp_path, {"A": ""}) == {"B": "file"}
    assert env_file(tmp_path, {"COMPOSE_DISABLE_ENV_FILE": "1"}) == {}


@pytest.mark.parametrize("wrong", ["B='open", "B=a\0b"])
def test_error_names_the_line(tmp_path: Path, wrong: str) -> None:
    (tmp_path / ".env").write_text(f"A=1\n\n{wrong}\n")
    with pytest.raises(DotenvError, match=r"\.env, line 3 "):
        read_env_file(tmp_path / ".env", {})


def test_makefile_reads_a_variable_without_packages(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DEVICE='cuda' # the GPU\n")
    command = [sys.executable, "-IS", str(dotenv.__file__), str(tmp_path / ".env")]
    for name, value in (("DEVICE", "cuda"), ("OTHER", "")):
        done = subprocess.run([*command, name], capture_output=True, text=True, env={}, check=True)
        assert done.stdout == value
