"""Token files: each way in which they can be unsafe stops the start with a line that says how to fix it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_api.access.settings import AccessSettings, Role, Tokens
from gristmill_api.settings import Settings

TOKENS = {role: f"{role}-{'0123456789abcdef' * 2}" for role in Role}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for role, token in TOKENS.items():
        _write(tmp_path / role, token + "\n")
    return tmp_path


def _write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("role", Role)
def test_token_has_its_role(folder: Path, role: Role) -> None:
    tokens = Tokens.read(folder)
    assert tokens.role_of(f"Bearer {TOKENS[role]}") is role
    assert tokens.role_of(f"bearer  {TOKENS[role]} ") is role
    assert tokens.role_of(_basic("whoever", TOKENS[role])) is role
    assert tokens.role_of(_basic("", TOKENS[role])) is role


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer " + TOKENS[Role.ADMIN][:-1],
        "Bearer " + TOKENS[Role.ADMIN] + "x",
        TOKENS[Role.ADMIN],
        "Digest " + TOKENS[Role.ADMIN],
        _basic(TOKENS[Role.ADMIN], ""),
        "Basic " + base64.b64encode(TOKENS[Role.ADMIN].encode()).decode(),
        "Basic not base64!",
        "Bearer \xff",
    ],
)
def test_other_authorization_headers_have_no_role(folder: Path, header: str) -> None:
    assert Tokens.read(folder).role_of(header) is None


def test_tokens_are_not_shown(folder: Path) -> None:
    settings = Settings.read({"API_AUTH": "token", "API_TOKENS_DIR": str(folder)})
    assert settings.access.tokens is not None
    shown = repr(settings) + repr(settings.access.tokens) + str(settings.access.tokens)
    assert "Tokens(env, trainer, admin)" in shown
    assert not any(token in shown for token in TOKENS.values())


@pytest.mark.parametrize(
    ("text", "mode", "code", "values"),
    [
        ("", 0o600, "token_file_empty", {}),
        ("\n", 0o600, "token_file_empty", {}),
        ("short", 0o600, "token_too_short", {}),
        ("a b" * 20, 0o600, "secret_file_several_words", {}),
        ("ä" * 40, 0o600, "secret_file_not_ascii", {}),
        ("x" * 40, 0o644, "token_file_readable_by_all", {}),
        ("x" * 40, 0o604, "token_file_readable_by_all", {}),
        (TOKENS[Role.ENV], 0o600, "token_shared", {"roles": [Role.ENV, Role.TRAINER]}),
    ],
)
def test_unsafe_token_file_is_an_error_that_names_the_file(
    folder: Path, text: str, mode: int, code: str, values: dict[str, Any]
) -> None:
    _write(folder / "trainer", text, mode)
    with raises(ConfigError, code, **values) as error:
        Tokens.read(folder)
    assert str(folder) in str(error.value)
    assert not text.strip() or len(text) < 32 or text not in repr((error.value, error.value.values))


def test_token_file_may_be_readable_by_owner_and_group(folder: Path) -> None:
    for role in Role:
        (folder / role).chmod(0o640)
    Tokens.read(folder)


def test_missing_token_file_is_an_error_that_names_the_file(folder: Path) -> None:
    (folder / "admin").unlink()
    with raises(ConfigError, "token_file_missing", path=folder / "admin"):
        Tokens.read(folder)


def test_unreadable_token_file_is_an_error_with_the_reason(folder: Path) -> None:
    (folder / "env").unlink()
    (folder / "env").mkdir()
    with raises(ConfigError, "secret_file_unreadable", path=folder / "env"):
        Tokens.read(folder)


def test_tokens_are_required_only_if_api_auth_is_token(folder: Path) -> None:
    assert AccessSettings.read({}).tokens is None
    assert AccessSettings.read({"API_AUTH": "", "API_TOKENS_DIR": str(folder)}).tokens is None
    assert AccessSettings.read({"API_AUTH": "none", "API_TOKENS_DIR": str(folder)}).tokens is None
    assert AccessSettings.read({"API_AUTH": "token", "API_TOKENS_DIR": str(folder)}).auth == "token"


@pytest.mark.parametrize(
    ("environ", "code", "variable"),
    [
        ({"API_AUTH": "tokens"}, "variable_invalid", "API_AUTH"),
        ({"API_AUTH": "Token"}, "variable_invalid", "API_AUTH"),
        ({"API_AUTH": "token"}, "variable_unset", "API_TOKENS_DIR"),
        ({"API_TOKEN_DIR": "/x"}, "variable_unknown", "API_TOKEN_DIR"),
        ({"API_CORS_ORIGIN": "http://x"}, "variable_unknown", "API_CORS_ORIGIN"),
        ({"API_IN_COMPOSE": "yes"}, "variable_invalid", "API_IN_COMPOSE"),
    ],
)
def test_other_values_of_api_auth_are_errors(environ: dict[str, str], code: str, variable: str) -> None:
    with raises(ConfigError, code, variable=variable):
        Settings.read(environ)


def test_the_password_of_redis_is_read_from_a_file_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "redis_password"
    file.write_text("s3cret\n")
    settings = Settings.read({"REDIS_PASSWORD_FILE": str(file), "REDIS_URL": "redis://redis:6379/0"})
    assert settings.redis_login == {"username": "api", "password": "s3cret"}
    assert "s3cret" not in repr(settings)
    named = Settings.read({"REDIS_PASSWORD_FILE": str(file), "REDIS_URL": "redis://default@redis:6379/0"})
    assert named.redis_login["username"] == "default"
    file.write_text("")
    assert Settings.read({"REDIS_PASSWORD_FILE": str(file)}).redis_login == {}
    with raises(ConfigError, "secret_file_unreadable", variable="REDIS_PASSWORD_FILE"):
        Settings.read({"REDIS_PASSWORD_FILE": str(tmp_path / "nowhere")})
    with raises(ConfigError, "variable_invalid", variable="REDIS_URL") as error:
        Settings.read({"REDIS_URL": "http://api:s3cret@redis:6379"})
    assert "s3cret" not in str(error.value)
    assert "s3cret" not in repr(Settings.read({"REDIS_URL": "redis://api:s3cret@redis:6379"}))
