"""The process of a user's code: many calls at a time, questions to the owner, and the cost of a call that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.errors import raises
from tests.support.grids import rest_is_long

from gristmill_env.errors import EnvError, EpisodeError
from gristmill_env.running import code_process
from gristmill_env.running.code_process import CodeError, CodeProcess, LostProcessError

pytestmark = pytest.mark.slow

_TARGET = "tests.unit.env.running.code:handler"


@pytest.fixture
async def process() -> AsyncIterator[CodeProcess]:
    async with CodeProcess(_TARGET, b"settings ", "tests") as process:
        yield process


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_process, "GRACE", 0.2)


class _Begun:
    """Answers calls, and shows when they have asked."""

    def __init__(self, calls: int = 1) -> None:
        self._left = calls
        self._all = asyncio.Event()

    async def answer(self, _body: bytes) -> bytes:
        self._left -= 1
        if self._left == 0:
            self._all.set()
        return b""

    async def wait(self) -> None:
        await self._all.wait()


async def test_calls_run_in_another_process(process: CodeProcess) -> None:
    assert await process.call(b"echo body") == b"settings body"
    assert int(await process.call(b"pid")) == process.pid


async def test_plain_calls_run_at_the_same_time(process: CodeProcess) -> None:
    # Each waits until 64 of them run.
    await asyncio.gather(*(process.call(b"meet") for _ in range(64)))


async def test_interrupt_of_one_call_does_not_end_the_others(process: CodeProcess) -> None:
    begun = _Begun()
    waiting = asyncio.create_task(process.call(b"wait", begun.answer))
    await begun.wait()
    assert await process.call(b"interrupt") == b"goes on"
    assert await process.call(b"echo body") == b"settings body"
    assert not waiting.done()
    waiting.cancel()


async def test_output_does_not_mix_with_the_reports(process: CodeProcess) -> None:
    assert await process.call(b"print") == b"printed"


async def test_code_and_its_children_read_an_empty_stdin(process: CodeProcess) -> None:
    read, echoed = await asyncio.gather(process.call(b"stdin"), process.call(b"echo body"))
    assert (read, echoed) == (b"0", b"settings body")


async def test_a_call_may_ask_its_owner(process: CodeProcess) -> None:
    async def answer(body: bytes) -> bytes:
        return body.upper()

    assert await process.call(b"ask question", answer) == b"answered QUESTION"


async def test_an_error_of_the_owner_reaches_the_call_and_returns(process: CodeProcess) -> None:
    async def answer(_body: bytes) -> bytes:
        raise EpisodeError("tests_away", "no answer", seconds=3)

    with raises(CodeError, "tests_away", seconds=3):
        await process.call(b"ask question", answer)


async def test_an_error_without_a_code_has_its_class_and_its_traceback(process: CodeProcess) -> None:
    with pytest.raises(CodeError) as caught:
        await process.call(b"raise")
    assert (caught.value.raised, caught.value.kind) == (True, "KeyError")
    assert "code.py" in caught.value.trace


async def test_stop_iteration_of_a_plain_function_is_an_error(process: CodeProcess) -> None:
    with pytest.raises(CodeError) as caught:
        await process.call(b"next")
    assert (caught.value.kind, str(caught.value)) == ("RuntimeError", "StopIteration")


async def test_half_a_character_in_an_error_is_replaced(process: CodeProcess) -> None:
    with pytest.raises(CodeError) as caught:
        await process.call(b"half")
    assert str(caught.value) == "half \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("body", [b"refuse", b"exit"])
async def test_an_error_of_a_call_leaves_the_process_running(process: CodeProcess, body: bytes) -> None:
    pid = process.pid
    with pytest.raises(CodeError):
        await process.call(body)
    assert int(await process.call(b"pid")) == pid


async def test_code_that_cannot_be_loaded_is_named() -> None:
    with raises(CodeError, "tests_broken", name="broken"):
        await CodeProcess(_TARGET, b"broken", "tests").start()


async def test_the_call_after_a_death_starts_a_new_process(process: CodeProcess) -> None:
    pid = process.pid
    with raises(LostProcessError, "process_died"):
        await process.call(b"die")
    assert int(await process.call(b"pid")) != pid


async def test_a_cancelled_call_leaves_the_process_running(process: CodeProcess) -> None:
    pid, begun = process.pid, _Begun()
    call = asyncio.create_task(process.call(b"wait", begun.answer))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert int(await process.call(b"pid")) == pid


@pytest.mark.parametrize("hanging", rest_is_long(b"hang", b"block"))
@pytest.mark.usefixtures("short_grace")
async def test_a_call_that_hangs_costs_its_process_and_not_the_others(process: CodeProcess, hanging: bytes) -> None:
    pid, begun, other_begun = process.pid, _Begun(), _Begun()
    other = asyncio.create_task(process.call(b"wait", other_begun.answer))
    await other_begun.wait()
    call = asyncio.create_task(process.call(hanging, begun.answer))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(EnvError) as lost:
        await other
    assert (lost.value.code, lost.value.may_pass) == ("process_killed", True)
    assert int(await process.call(b"pid")) != pid
