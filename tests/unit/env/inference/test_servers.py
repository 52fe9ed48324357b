"""Several servers used as one. These servers fail or delay on request; other tests use real servers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer

from gristmill.internal.logs import line
from gristmill_env.errors import EpisodeError, InferenceError, PromptRefusedError, RequestTimeoutError
from gristmill_env.inference import ModelServers
from gristmill_env.inference import server as server_module
from gristmill_env.inference.server import PARSE
from gristmill_env.settings.servers import ServerConfig

from .conftest import ASK, CHAT, GENERATE, answers, choice, client, said

pytestmark = pytest.mark.slow

Pair = tuple[FailingServer, FailingServer]


def good(server: FailingServer) -> None:
    server.answers[GENERATE] = lambda: answers(choice())


def bad(server: FailingServer, status: int = 500) -> None:
    server.answers[GENERATE] = lambda: (status, {"error": "engine died"})


def worked(server: FailingServer) -> int:
    return server.asked.count(GENERATE)


async def many(servers: ModelServers, number: int, **options: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(number):
            tasks.create_task(servers.generate(ASK, **options))


async def test_servers_share_the_load(two_servers: Pair) -> None:
    for server in two_servers:
        good(server)
        server.delay = 0.2
    async with client(*two_servers) as servers:
        await servers.connect(patience=2)
        await many(servers, 20)
    assert [worked(server) for server in two_servers] == [10, 10]


async def test_slower_server_gets_fewer_requests(two_servers: Pair) -> None:
    slow, fast = two_servers
    good(slow)
    good(fast)
    slow.delay, fast.delay = 0.5, 0.02
    left = iter(range(40))

    async def one_after_another(servers: ModelServers) -> None:
        for _ in left:
            await servers.generate(ASK)

    async with client(*two_servers) as servers:
        await servers.connect(patience=2)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(one_after_another(servers))
    assert worked(slow) + worked(fast) == 40
    assert worked(fast) > 2 * worked(slow)


async def test_servers_keep_each_request_limit(two_servers: Pair) -> None:
    at_once, most = [0, 0], [0, 0]

    def counted(number: int) -> Callable[[], tuple[int, Any]]:
        def answer() -> tuple[int, Any]:
            at_once[number] += 1
            most[number] = max(most[number], at_once[number])
            time.sleep(0.05)
            at_once[number] -= 1
            return answers(choice())

        return answer

    for number, server in enumerate(two_servers):
        server.answers[GENERATE] = counted(number)
    async with client(*two_servers, num_max_requests_at_once=3, num_requests_for_eval=1) as servers:
        await servers.connect(patience=2)
        await many(servers, 24)
        assert most == [3, 3]
        most[:] = [0, 0]
        await many(servers, 8, evaluation=True)
        assert most == [1, 1]


async def test_failed_request_moves_to_another_server_and_the_failed_server_rests(
    two_servers: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    sick, well = two_servers
    bad(sick)
    good(well)
    async with client(*two_servers, patience=30) as servers:
        await servers.connect(patience=2)
        await many(servers, 20)
    assert worked(well) == 20
    # Its share of the first wave, and one or two at its next trial. It fails fast, so it always has the least to do.
    assert 10 <= worked(sick) < 20
    assert caplog.text.count(line("model server", state="away", url=sick.url)) == 1


async def test_recovered_server_gets_requests_again(two_servers: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sick, well = two_servers
    bad(sick)
    good(well)
    async with client(*two_servers, patience=30) as servers:
        await servers.connect(patience=2)
        await many(servers, 2)
        good(sick)
        async with asyncio.timeout(10):
            while worked(sick) < 3:
                await many(servers, 2)
                await asyncio.sleep(0.05)
    assert line("model server", state="up", url=sick.url) in caplog.text


async def test_server_that_fails_every_request_is_asked_less_and_less_often(two_servers: Pair) -> None:
    sick, well = two_servers
    bad(sick)
    good(well)
    async with client(*two_servers, patience=30) as servers:
        await servers.connect(patience=2)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            await servers.generate(ASK)
    assert worked(well) > 2 * worked(sick)
    assert worked(sick) <= 6  # rests of 0.25 s, 0.5 s, 1 s, 2 s, each times 0.5 to 1.5


async def test_call_without_reachable_servers_waits_and_logs_once(
    two_servers: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    for server in two_servers:
        bad(server, 503)
    async with client(*two_servers, patience=30) as servers:
        await servers.connect(patience=2)
        calls = [asyncio.create_task(servers.generate(ASK)) for _ in range(6)]
        await asyncio.sleep(1.0)
        assert not any(call.done() for call in calls)
        good(two_servers[1])
        async with asyncio.timeout(10):
            await asyncio.gather(*calls)
        assert caplog.text.count(line("model servers", state="away")) == 1
        bad(two_servers[1])
        call = asyncio.create_task(servers.generate(ASK))
        while caplog.text.count(line("model servers", state="away")) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        call.cancel()
    assert caplog.text.count(line("model servers", state="away")) == 2  # that was another time
    assert caplog.text.count(" 30 s") == 2
    assert caplog.text.count("HTTP 503") == 2  # each server's trouble, however often it was tried


async def test_error_without_reachable_servers_names_all_servers() -> None:
    async with client("http://127.0.0.1:1", "http://127.0.0.1:2") as servers:
        urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        with raises(InferenceError, "model_server_unreachable", urls=urls):
            await servers.connect(patience=0.5)


async def test_unreachable_address_does_not_delay_a_working_server(
    failing_server: FailingServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_env.inference.servers._GRACE", 0.5)
    good(failing_server)
    async with client("http://127.0.0.1:1", failing_server, patience=30) as servers:
        async with asyncio.timeout(30):
            assert (await servers.connect(patience=3600)).name == "tiny"
        away = line("model server", state="away", url="http://127.0.0.1:1", problem="All connection attempts failed")
        assert away in caplog.text
        await many(servers, 10)
    assert worked(failing_server) == 10


def slow_for(server: FailingServer, seconds: float, tokens: list[int]) -> None:
    """Completes every prompt at once, but the prompt `tokens` only after `seconds`."""

    def answer() -> tuple[int, Any]:
        if server.now.body["token_ids"] == tokens:
            time.sleep(seconds)
        return answers(choice())

    server.answers[GENERATE] = answer


async def test_request_has_no_time_limit_by_default_while_its_server_answers(
    failing_server: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_CHECK_EVERY", 0.2)
    assert ServerConfig().timeout is None
    checked = threading.Semaphore(0)
    models = failing_server.answers["/v1/models"]

    def answer() -> tuple[int, Any]:
        for _ in range(2):
            assert checked.acquire(timeout=30)
        return answers(choice())

    def check() -> tuple[int, Any]:
        checked.release()
        return models()

    async with client(failing_server, patience=0.1) as servers:
        await servers.connect(patience=5)
        failing_server.answers |= {GENERATE: answer, "/v1/models": check}
        assert len(await servers.generate(ASK)) == 1


async def test_request_without_a_time_limit_ends_if_its_server_answers_nothing(
    failing_server: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_CHECK_EVERY", 0.2)
    slow_for(failing_server, 3.0, list(ASK.token_ids))
    async with client(failing_server, patience=0.1) as servers:
        await servers.connect(patience=5)
        failing_server.answers["/v1/models"] = lambda: (503, {})
        with raises(InferenceError, "model_server_unreachable"):
            await servers.generate(ASK)


async def test_slow_request_waits_beyond_its_timeout_while_its_server_answers(
    failing_server: FailingServer, caplog: pytest.LogCaptureFixture
) -> None:
    checked = threading.Semaphore(0)
    models = failing_server.answers["/v1/models"]

    def answer() -> tuple[int, Any]:
        for _ in range(3):  # the client asks again each time that `timeout` has passed
            assert checked.acquire(timeout=30)
        return answers(choice())

    def check() -> tuple[int, Any]:
        checked.release()
        return models()

    async with client(failing_server, patience=0.1, timeout=0.1) as servers:
        await servers.connect(patience=5)
        failing_server.answers |= {GENERATE: answer, "/v1/models": check}
        assert len(await servers.generate(ASK)) == 1
    assert failing_server.asked.count(GENERATE) == 1, "a slow request is not repeated"
    assert failing_server.url not in caplog.text, "the server is healthy"


async def test_slow_request_pauses_a_server_that_answers_nothing(
    two_servers: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_env.inference.server._QUICK", 1.0)
    frozen, well = two_servers
    good(well)
    good(frozen)
    async with client(*two_servers, patience=30, timeout=2.0) as servers:
        await servers.connect(patience=5)
        stuck = threading.Event()

        def hang() -> tuple[int, Any]:
            stuck.wait(20)
            return 200, {"data": [{"id": "tiny"}]}

        frozen.answers |= {GENERATE: hang, "/v1/models": hang}
        await many(servers, 4)
        before = worked(frozen)
        await many(servers, 4)
        assert worked(frozen) == before, "the server gets no requests for a while"
        stuck.set()
    assert worked(well) == 8, "the requests moved on"


async def test_request_that_fails_while_others_are_answered_fails_alone(failing_server: FailingServer) -> None:
    def answer() -> tuple[int, Any]:
        return (500, {}) if failing_server.now.body["token_ids"] == [9] else answers(choice())

    failing_server.answers[GENERATE] = answer
    async with client(failing_server, patience=3.0) as servers:
        await servers.connect(patience=5)
        poisoned = asyncio.create_task(servers.generate(dataclasses.replace(ASK, token_ids=[9])))
        while not poisoned.done():
            await servers.generate(ASK)
        with raises(RequestTimeoutError, "request_failed"):
            await poisoned
        await servers.generate(ASK)


async def test_different_models_are_refused_naming_both(two_servers: Pair) -> None:
    two_servers[1].answers["/v1/models"] = lambda: (200, {"data": [{"id": "other"}]})
    async with client(*two_servers) as servers:
        urls = [server.url for server in two_servers]
        with raises(InferenceError, "models_differ", models=["tiny", "other"], urls=urls):
            await servers.connect(patience=2)


async def test_text_and_token_ids_are_not_mixed(two_servers: Pair) -> None:
    two_servers[1].takes_tokens = False
    async with client(*two_servers) as servers:
        ids, text_only = (server.url for server in two_servers)
        with raises(InferenceError, "server_kinds_differ", text_only=text_only, token_ids=ids):
            await servers.connect(patience=2)


async def test_servers_use_the_shortest_context_length(two_servers: Pair) -> None:
    two_servers[1].answers["/v1/models"] = lambda: (200, {"data": [{"id": "tiny", "max_model_len": 512}]})
    async with client(*two_servers) as servers:
        assert (await servers.connect(patience=2)).max_model_len == 512


async def test_server_that_returns_with_another_model_gets_no_requests(
    two_servers: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    changed, well = two_servers
    bad(changed)
    good(well)
    async with client(*two_servers, patience=30) as servers:
        await servers.connect(patience=2)
        changed.answers["/v1/models"] = lambda: (200, {"data": [{"id": "other"}]})
        await servers.generate(ASK)
        good(changed)
        before = worked(changed)
        while "[models_differ]" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await many(servers, 10)
        assert worked(changed) == before
    assert caplog.text.count("[models_differ]") == 1


async def test_servers_of_a_name_join_and_leave(
    failing_server: FailingServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 is another address of this machine, at which no server listens yet."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("gristmill_env.inference.servers.LOOK_UP_EVERY", 0.05)
    port = failing_server.url.rpartition(":")[2]
    addresses: list[str] = []
    monkeypatch.setattr("gristmill.model_servers._ask_the_system", lambda host, port: list(addresses))
    good(failing_server)
    joined, left = f"http://127.0.0.2:{port}", failing_server.url
    async with client(f"dns+http://model:{port}", patience=30) as servers:
        asyncio.get_running_loop().call_later(0.2, addresses.append, "127.0.0.1")
        await servers.connect(patience=10)
        assert [endpoint.server.url for endpoint in servers.endpoints] == [left]
        await many(servers, 4)
        assert worked(failing_server) == 4
        late = FailingServer(("127.0.0.2", int(port)))
        good(late)
        addresses[:] = ["127.0.0.2"]
        async with asyncio.timeout(10):
            while not worked(late):
                await many(servers, 2)
                await asyncio.sleep(0.05)
        assert len(servers.endpoints) == 2, "a server that answers stays, whatever its name says"
        failing_server.close()
        async with asyncio.timeout(10):
            while len(servers.endpoints) == 2:
                await many(servers, 2)
                await asyncio.sleep(0.05)
        assert [endpoint.server.url for endpoint in servers.endpoints] == [joined]
        [completion] = await servers.generate(ASK)
        assert completion.server == joined
        late.close()
    for state, url in [("joined", joined), ("left", left)]:
        assert caplog.text.count(line("model server", state=state, url=url)) == 1


async def test_name_without_an_address_is_named_after_patience() -> None:
    async with client("dns+http://model.invalid:9001") as servers:
        with raises(InferenceError, "no_model_server", urls=["dns+http://model.invalid:9001"]):
            await servers.connect(patience=0.1)


def by(label: str) -> dict[str, Any]:
    return choice(weight_versions=[{"version": label, "start": 0, "end": 1}])


async def test_a_server_without_the_published_weights_gets_no_work_until_it_has_them(
    two_servers: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lost, well = two_servers
    lost.answers |= {
        GENERATE: lambda: answers(by("default")),
        "/weight_info": lambda: (200, {"weight_version": "default"}),
    }
    well.answers[GENERATE] = lambda: answers(by("1.4"))
    async with client(*two_servers) as servers:
        await servers.connect(patience=2)
        servers.trust_only(lambda label: label != "default")
        for _ in range(5):
            [completion] = await servers.generate(ASK)
            assert completion.labels[0].version == "1.4"
            await asyncio.sleep(0.2)
        assert worked(lost) == 1
        lost.answers |= {GENERATE: lambda: answers(by("1.5")), "/weight_info": lambda: (200, {"weight_version": "1.5"})}
        async with asyncio.timeout(10):
            while worked(lost) < 3:
                await many(servers, 2)
                await asyncio.sleep(0.05)
        # The server has not lost weights before the trainer has published some to it.
        assert unpublished(caplog) == [(logging.INFO, lost.url)]
        lost.answers[GENERATE] = lambda: answers(by("default"))
        while len(unpublished(caplog)) < 2:
            await many(servers, 2)
    assert unpublished(caplog)[1] == (logging.WARNING, lost.url)


def unpublished(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Returns level and URL of each message about a server without published weights."""
    message = re.compile(r"model server state=unpublished url=(\S+)")
    return [(one.levelno, found[1]) for one in caplog.records if (found := message.match(one.message))]


async def test_tokens_without_a_label_are_an_error_and_not_asked_for_again(failing_server: FailingServer) -> None:
    failing_server.answers |= {
        GENERATE: lambda: answers(choice(weight_versions=[])),
        "/weight_info": lambda: (200, {"weight_version": "1.4"}),
    }
    async with client(failing_server) as servers:
        await servers.connect(patience=2)
        servers.trust_only(lambda label: label != "default")
        with raises(InferenceError, "weight_label_missing", url=failing_server.url):
            await servers.generate(ASK)
    assert worked(failing_server) == 1


async def test_waiting_for_the_trainer_has_no_end(failing_server: FailingServer) -> None:
    failing_server.answers |= {
        GENERATE: lambda: answers(by("default")),
        "/weight_info": lambda: (200, {"weight_version": "default"}),
    }
    async with client(failing_server, patience=0.2) as servers:
        await servers.connect(patience=2)
        servers.trust_only(lambda label: label != "default")
        call = asyncio.create_task(servers.generate(ASK))
        await asyncio.sleep(1.5)
        assert not call.done()
        failing_server.answers |= {
            GENERATE: lambda: answers(by("2.0")),
            "/weight_info": lambda: (200, {"weight_version": "2.0"}),
        }
        async with asyncio.timeout(60):
            await call


async def test_completions_are_requested_singly_if_the_server_ignores_n(failing_server: FailingServer) -> None:
    failing_server.takes_tokens = False
    failing_server.answers[CHAT] = lambda: answers(said())
    async with client(failing_server) as servers:
        await servers.connect(patience=2)
        assert len(await servers.generate(ASK.with_count(3))) == 3
        assert [body.get("n", 1) for body in failing_server.bodies] == [3, 1, 1]  # detected, and compensated
        assert len(await servers.generate(ASK.with_count(3))) == 3
        assert [body.get("n", 1) for body in failing_server.bodies][3:] == [1, 1, 1]


async def test_setting_n_kwarg_is_ignored_makes_single_requests_from_the_start(failing_server: FailingServer) -> None:
    good(failing_server)
    async with client(failing_server, n_kwarg_is_ignored=True) as servers:
        await servers.connect(patience=2)
        assert len(await servers.generate(ASK.with_count(4))) == 4
    assert [body["sampling_params"]["n"] for body in failing_server.bodies] == [1] * 4


async def test_refusal_of_every_prompt_ends_the_run_with_the_message_of_the_server(
    failing_server: FailingServer,
) -> None:
    failing_server.answers[GENERATE] = lambda: (400, {"error": "no such sampling"})
    async with client(failing_server, n_kwarg_is_ignored=True) as servers:
        await servers.connect(patience=2)
        with raises(InferenceError, "every_prompt_refused", status=400) as raised:
            await servers.generate(ASK.with_count(4))
    assert "no such sampling" in str(raised.value)


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_refusal_of_one_prompt_of_token_ids_is_of_its_row(failing_server: FailingServer, status: int) -> None:
    good(failing_server)
    answer = failing_server.answers[GENERATE]
    failing_server.answers[GENERATE] = lambda: (
        (status, {"error": "token 99 is out of the vocabulary"})
        if 99 in failing_server.now.body["token_ids"]
        else answer()
    )
    async with client(failing_server) as servers:
        await servers.connect(patience=2)
        refused = dataclasses.replace(ASK, token_ids=[*range(8), 99])
        with raises(PromptRefusedError, "request_refused", status=status):
            await servers.generate(refused)
        assert failing_server.bodies[-1]["token_ids"] == [0, 1, 2, 3]
        assert len(await servers.generate(ASK)) == ASK.count


async def test_parsing_waits_for_a_server_that_is_away(failing_server: FailingServer) -> None:
    answered = iter([(503, "loading"), (503, "loading")])
    parsed = (200, {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]})
    failing_server.answers[PARSE] = lambda: next(answered, parsed)
    async with client(failing_server, patience=30) as servers:
        await servers.connect(patience=2)
        assert await servers.parse([4], "stop", [1], {}, None) == {"content": "4"}
    assert failing_server.asked.count(PARSE) == 3


async def test_parsing_needs_no_place_of_a_request(failing_server: FailingServer) -> None:
    began, go_on = threading.Event(), threading.Event()

    def generated() -> tuple[int, object]:
        began.set()
        go_on.wait(30)
        return answers(choice())

    failing_server.answers[GENERATE] = generated
    failing_server.answers[PARSE] = lambda: (200, {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]})
    async with client(failing_server, num_max_requests_at_once=1) as servers:
        await servers.connect(patience=2)
        working = asyncio.create_task(servers.generate(ASK))
        assert await asyncio.to_thread(began.wait, 30)
        assert await servers.parse([4], "stop", [1], {}, None) == {"content": "4"}
        go_on.set()
        await working


async def test_reply_that_the_server_cannot_parse_is_an_error_of_its_rollout(failing_server: FailingServer) -> None:
    failing_server.answers[PARSE] = lambda: (400, {"error": "no such token"})
    async with client(failing_server) as servers:
        await servers.connect(patience=2)
        with raises(EpisodeError, "reply_not_parsed", status=400):
            await servers.parse([4], "stop", [1], {}, None)
