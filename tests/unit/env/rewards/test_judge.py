"""judge and judge_group: the requests, how replies are read, limits, the cache, and errors that are never a 0."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.errors import raises
from tests.support.http_server import Answer, HttpServer, Request
from tests.support.scoring import scored
from tests.support.small_disk import mounted

from gristmill.internal.backoff import Backoff
from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward, judge, remote
from gristmill_env.rewards.judge import filled, refuse_own_judges
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import load_tasks

pytestmark = pytest.mark.slow


class JudgeServer(HttpServer):
    """Answers POST /v1/chat/completions with `reply(question)`."""

    def __init__(self) -> None:
        self.reply: Callable[[str], str] = lambda question: "Score: 10"
        self.asked: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        """Statuses to answer with, one per request, until they are used up."""
        self.raw: bytes | None = None
        """The body of all answers, in place of OpenAI's."""
        self.gate = threading.Semaphore(1000)
        """Each answer takes one."""
        self.working = self.most_working = 0
        self._lock = threading.Lock()
        super().__init__(self._answer)
        self.url += "/v1"

    def _answer(self, request: Request) -> Answer:
        with self._lock:
            self.asked.append({"path": request.path, "key": request.headers["Authorization"], **request.json})
            self.working += 1
            self.most_working = max(self.most_working, self.working)
        self.gate.acquire()
        text = self.reply(request.json["messages"][0]["content"])
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        whole = {"choices": [{"message": {"content": text}}], "usage": usage}
        with self._lock:
            self.working -= 1
        return Answer(self.statuses.pop(0) if self.statuses else 200, whole if self.raw is None else self.raw)

    @property
    def questions(self) -> list[str]:
        return [asked["messages"][0]["content"] for asked in self.asked]


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    yield server
    server.close()


def params(server: JudgeServer, **more: Any) -> dict[str, Any]:
    return {"base_url": server.url, "model_name": "grader", **more}


def score(server: JudgeServer, completion: str = "42", **more: Any) -> float | None:
    return scored("judge", params(server, **more), completion, prompt="What is 6 x 7?", answer="42")


@pytest.mark.parametrize(
    ("reply", "more", "value"),
    [
        ("It is right.\nScore: 10", {}, 1.0),
        ("Score: 1", {}, 0.0),
        ("score 5.5", {}, 0.5),
        ("**Score:** 10", {}, 1.0),
        ("- Score: **10**.", {}, 1.0),
        ("Score: 10/10", {}, 1.0),
        ("**Final score:** 10 out of 10", {}, 1.0),
        ("Overall Score: 1 - it is wrong", {}, 0.0),
        ("Score: 4/4 (all points)", {"scale": [0, 4]}, 1.0),
        ("Score: 2\nNo, that was too strict.\nScore: 10", {}, 1.0),
        ("Score: 0", {"scale": [-1, 1]}, 0.5),
        ("Score: -1", {"scale": [-1, 1]}, 0.0),
        ("1: yes\n2: no", {"rubric": ["right", "short"]}, 0.5),
        ("1. **Yes**, it is.\n2) YES", {"rubric": ["right", "short"]}, 1.0),
        ("Reasons first.\n1: no", {"rubric": ["right"]}, 0.0),
    ],
)
def test_the_judges_grade_becomes_a_score_from_0_to_1(
    server: JudgeServer, reply: str, more: dict[str, Any], value: float
) -> None:
    server.reply = lambda question: reply
    assert score(server, **more) == pytest.approx(value)


@pytest.mark.parametrize(
    ("reply", "more"),
    [
        ("", {}),
        ("It is good.", {}),
        ("Score: 11", {}),
        ("Score: 4/5", {}),
        ("Score: 4 - 5", {}),
        ("Score: -3", {}),
        ("The score of the game was 3 to 2.", {}),
        ("1: yes", {"rubric": ["right", "short"]}),
        ("1: yes\n3: yes", {"rubric": ["right", "short"]}),
        ("1: maybe\n2: no", {"rubric": ["right", "short"]}),
    ],
)
def test_a_reply_without_a_grade_is_an_error(server: JudgeServer, reply: str, more: dict[str, Any]) -> None:
    server.reply = lambda question: reply
    with raises(RewardError, "judge_unreadable"):
        score(server, **more)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("pattern", "graded"),
    [(judge._SCORE, "- Score: 7/10 **"), (judge._GRADE, "* A1: 7 - right"), (judge._VERDICT, "> 1: yes")],
    ids=["score", "group", "rubric"],
)
def test_grade_is_found_between_any_number_of_blank_lines(pattern: re.Pattern[str], graded: str) -> None:
    found = pattern.findall(graded)
    assert len(found) == 1
    for blank in ("\n", "\r\n", " \n", "*\n"):
        assert pattern.findall(f"{blank * 50_000}{graded}\nAs asked.\n{blank * 50_000}") == found


@pytest.mark.parametrize(
    "raw",
    [
        b"<html>\xff Welcome", b'{"choices": []}', b'{"choices": 1}',
        b'{"choices": [{"message": {"content": "\xff"}}]}',
    ],
)  # fmt: skip
def test_a_server_of_another_kind_is_an_error_with_its_address_and_answer(server: JudgeServer, raw: bytes) -> None:
    server.raw = raw
    with raises(RewardError, "judge_invalid", url=server.url) as raised:
        score(server)
    assert server.url in str(raised.value)
    assert repr(raw.decode(errors="replace")) in str(raised.value)


def test_the_request_has_the_filled_template(server: JudgeServer) -> None:
    score(server, "{answer} is \ud800", template="{prompt}|{completion}|{answer}", api_key="sk-1", max_tokens=9)
    [asked] = server.asked
    assert asked["path"] == "/v1/chat/completions"
    assert asked["key"] == "Bearer sk-1"
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("grader", 0, 9)
    assert server.questions[0].startswith("What is 6 x 7?|{answer} is \ud800|42\n")


def test_placeholders_are_filled_at_once_and_unknown_ones_are_errors() -> None:
    assert filled("{a} {b} { } {}", {"a": "{b}", "b": 2}) == "{b} 2 { } {}"
    with raises(RewardError, "judge_placeholder", placeholder="c"):
        filled("{c}", {"a": 1})


def test_parts_are_time_tokens_and_cost(server: JudgeServer) -> None:
    made = create_reward("judge", params(server, prices=[3.0, 15.0]))

    async def parts() -> dict[str, float | None]:
        async with Scorer([WeightedReward(made, 1.0)], has_answer=True) as scorer:
            [result] = await scorer.score([Sample("42", answer="42", prompt="p")])
            return dict(result.parts)

    found = asyncio.run(parts())
    assert found["judge/tokens"] == 110
    assert found["judge/cost"] == pytest.approx((100 * 3 + 10 * 15) / 1e6)
    assert found["judge/seconds"] is not None
    assert found["judge/seconds"] > 0


async def test_requests_are_limited(server: JudgeServer) -> None:
    server.gate = threading.Semaphore(0)
    made = create_reward("judge", params(server, at_once=3))
    async with Scorer([WeightedReward(made, 1.0)], has_answer=True) as scorer:
        samples = [Sample(str(number), answer="", prompt="p") for number in range(8)]
        scoring = asyncio.create_task(scorer.score(samples))
        while len(server.asked) < 3:  # noqa: ASYNC110  the server is in a thread
            await asyncio.sleep(0.01)
        server.gate.release(8)
        await scoring
    assert len(server.asked) == 8
    assert server.most_working == 3


async def test_requests_of_a_minute_are_limited_and_repeated_ones_count(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next", lambda self: 0.0)
    server.statuses = [429]
    grader = judge.Judge(base_url=server.url, model_name="grader", per_minute=300)
    began = time.monotonic()
    for completion in ("first", "second"):
        await grader(completion, "p", {})
    assert len(server.asked) == 3
    assert time.monotonic() - began >= 2 * 60 / 300


def test_a_cache_is_below_the_folder_of_runs(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_RUNS_DIR", str(tmp_path / "runs"))
    score(server, cache="judges/of-math.sqlite")
    assert (tmp_path / "runs" / "judges" / "of-math.sqlite").is_file()


def test_replies_are_kept_in_a_file(server: JudgeServer, tmp_path: Path) -> None:
    cache = str(tmp_path / "new" / "judge.sqlite")
    assert score(server, cache=cache) == score(server, cache=cache) == 1.0
    assert len(server.asked) == 1
    score(server, "43", cache=cache)
    score(server, cache=cache, model_name="other")
    score(server, cache=cache, max_tokens=5)
    assert len(server.asked) == 4, "another completion, model or limit is another question"
    server.reply = lambda question: "no grade"
    for asked in (5, 6):
        with raises(RewardError, "judge_unreadable"):
            score(server, "44", cache=cache)
        assert len(server.asked) == asked, "a reply without a grade is not kept"
    (tmp_path / "broken").write_text("no table, but text that is long enough to be read as one" * 20)
    with raises(RewardError, "judge_cache_unusable", path=tmp_path / "broken"):
        score(server, cache=str(tmp_path / "broken"))


def test_a_reply_counts_if_the_disk_of_the_cache_is_full(server: JudgeServer, tmp_path: Path) -> None:
    with mounted(tmp_path, 1):
        cache = str(tmp_path / "judge.sqlite")
        score(server, cache=cache)
        with contextlib.suppress(OSError), (tmp_path / "rest").open("wb", buffering=0) as rest:
            while rest.write(bytes(4096)):
                pass
        server.reply = lambda question: f"{'because ' * 2000}\nScore: 10"
        assert score(server, "43", cache=cache) == 1.0
        assert score(server, "43", cache=cache) == 1.0
    assert len(server.asked) == 3, "it was not kept"


async def test_a_judge_that_is_away_is_waited_for(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CALLS", 2)
    server.statuses = [503, 429, 500]
    made = create_reward("judge", params(server))
    async with Scorer([WeightedReward(made, 1.0)], has_answer=True, patience=60) as scorer:
        [result] = await scorer.score([Sample("42", answer="42", prompt="p")])
    assert result.total == 1.0
    assert len(server.asked) == 4


async def test_an_answer_that_never_ends_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CALLS", 1)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with raises(RewardError, "reward_server_unreachable") as raised:
            await remote.RewardServer(f"http://127.0.0.1:{port}", timeout=0.3).post("chat/completions", {})
    assert raised.value.may_pass


async def test_a_refusal_leaves_the_completion_without_a_score(server: JudgeServer) -> None:
    server.statuses = [400]
    made = create_reward("judge", params(server))
    async with Scorer([WeightedReward(made, 1.0)], has_answer=True, patience=60) as scorer:
        [result] = await scorer.score([Sample("42", answer="42", prompt="p")])
    assert result.total is None
    assert result.failed["judge"].code == "reward_server_refused"


@pytest.mark.parametrize(
    ("more", "error"),
    [({"scale": [5, 5]}, "judge_scale"), ({"rubric": []}, "judge_scale"), ({"at_once": 0}, "parameter_invalid")],
)
def test_wrong_params_are_refused(server: JudgeServer, more: dict[str, Any], error: str) -> None:
    with raises(RewardError, error):
        create_reward("judge", params(server, **more))


# --- All completions of a group at once -------------------------------------------------------------------------------


async def grades(server: JudgeServer, *completions: str) -> list[Any]:
    made = create_reward("judge_group", params(server))
    async with Scorer([WeightedReward(made, 1.0)], has_answer=True) as scorer:
        return list(await scorer.score([Sample(text, answer="", prompt="The task") for text in completions]))


async def test_a_group_is_one_request_and_grades_belong_to_their_answers(server: JudgeServer) -> None:
    server.reply = lambda question: "A2 is best.\nA3: 0/10\nA1: 2.5 - fair\n**A2**: 10"
    found = await grades(server, "first", "second", "third")
    assert [result.total for result in found] == [0.25, 1.0, 0.0]
    assert [result.parts["judge_group/tokens"] for result in found] == pytest.approx([110 / 3] * 3)
    assert "The task" in server.questions[0]
    assert re.search(r"<(A2-\w{8})>\nsecond\n</\1>", server.questions[0])
    assert len(server.asked) == 1


async def test_an_answer_cannot_know_the_tags_of_its_group(server: JudgeServer) -> None:
    server.reply = lambda question: "A1: 5\nA2: 5"
    for other in ("second", "another", "second"):
        await grades(server, "first", other)
    first, another, again = (re.findall(r"</(A1-\w+)>", question) for question in server.questions)
    assert first == again != another


@pytest.mark.parametrize(
    "reply", ["A1: 5", "A1: 5\nA2: 5\nA3: 5", "A1: 5\nA1: 6\nA2: 5", "A1: 5\nA2: 11", "A1: 5\nA2: 5/20", "A1: 5\nB: 5"]
)
async def test_a_reply_without_each_id_once_is_an_error(server: JudgeServer, reply: str) -> None:
    server.reply = lambda question: reply
    found = await grades(server, "first", "second")
    assert [result.total for result in found] == [None, None]
    assert {result.failed["judge_group"].code for result in found} == {"judge_unreadable"}


# --- The policy as its own judge --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["judge", "judge_group"])
def test_a_judge_on_the_runs_own_server_is_refused_unless_it_is_frozen(server: JudgeServer, name: str) -> None:
    own = [server.url.removesuffix("/v1").replace("127.0.0.1", "LocalHost"), "http://127.0.0.1:1"]
    made = create_reward(name, params(server))
    with raises(RewardError, "judge_not_frozen", reward=name, url=server.url):
        refuse_own_judges([made], own)
    inside = create_reward("combined", {"rewards": [{"type": name, "params": params(server)}, "length"]})
    with raises(RewardError, "judge_not_frozen"):
        refuse_own_judges([inside], own)
    refuse_own_judges([made], ["http://127.0.0.1:1"])
    refuse_own_judges([create_reward(name, params(server, frozen=True)), create_reward("length", {})], own)


def test_a_run_with_a_judge_on_its_own_server_does_not_start(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    config = tmp_path / "run.yaml"
    judged = {"type": "judge", "params": params(server)}
    dataset = {"dataset_path": str(tmp_path / "rows.jsonl"), "prompt_field": "question", "reward_functions": [judged]}
    config.write_text(yaml.safe_dump({"dataset": dataset, "server_configs": [{"base_url": server.url}]}))
    with raises(RewardError, "judge_not_frozen", reward="judge"):
        load_tasks(RunSettings.read(["--config", str(config)], {}, "test"))
