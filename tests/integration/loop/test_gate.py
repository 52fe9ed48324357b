"""The gate in front of a real vLLM."""

from __future__ import annotations

import httpx
import pytest
from tests.support.stack import Vllm

ASK = {"model": "tiny", "prompt": "1", "max_tokens": 1}


@pytest.mark.parametrize("host", ["rebind.evil.example:9001", "localhost.evil.example", "127.0.0.1.nip.io"])
def test_request_for_an_unknown_host_is_refused(vllm: Vllm, host: str) -> None:
    """Against DNS rebinding: reading, generating and the developer endpoints, also with the trainer's token."""
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/pause")):
        answer = httpx.request(method, f"{vllm.url}{path}", json=ASK, headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host_not_allowed"), path


@pytest.mark.parametrize("host", ["127.0.0.1:9001", "localhost", "model:9001"])
def test_request_for_a_known_host_is_answered(vllm: Vllm, host: str) -> None:
    answer = httpx.post(f"{vllm.url}/v1/completions", json=ASK, headers={"Host": host}, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_page_of_another_site_reads_nothing(vllm: Vllm) -> None:
    """Without CORS headers in the answer, the browser withholds it. A refused preflight lets no POST of JSON
    through."""
    page = {"Origin": "http://evil.example"}
    assert "access-control-allow-origin" not in httpx.get(f"{vllm.url}/v1/models", headers=page).headers
    asked = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    preflight = httpx.options(f"{vllm.url}/v1/completions", headers=asked)
    assert not preflight.is_success
    assert "access-control-allow-origin" not in preflight.headers
    simple = httpx.post(
        f"{vllm.url}/v1/completions",
        content=b'{"model":"tiny","prompt":"1"}',
        headers={**page, "Content-Type": "text/plain"},
    )
    assert not simple.is_success
