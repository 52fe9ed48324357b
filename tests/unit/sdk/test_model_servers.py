"""The model servers that a URL represents. The name server is a function, because no test may change the real name
server's answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill.model_servers import ServerAddresses, find_all, split_urls


def _names(*answers: list[str] | OSError) -> Callable[[str, int], list[str]]:
    """Returns a lookup that gives one answer after the other."""
    left = iter(answers)

    def look_up(host: str, port: int) -> list[str]:
        assert (host, port) == ("model", 9001)
        answer = next(left)
        if isinstance(answer, OSError):
            raise answer
        return answer

    return look_up


def test_fixed_url_is_one_server() -> None:
    addresses = ServerAddresses("http://gpu1:9001/v1/")
    assert (addresses.by_name, addresses.find()) == (False, ["http://gpu1:9001/v1"])


def test_name_is_one_server_per_address_in_numeric_order() -> None:
    addresses = ServerAddresses("dns+http://model:9001", _names(["10.0.0.10", "10.0.0.9", "10.0.0.9"]))
    assert addresses.by_name
    assert addresses.find() == ["http://10.0.0.9:9001", "http://10.0.0.10:9001"]


def test_server_that_joins_or_leaves_is_found_at_the_next_look_up() -> None:
    addresses = ServerAddresses(
        "dns+http://model:9001/v1", _names(["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"])
    )
    found = [addresses.find() for _ in range(3)]
    one, two = "http://10.0.0.1:9001/v1", "http://10.0.0.2:9001/v1"
    assert found == [[one], [one, two], [two]]


def test_failed_look_up_keeps_the_servers_of_the_last_look_up() -> None:
    addresses = ServerAddresses("dns+http://model:9001", _names(OSError(), ["10.0.0.1"], OSError(), []))
    assert [addresses.find() for _ in range(4)] == [[], *[["http://10.0.0.1:9001"]] * 3]


def test_host_with_addresses_of_both_versions_is_one_server() -> None:
    both = ServerAddresses("dns+http://model:9001", _names(["fd00::1", "10.0.0.1"]))
    assert both.find() == ["http://10.0.0.1:9001"]
    assert ServerAddresses("dns+http://model:9001", _names(["fd00::1"])).find() == ["http://[fd00::1]:9001"]


def test_servers_of_several_urls_are_listed_once() -> None:
    names = [ServerAddresses(url) for url in split_urls("http://a:1, http://b:2,,http://a:1/")]
    assert find_all(names) == ["http://a:1", "http://b:2"]


def test_system_name_server_knows_this_machine() -> None:
    assert ServerAddresses("dns+http://localhost:9001").find() == ["http://127.0.0.1:9001"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("model:9001", "url_scheme"),
        ("dns+https://model:9001", "url_scheme"),
        ("dns+http://model", "url_without_port"),
        ("dns+http://:9001", "url_without_port"),
        ("dns+http://model:port", "url_without_port"),
    ],
)
def test_wrong_url_is_refused(url: str, code: str) -> None:
    with raises(ConfigError, code, url=url):
        ServerAddresses(url)
