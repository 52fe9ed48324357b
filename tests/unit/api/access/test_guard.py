"""The guard's answers. The application behind it is real; Redis is unreachable, so a request that passes gets a 503."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gristmill_api.access.permissions import Need, rules
from gristmill_api.access.settings import Role
from gristmill_api.app import create_app
from gristmill_api.settings import Settings

TOKENS = {role: f"{role}-{'0123456789abcdef' * 2}" for role in Role}
pytestmark = pytest.mark.slow

NOBODY_THERE = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for role, token in TOKENS.items():
        (folder / role).write_text(token)
        (folder / role).chmod(0o600)
    return folder


@cache
def application(**environ: str) -> FastAPI:
    """One application for all tests with these settings: it keeps no state, because no store answers."""
    # Atropos' endpoints wait for an unreachable store.
    return create_app(Settings.read({"REDIS_URL": NOBODY_THERE, "API_MAX_WAIT_S": "0.01", **environ}))


def api(prefix: str = "", /, **environ: str) -> httpx.AsyncClient:
    """`prefix`: the API is behind a reverse proxy that serves it there."""
    transport = httpx.ASGITransport(application(**environ), root_path=prefix)
    return httpx.AsyncClient(transport=transport, base_url=f"http://api:8000{prefix}")


@pytest.fixture
async def http(folder: Path, request: pytest.FixtureRequest) -> Any:
    async with api(getattr(request, "param", ""), API_AUTH="token", API_TOKENS_DIR=str(folder)) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def problem(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "remedy"}
    assert all(isinstance(text, str) and text for text in error.values())
    return answer.status_code, error["code"]


@pytest.mark.parametrize("http", ["", "/rig", "/v1"], ids=["root", "prefix", "prefix like a path"], indirect=True)
async def test_every_route_asks_for_its_role(http: httpx.AsyncClient) -> None:
    for method, template, need in rules():
        path = template.replace("{}", "a")
        for token in (None, "wrong" * 10):
            answer = await http.request(method, path, headers=bearer(token) if token else {})
            if need is Need.NOBODY:
                assert answer.status_code in (200, 503)
            else:
                assert problem(answer) == (401, "unauthorized"), f"{method} {path}"
                assert answer.headers["www-authenticate"] == 'Bearer realm="gristmill", Basic realm="gristmill"'
        for role, token in TOKENS.items():
            answer = await http.request(method, path, headers=bearer(token))
            if need.roles and role not in need.roles:
                assert problem(answer) == (403, "forbidden"), f"{method} {path} as {role}"
                message = answer.json()["error"]["message"]
                assert all(f" {value}" in message for value in (need.value, role.value))
            else:
                assert answer.status_code not in (401, 403), f"{method} {path} as {role}: {answer.text}"


async def test_guard_refuses_before_the_body_arrives(http: httpx.AsyncClient) -> None:
    async def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    answer = await http.put("/v1/runs/a/groups/g00000000", params={"holder": "h"}, content=body())
    assert problem(answer) == (401, "unauthorized")


async def test_guard_accepts_a_token_as_the_password_of_a_url(http: httpx.AsyncClient) -> None:
    """Atropos' clients cannot set a header."""
    for url in (f"http://env:{TOKENS[Role.ENV]}@api:8000/v1/runs", f"http://x:{TOKENS[Role.ADMIN]}@api:8000/v1/runs"):
        assert (await http.get(url)).status_code == 503
    assert problem(await http.get("http://env:wrong@api:8000/v1/runs")) == (401, "unauthorized")


async def test_guard_answers_an_unknown_path_like_an_admin_route(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/nothing")).status_code == 401
    assert problem(await http.get("/v1/nothing", headers=bearer(TOKENS[Role.ENV]))) == (403, "forbidden")
    assert problem(await http.get("/v1/nothing", headers=bearer(TOKENS[Role.ADMIN]))) == (404, "no_route")


async def test_no_token_is_ever_logged(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for token in (*TOKENS.values(), "a-wrong-token-of-the-same-kind-and-length"):
        await http.post("/v1/runs/a/close", headers=bearer(token))
        await http.get(f"http://me:{token}@api:8000/v1/runs/a/close")
    own = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    assert any("refused" in text for text in own)
    assert not any("0123456789abcdef" in text or "a-wrong-token" in text for text in own)


async def test_guard_without_tokens_accepts_every_request() -> None:
    async with api() as client:
        for method, path, _ in rules():
            answer = await client.request(method, path.replace("{}", "a"))
            assert answer.status_code not in (401, 403)


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({}, True),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://api:8000"}, True),
        ({"Origin": "http://api:3000"}, False),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "https://dash.example", "Sec-Fetch-Site": "cross-site"}, True),
    ],
)
async def test_guard_refuses_changes_by_a_page_of_another_site(
    folder: Path, headers: dict[str, str], passes: bool
) -> None:
    named = {"API_CORS_ORIGINS": "https://dash.example, http://localhost:3000"}
    for more in ({}, {"API_AUTH": "token", "API_TOKENS_DIR": str(folder)}):
        async with api(**named, **more) as client:
            given = {**headers, **bearer(TOKENS[Role.ADMIN])}
            answer = await client.post("/v1/runs/a/close", headers=given)
            assert problem(answer) == ((503, "store_unavailable") if passes else (403, "cross_site"))
            assert (await client.get("/v1/runs", headers=given)).status_code == 503, "reading is CORS' business"


CHROMIUM = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36", "Accept-Language": "en"}
PROGRAMS = [
    {"User-Agent": "Python/3.11 aiohttp/3.12.15", "Accept": "*/*", "Accept-Encoding": "gzip, deflate"},
    {"User-Agent": "python-requests/2.32.5", "Accept": "*/*", "Connection": "keep-alive"},
    {"User-Agent": "curl/8.5.0", "Accept": "*/*"},
    {"User-Agent": "node", "Accept": "application/json", "Accept-Language": "*", "Sec-Fetch-Mode": "cors"},
    {"User-Agent": ""},
]


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        *((headers, True) for headers in PROGRAMS),
        ({**CHROMIUM, "Accept": "image/avif,image/webp,*/*;q=0.8", "Referer": "http://evil.example/"}, False),
        ({**CHROMIUM, "Accept": "text/html,*/*;q=0.8", "Upgrade-Insecure-Requests": "1"}, False),
        ({**CHROMIUM, "Accept": "*/*"}, False),
        ({**CHROMIUM, "Accept": "application/json", "Referer": "http://api:8001/"}, False),
        ({"User-Agent": "mozilla/4.0 (compatible)"}, False),
        ({"User-Agent": "Opera/9.80"}, False),
        ({"User-Agent": "x", "Accept": "image/png"}, False),
        ({"User-Agent": "x", "Accept": "TEXT/HTML"}, False),
        ({"User-Agent": "x", "Accept": "text/css,*/*;q=0.1"}, False),
        ({"User-Agent": "x", "Upgrade-Insecure-Requests": "1"}, False),
        ({"User-Agent": "x", "Referer": "http://evil.example/"}, False),
        ({**CHROMIUM, "Sec-Fetch-Site": "cross-site"}, False),
        ({**CHROMIUM, "Sec-Fetch-Site": "same-origin"}, True),
        ({**CHROMIUM, "Sec-Fetch-Site": "none"}, True),
        ({**CHROMIUM, "Referer": "http://api:8000/view"}, True),
        ({**CHROMIUM, "Referer": "https://dash.example/runs"}, True),
        ({**CHROMIUM, "Origin": "https://dash.example"}, True),
    ],
)
async def test_guard_refuses_gets_of_browsers_that_change_something(headers: dict[str, str], passes: bool) -> None:
    changing = [(method, path) for method, path, need in rules() if method == "GET" and not need.reads]
    assert {path for _, path in changing} == {"/reset_data", "/batch", "/status-env"}
    async with api(API_CORS_ORIGINS="https://dash.example") as client:
        client.headers = httpx.Headers(headers)
        for method, path in [*changing, ("HEAD", "/reset_data")]:
            assert ((await client.request(method, path)).status_code != 403) is passes, path
        assert (await client.get("/v1/runs")).status_code == 503


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
async def test_no_page_runs_a_script_of_another_site(path: str) -> None:
    async with api() as client:
        assert problem(await client.get(path)) == (404, "no_route")


@pytest.mark.parametrize("run_id", ["-rf", "--config", "_a", "."])
async def test_ids_of_runs_start_with_a_letter_or_a_digit(run_id: str) -> None:
    async with api() as client:
        body = {"run_id": run_id, "env": {}, "group_size": 2}
        assert problem(await client.post("/v1/runs", json=body)) == (422, "bad_request")
        assert (await client.post("/v1/runs", json={**body, "run_id": "0-_.a"})).status_code == 503


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 503)])
async def test_head_of_a_health_check_has_the_status_of_get(path: str, status: int) -> None:
    async with api() as client:  # Without Redis, so the API is not ready.
        answer = await client.head(path)
        assert (answer.status_code, (await client.get(path)).status_code) == (status, status)


async def test_cors_is_closed_by_default_and_opens_for_named_origins_only() -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with api() as client:
        answer = await client.get("/healthz", headers={"Origin": "https://dash.example"})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        answer = await client.options("/v1/runs", headers={"Origin": "https://dash.example", **asked})
        assert answer.status_code >= 400
        assert not [name for name in answer.headers if name.startswith("access-control")]
    async with api(API_CORS_ORIGINS="https://dash.example") as client:
        answer = await client.get("/healthz", headers={"Origin": "https://dash.example"})
        assert answer.headers["access-control-allow-origin"] == "https://dash.example"
        assert "access-control-allow-credentials" not in answer.headers
        answer = await client.options("/v1/runs", headers={"Origin": "https://dash.example", **asked})
        assert answer.status_code == 200
        answer = await client.get("/healthz", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert (
            await client.options("/v1/runs", headers={"Origin": "https://evil.example", **asked})
        ).status_code == 400


async def test_page_of_a_named_origin_can_read_the_error(folder: Path) -> None:
    """The preflight carries no token, and a 401 without CORS headers would be unreadable to the page."""
    environ = {"API_AUTH": "token", "API_TOKENS_DIR": str(folder), "API_CORS_ORIGINS": "https://dash.example"}
    async with api(**environ) as client:
        headers = {"Origin": "https://dash.example", "Access-Control-Request-Method": "GET"}
        assert (await client.options("/v1/runs", headers=headers)).status_code == 200
        answer = await client.get("/v1/runs", headers=headers)
        assert problem(answer) == (401, "unauthorized")
        assert answer.headers["access-control-allow-origin"] == "https://dash.example"


async def test_metrics_count_refused_requests(folder: Path) -> None:
    application.cache_clear()  # Another test's application has counted other requests.
    async with api(API_AUTH="token", API_TOKENS_DIR=str(folder)) as http:
        await http.post("/v1/runs/a/close")
        text = (await http.get("/metrics", headers=bearer(TOKENS[Role.TRAINER]))).text
    assert 'gristmill_api_requests_total{method="POST",route="unmatched",status="401"} 1.0' in text


async def test_openapi_lists_the_role_of_each_operation(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json", headers=bearer(TOKENS[Role.ENV]))).json()
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "basic"}
    operations = [
        (method.upper(), path, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    needs = {(method, path): need for method, path, need in rules()}
    assert len(operations) > 15
    for method, path, operation in operations:
        plain = "/".join("{}" if part.startswith("{") else part for part in path.split("/"))
        need = needs[method, plain]
        assert operation["x-role"] == need.value
        assert ("security" in operation) == ("401" in operation["responses"]) == (need is not Need.NOBODY)
        assert ("403" in operation["responses"]) == (need is not Need.NOBODY)


async def test_openapi_without_tokens_requires_no_token() -> None:
    async with api() as client:
        schema = (await client.get("/openapi.json")).json()
    assert "securitySchemes" not in schema.get("components", {})
    assert schema["paths"]["/v1/runs/{run_id}/close"]["post"]["x-role"] == "admin"
    assert "security" not in schema["paths"]["/v1/runs/{run_id}/close"]["post"]
    assert "403" in schema["paths"]["/v1/runs/{run_id}/close"]["post"]["responses"]
    assert "403" not in schema["paths"]["/v1/runs/{run_id}"]["get"]["responses"]
