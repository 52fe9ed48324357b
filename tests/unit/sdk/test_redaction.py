"""Which values count as secrets, and that they are masked in settings, texts, log lines and command lines."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr

from gristmill import ConfigError, Deployment
from gristmill.internal import redaction
from gristmill.internal.config_files import load_yaml
from gristmill.internal.flags import parse_flags
from gristmill.internal.logs import setup
from gristmill.internal.redaction import is_secret, redact, redact_arguments, remember, remember_secrets
from gristmill.internal.settings import Settings, parse
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.servers import ServerConfig
from gristmill_trainer.settings import TrainerSettings

KEY = "sk-3f9a71c2d845"


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_values", set())
    monkeypatch.setattr(redaction, "_pattern", None)


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "API_KEY", "apiKey", "x-api-key", "apikey", "--wandb_api_key", "OPENAI_KEY", "MODEL_KEY",
        "secret_key", "openai_key", "token", "hf_token", "HF_TOKEN", "accessToken", "api_tokens", "password", "pwd",
        "db-password", "PGPASSWORD", "REDIS_PASSWORD", "DB_PASS", "client_secret", "clientSecret",
        "Authorization", "credentials", "aws_credentials", "passphrase", "basic_auth", "GITHUB_PAT", "private_key",
        "key", "keys", "judge_key", "judgeKey", "--judge-key", "SORT_KEY", "webhook", "slack_webhook",
        "slackWebhookUrl", "CREDS", "LLM_CRED", "SENTRY_DSN", "DOCKER_AUTH_CONFIG", "GOOGLE_SERVICE_ACCOUNT_JSON",
        "AZURE_STORAGE_CONNECTION_STRING", "connection_string", "X-Amz-Signature", "sas", "sig", "jwt",
        "private_key_pem", "sessionid", "session_id", "connectionString",
        "HF_TOKEN_2", "TOKEN_2", "api_key_2", "password1", "AUTHTOKEN", "authtoken", "GITHUBTOKEN", "PASSCODE", "otp",
    ],
)  # fmt: skip
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "answer_key", "sort_key", "question_key", "primary_key", "public_key", "tokens", "max_tokens", "token_ids",
        "stop_token_ids",
        "max_token_length", "token_budget", "tokenizer_name", "eos_token", "pad_token", "stop_token", "pass@1",
        "pass_threshold", "code", "signal", "design", "config", "sign", "account", "service", "session", "credit",
        "pass_1", "pass8", "token_1", "key_2", "sig1", "PWD", "OLDPWD", "secretary", "monkey", "author", "path",
        "repository",
    ],
)  # fmt: skip
def test_names_of_other_settings_are_not_secret(name: str) -> None:
    assert not is_secret(name)


def test_api_keys_are_the_only_secret_settings_of_gristmill() -> None:
    models: list[type[BaseModel]] = [EnvConfig, DatasetConfig, ServerConfig, TrainerSettings]
    assert {name for model in models for name in model.model_fields if is_secret(name)} == {"api_key"}


def test_redact_masks_secrets_at_any_depth_by_name_and_by_type() -> None:
    settings = {
        "judge": {"api_key": KEY, "model": "m", "headers": [{"Authorization": f"Bearer {KEY}"}]},
        "list": [{"token": KEY}, (SecretStr(KEY), 3)],
        "password": None,
        "auth": ["user", KEY],
        f"https://me:{KEY}@host/x": 1,
    }
    assert redact(settings) == {
        "judge": {"api_key": "***", "model": "m", "headers": [{"Authorization": "***"}]},
        "list": [{"token": "***"}, ["***", 3]],
        "password": None,
        "auth": "***",
        "https://***@host/x": 1,
    }
    assert settings["list"] == [{"token": KEY}, (SecretStr(KEY), 3)], "the settings themselves stay"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://me:{KEY}@host:1/v1", "http://***@host:1/v1"),
        (f"https://{KEY}@host and ftp://a:b@c", "https://***@host and ftp://***@c"),
        (f"https://host/v1?model=m&api_key={KEY}&n=1", "https://host/v1?model=m&api_key=***&n=1"),
        (f"sent Authorization: Bearer {KEY}", "sent Authorization: Bearer ***"),
        (f"http://user:p@{KEY}@host/v1", "http://***@host/v1"),
        (f"bearer {KEY}", "bearer ***"),
        (f"Authorization: Token {KEY}", "Authorization: Token ***"),
        (f"authorization: {KEY}", "authorization: ***"),
        (f"{{'x-api-key': '{KEY}', 'n': 1}}", "{'x-api-key': '***', 'n': 1}"),
        (f"X-API-Key: {KEY} sent", "X-API-Key: *** sent"),
        (f"https://hooks.slack.com/services/T0/B0/{KEY}", "https://hooks.slack.com/***"),
        (f"https://discord.com/api/webhooks/12/{KEY}?wait=1", "https://discord.com/api/webhooks/***"),
        (
            f"https://h/f?code={KEY}&sig={KEY}&X-Amz-Signature={KEY}&n=1",
            "https://h/f?code=***&sig=***&X-Amz-Signature=***&n=1",
        ),
        (f"AccountName=a;AccountKey={KEY}==;Suffix=b", "AccountName=a;AccountKey=***;Suffix=b"),
        (f"postgres://u:p/{KEY}@h/db", "postgres://***@h/db"),
        (f"postgres://u:/{KEY}?#@h:5432/db", "postgres://***@h:5432/db"),
        (f"redis://:{KEY}/=@h", "redis://***@h"),
        (f"https://h/#access_token={KEY}&n=1", "https://h/#access_token=***&n=1"),
        (f"https://h/?api%5Fkey={KEY}&auth%5Btoken%5D={KEY}", "https://h/?api%5Fkey=***&auth%5Btoken%5D=***"),
        (f"Cookie: session={KEY}", "Cookie: ***"),
        (f"cookie: a=1; session={KEY}; b=2\nnext", "cookie: ***\nnext"),
        (f"Set-Cookie: s={KEY}; Path=/; HttpOnly", "Set-Cookie: ***"),
        (f"{{'Cookie': 'session={KEY}', 'n': 1}}", "{'Cookie': '***', 'n': 1}"),
        ("http://host:8000/a@b http://[::1]:80/a@b http://h:80,http://g:81 me@b https://h:443?x@y", None),
        ("the cookie: chocolate, and cookie = 3 or #code = 4 # and key, https://h/#part", None),
        ("http://host/a?mail=b@c basic arithmetic, the token count is 12345678", None),
        ("mail me@host, http://host/a@b, tokens=31", "mail me@host, http://host/a@b, tokens=31"),
    ],
)
def test_redact_masks_secrets_inside_of_texts(text: str, shown: str | None) -> None:
    assert redact(text) == (text if shown is None else shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        "://",
        "://:a",
        "://a:/b",
        "?a",
        "&a%5F",
        "#a=",
        "cookie",
        "cookie: a=b;",
        "Set-Cookie=a;b",
        "a:b/",
        " ",
        "@",
        ";a=",
        "https://www.example.com/",
        "https://hooks.a",
        "cookie:",
        "authorization:",
        "Bearer ",
    ],
)
def test_time_grows_no_faster_than_the_text(part: str) -> None:
    def seconds(size: int) -> float:
        text = "cookie: a=b;" + part * (size // len(part))
        times = []
        for _ in range(3):
            began = time.process_time()
            redact(text)
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(100_000) < 12 * max(seconds(25_000), 1e-3)  # quadratic time is 16 times as long


@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({"api_keys": ["other", KEY]}, KEY),
        ({"credentials": {"a": [{"b": KEY}]}}, KEY),
        ({"base_url": f"http://me:{KEY}@host"}, KEY),
        ({"urls": [f"https://host/v1?token={KEY}&n=1"]}, KEY),
        ({"url": "https://host/v1?api_key=a%2Fb%2Fc-123"}, "a/b/c-123"),
        ({"url": f"postgres://u:p/{KEY}@h"}, f"p/{KEY}"),
        ({"url": f"https://host/#access_token={KEY}"}, KEY),
        ({"connection_string": f"x={KEY};"}, f"x={KEY};"),
    ],
)  # fmt: skip
def test_part_of_a_setting_that_a_library_logs_alone_is_masked(settings: dict[str, object], logged: str) -> None:
    remember_secrets(settings)
    assert redact(f"refused {logged} here") == "refused *** here"


def test_mask_is_found_in_redacted_settings_and_other_asterisks_are_not() -> None:
    for secret in (
        {"api_key": KEY},
        ["a", {"url": f"https://me:{KEY}@host/x"}],
        f"https://host/x?token={KEY}&b=1",
        f"Authorization: Bearer {KEY}",
        f"cookie: session={KEY}",
        f"https://hooks.example.org/{KEY}",
        ["--api-key", KEY],
        [f"API_KEY={KEY}"],
    ):
        assert not [*redaction.redacted(secret)]
        assert len([*redaction.redacted(redact(secret))]) == 1, redact(secret)
    for text in ("***Note***", "a *** b", "Format: ***bold***", "Example:\n***\ntext", "x = ****", 3, None):
        assert not [*redaction.redacted(text)]
    assert [*redaction.redacted({"judge": [{"api_key": "***"}]})] == ["judge.0.api_key"]


def test_remembered_value_is_masked_wherever_it_occurs() -> None:
    text = f"judge said 401: Incorrect API key provided: {KEY}."
    assert KEY in redact(text)
    remember(KEY)
    assert redact({"system_prompt": text}) == {"system_prompt": "judge said 401: Incorrect API key provided: ***."}


def test_name_of_a_field_under_key_is_not_remembered() -> None:
    words = ["--api-key", "another-secret", "TOKEN=third-secret"]
    remember_secrets({"key": "question", "judge_key": KEY, "args": words})
    assert redact(f"question {KEY} another-secret third-secret") == "question *** *** ***"


def test_short_values_are_not_searched_for() -> None:
    remember("key")
    assert redact("a monkey") == "a monkey"


def test_value_of_a_variable_with_a_secrets_name_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    words = (
        "${ANYTHING} ${WITH:-default} ${USER_NAME:plain} ${NONE:plain:-default-2} ${NONE:-default-3} ${API_KEY:plain}"
    )
    path.write_text(f"dataset: {{system_prompt: '{words}'}}\n")
    environ = {"ANYTHING": KEY, "WITH": f"{KEY}-2", "USER_NAME": "somebody-1", "API_KEY": f"{KEY}-3"}
    filled = load_yaml(path, environ)
    assert filled["dataset"]["system_prompt"] == f"{KEY} {KEY}-2 somebody-1 default-2 default-3 {KEY}-3"
    assert redact(filled)["dataset"]["system_prompt"] == "*** *** somebody-1 default-2 default-3 ***"


class _Judge(Settings):
    api_key: SecretStr | None = None
    params: dict[str, object] = {}
    tries: int = 1


def test_parsed_secrets_are_remembered_and_not_in_errors() -> None:
    parse(_Judge, {"params": {"judge": [{"token": KEY}]}}, "run.yaml")
    assert redact(f"with {KEY}") == "with ***"
    remember_secrets(_Judge(api_key=SecretStr("another-secret")))
    assert redact("another-secret") == "***"
    with pytest.raises(ConfigError) as error:
        parse(_Judge, {"api_key": [KEY], "tries": f"http://me:{KEY}@host"}, "run.yaml")
    assert KEY not in repr((error.value, error.value.values))
    with pytest.raises(ConfigError) as error:
        parse_flags([f"--api_keys={KEY}"], _Judge, "prog")
    assert KEY not in repr((error.value, error.value.values))


def test_token_of_the_api_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("0123456789abcdef0123456789abcdef\n")
    Deployment.read({"GRISTMILL_API_TOKEN_FILE": str(tmp_path / "env")})
    assert redact("401 for 0123456789abcdef0123456789abcdef") == "401 for ***"


def test_command_line_loses_the_values_of_secret_flags() -> None:
    arguments = ["--api_key", KEY, f"--token={KEY}", "--max_tokens", "64", "--base_url", f"http://me:{KEY}@host"]
    assert redact_arguments(arguments) == [
        "--api_key", "***", "--token=***", "--max_tokens", "64", "--base_url", "http://***@host"
    ]  # fmt: skip


def test_lists_that_are_command_lines_lose_the_values_of_secret_flags() -> None:
    words = ["--api-key", KEY, f"--judge_key={KEY}", f"OPENAI_API_KEY={KEY}", "--model", "m", {"key": KEY}]
    shown = ["--api-key", "***", "--judge_key=***", "OPENAI_API_KEY=***", "--model", "m", {"key": "***"}]
    assert redact({"args": words}) == {"args": shown}
    assert redact(["- a password", "72", "x=5", "--answer_key", "gold"]) == [
        "- a password", "72", "x=5", "--answer_key", "gold"
    ]  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error, to which the log goes."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    monkeypatch.setattr(sys, "stderr", stream)
    setup("test")
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_log_lines_and_tracebacks_hold_no_secret(log: io.StringIO) -> None:
    remember(KEY)
    logger = logging.getLogger("test")
    logger.info("judge at %s", f"http://me:{KEY}@host")
    try:
        raise ValueError(KEY)
    except ValueError:
        logger.exception("it failed")
    assert "http://***@host" in log.getvalue()
    assert "ValueError: ***" in log.getvalue()
    assert KEY not in log.getvalue()
