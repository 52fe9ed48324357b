"""The page's application: its files, its JSON, its filters, its headers."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient
from tests.support.demo_runs import DemoSource

from gristmill_view.app import POLICY, accepts_html, create_app, static_files

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app(DemoSource(lambda: 0.0)), base_url="http://localhost")


@pytest.mark.parametrize(
    ("accept", "is_browser"),
    [
        (BROWSER, True),
        ("TEXT/HTML;q=0.5", True),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/plain, */*", False),
        ("text/html;q=0, application/json", False),
        ("text/*", False),
        ("", False),
    ],
)
def test_only_a_client_that_names_html_gets_the_page_at_the_root(accept: str, is_browser: bool) -> None:
    assert accepts_html(Headers({"accept": accept})) is is_browser


def test_every_address_of_the_page_is_index_html(client: TestClient) -> None:
    index = static_files()["index.html"]
    for path in ("/view", "/view/run", "/view/run/step/3", "/view/run/group/g1", "/view/compare"):
        answer = client.get(path)
        assert (answer.status_code, answer.content) == (200, index)
        assert answer.headers["content-security-policy"] == POLICY
    assert client.get("/", headers={"accept": BROWSER}).content == index
    assert client.get("/", headers={"accept": "*/*"}).status_code == 404


def test_policy_allows_no_inline_code_and_no_other_host() -> None:
    assert "unsafe" not in POLICY
    assert "http" not in POLICY
    assert {"script-src 'self'", "default-src 'none'", "frame-ancestors 'none'"} <= set(POLICY.split("; "))


def test_page_and_library_take_less_than_200_kb() -> None:
    assert sum(map(len, static_files().values())) < 200_000


def test_all_modules_are_loaded_at_once() -> None:
    """Otherwise the browser asks for a module only after it has read the module that imports it."""
    index = static_files()["index.html"].decode()
    own = {name for name in static_files() if name.endswith(".js") and "/" not in name}
    assert {name for name in own if f'modulepreload" href="/view/static/{name}"' in index} == own - {
        "app.js",
        "start.js",
    }


def test_scripts_never_parse_html() -> None:
    own = {name: content.decode() for name, content in static_files().items() if not name.startswith("vendor/")}
    for name, text in own.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "srcdoc"):
            assert word not in text, f"{name} uses {word}"
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), f"{name} names another host"


def test_token_is_kept_in_the_tab_only() -> None:
    own = {name: content.decode() for name, content in static_files().items() if not name.startswith("vendor/")}
    assert "sessionStorage.setItem(KEY, token)" in own["api.js"]
    stored = [line for text in own.values() for line in text.splitlines() if "localStorage.setItem" in line]
    assert all("gristmill-theme" in line for line in stored)


@pytest.mark.parametrize("path", ["/view", "/view/static/app.js", "/view/api/runs", "/view/api/runs/quickstart"])
def test_host_of_another_site_is_refused(client: TestClient, path: str) -> None:
    for host in ("attacker.example", "localhost.attacker.example", "127.0.0.1.attacker.example"):
        answer = client.get(path, headers={"host": f"{host}:8080"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host_not_allowed")
    for host in ("127.0.0.1:8080", "[::1]:8080", "localhost"):
        assert client.get(path, headers={"host": host}).status_code == 200


@pytest.mark.slow
def test_files_and_large_answers_travel_in_gzip(client: TestClient) -> None:
    for path in ("/view/static/vendor/uplot.js", "/view/api/runs/long/series?names=reward_mean,loss"):
        packed = client.get(path)
        plain = client.get(path, headers={"accept-encoding": "identity"})
        assert packed.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert packed.content == plain.content
        assert int(packed.headers["content-length"]) < 0.6 * len(plain.content)
        assert "Accept-Encoding" in packed.headers["vary"]
        assert packed.headers["content-security-policy"] == plain.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/view/static/%2e%2e/app.py", "/view/static/", "/view/static/nothing.js"])
def test_static_files_are_the_only_files(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "code", "status"),
    [
        ("runs/nothing", "run_missing", 404),
        ("runs/quickstart/steps/0", "step_missing", 404),
        ("runs/quickstart/steps/two", "step_missing", 404),
        ("runs/quickstart/groups/nothing", "group_missing", 404),
        ("runs/nothing/events", "run_missing", 404),
        ("runs/quickstart/rollouts?order=secret", "bad_request", 400),
        ("runs/quickstart/rollouts?step=twelve", "bad_request", 400),
        ("runs/quickstart/rollouts?step=5-3", "bad_request", 400),
        ("runs/quickstart/rollouts?outcome=ready", "bad_request", 400),
        ("runs/quickstart/rollouts?part_min=1", "bad_request", 400),
        ("runs/quickstart/rollouts?reward_min=nan", "bad_request", 400),
        ("runs/quickstart/rollouts?limit=100000", "bad_request", 400),
        ("runs/quickstart/series?points=0", "bad_request", 400),
        ("runs/quickstart/download?format=exe", "bad_request", 400),
        ("runs/quickstart/download?format=parquet", "no_parquet", 409),
        ("compare?runs=", "bad_request", 400),
        (f"compare?runs={','.join(['quickstart'] * 25)}", "bad_request", 400),
        (f"runs/quickstart/series?{'&'.join(['name=loss'] * 101)}", "bad_request", 400),
    ],
)
def test_refused_request_has_a_code_and_a_remedy(client: TestClient, path: str, code: str, status: int) -> None:
    answer = client.get(f"/view/api/{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["remedy"]


def test_data_is_never_shown_as_html(client: TestClient) -> None:
    answer = client.get("/view/api/runs/hostile/groups/g00000000")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    download = client.get("/view/api/runs/hostile/download")
    assert download.headers["content-disposition"].startswith("attachment")


def test_unknown_number_is_null(client: TestClient) -> None:
    overview = client.get("/view/api/runs/quickstart").json()
    assert overview["seconds_left"] is None


def test_series_of_a_long_run_has_the_asked_points_and_keeps_extremes(client: TestClient) -> None:
    found = client.get("/view/api/runs/long/series?names=grad_norm,reward_parts.*&points=600").json()
    assert len(found["step"]) == 600
    assert found["step"][-1] == 10_000
    assert set(found["series"]) == {"grad_norm", "reward_parts.format", "reward_parts.accuracy"}
    band = found["series"]["grad_norm"]
    assert all(low <= mean <= high for low, mean, high in zip(band["min"], band["mean"], band["max"], strict=True))
    short = client.get("/view/api/runs/quickstart/series?names=loss&points=600").json()
    assert set(short["series"]["loss"]) == {"mean"}


def test_filters_select_rollouts(client: TestClient) -> None:
    def rollouts(query: str) -> dict[str, object]:
        return dict(client.get(f"/view/api/runs/quickstart/rollouts?{query}").json())

    everything, steps = rollouts("limit=1")["total"], rollouts("step=10-11&limit=500")
    assert everything == 60 * 128
    assert steps["total"] == 256
    low = rollouts("reward_max=0.1&order=reward&limit=5")
    rows = low["rows"]
    assert isinstance(rows, list)
    assert all(row["reward"] <= 0.1 for row in rows)
    bars = low["histogram"]
    assert isinstance(bars, list)
    assert sum(bar["count"] for bar in bars) == low["total"]
    lines = client.get("/view/api/runs/quickstart/download?step=3&outcome=trained").text.splitlines()
    assert {json.loads(line)["step"] for line in lines} == {3}
