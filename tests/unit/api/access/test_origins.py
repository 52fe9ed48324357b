"""API_CORS_ORIGINS takes full origins; the error for any other value says so."""

from __future__ import annotations

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_api.access.settings import parse_origins


def test_parse_origins_accepts_full_origins() -> None:
    assert parse_origins("") == ()
    assert parse_origins(" https://a.example ,http://localhost:3000,") == ("https://a.example", "http://localhost:3000")


@pytest.mark.parametrize(
    "origin", ["*", "a.example", "https://a.example/", "https://a.example/x", "ftp://a.example", "null", "https://"]
)
def test_parse_origins_refuses_anything_else(origin: str) -> None:
    with raises(ConfigError, "variable_invalid", variable="API_CORS_ORIGINS"):
        parse_origins(f"https://fine.example,{origin}")
