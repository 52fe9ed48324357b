"""scripts/uv_settings.py: uv finds packages where pip's own settings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from uv_settings import for_uv, merged

STRATEGY = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_a_variable_overrides_the_section_install_which_overrides_global() -> None:
    listing = """\
global.cert='/global.pem'
global.index-url='https://global.example/simple'
install.index-url='https://install.example/simple'
:env:.index-url='https://env.example/simple'
install.timeout='60'
global.timeout='15'
freeze.timeout='1'
global.find-links='\\n/one\\n/two'
"""
    assert merged(listing) == {
        "cert": "/global.pem",
        "index-url": "https://env.example/simple",
        "timeout": "60",
        "find-links": "/one\n/two",
    }
    assert merged("") == {}


@pytest.mark.parametrize(
    ("pip", "uv"),
    [
        ({}, {}),
        ({"index-url": ""}, {}),
        ({"index-url": "https://u:p@mirror.example/simple"}, {"UV_DEFAULT_INDEX": "https://u:p@mirror.example/simple"}),
        ({"extra-index-url": "file:///a\nhttps://b/c"}, {"UV_EXTRA_INDEX_URL": "file:///a https://b/c"}),
        ({"trusted-host": "a b:8080"}, {"UV_INSECURE_HOST": "a b:8080"}),
        ({"find-links": "https://a/wheels file:///b"}, {"UV_FIND_LINKS": "https://a/wheels,file:///b"}),
        ({"no-index": "true"}, {"UV_NO_INDEX": "1"}),
        ({"no-index": "0"}, {}),
        ({"timeout": "180", "retries": "9"}, {"UV_HTTP_TIMEOUT": "180", "UV_HTTP_RETRIES": "9"}),
        ({"cert": "/ca.pem", "client-cert": "/me.pem"}, {"SSL_CERT_FILE": "/ca.pem", "SSL_CLIENT_CERT": "/me.pem"}),
        ({"disable-pip-version-check": "1", "constraint": "/c.txt"}, {}),
    ],
)
def test_each_setting_has_its_variable(pip: dict[str, str], uv: dict[str, str]) -> None:
    assert for_uv(pip, {}) == STRATEGY | uv


def test_wheel_folders_that_do_not_exist_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    pip = {"find-links": f"{tmp_path}/gone ~/wheels"}
    assert for_uv(pip, {}) == STRATEGY | {"UV_FIND_LINKS": f"{tmp_path}/wheels"}
    assert f"{tmp_path}/gone" in capsys.readouterr().err


def test_proxy_of_pip_is_used_for_every_request() -> None:
    found = for_uv({"proxy": "http://p:1"}, {"https_proxy": "http://other:1"})
    assert {found["https_proxy"], found["HTTPS_PROXY"], found["HTTP_PROXY"]} == {"http://p:1"}


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_certificates_of_the_environment_are_those_of_pip(variable: str, tmp_path: Path) -> None:
    assert for_uv({}, {variable: "/ca.pem"})["SSL_CERT_FILE"] == "/ca.pem"
    assert for_uv({"cert": "/own.pem"}, {variable: "/ca.pem", "SSL_CERT_FILE": "/x"})["SSL_CERT_FILE"] == "/own.pem"
    assert for_uv({}, {variable: str(tmp_path)})["SSL_CERT_DIR"] == str(tmp_path)


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_variables_of_uv_stay(variable: str) -> None:
    assert for_uv({"index-url": "https://pip.example"}, {variable: "https://uv.example"}) == STRATEGY
