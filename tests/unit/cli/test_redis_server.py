"""Which redis-server the tests, the benchmarks and `make local` start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill_cli.local.redis_server import RedisMissingError, redis_command, redis_server


def program(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_redis_server_variable_comes_before_the_server_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_path = program(tmp_path / "bin" / "redis-server")
    valkey = program(tmp_path / "bin" / "valkey-server")
    built = program(tmp_path / "built" / "valkey-server")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("REDIS_SERVER", "")
    assert redis_server() == in_path
    monkeypatch.setenv("REDIS_SERVER", "valkey-server")
    assert redis_server() == valkey
    monkeypatch.setenv("REDIS_SERVER", str(built))
    assert redis_command(7000, tmp_path)[0] == str(built)


def test_command_has_the_settings_as_options_and_no_file_that_redis_could_write(tmp_path: Path) -> None:
    _, *options = redis_command(7000, tmp_path)
    assert options[:6] == ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    assert options[-6:] == ["--port", "7000", "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    assert not any(option.endswith(".conf") for option in options)


def test_missing_program_in_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_SERVER", "valkey-of-nobody")
    with pytest.raises(RedisMissingError, match="REDIS_SERVER=valkey-of-nobody"):
        redis_server()
