"""The rewards `judge` and `judge_group`: a language model reads completions and grades them.

A judge that cannot be asked, or whose reply cannot be read, is an error and never a 0. The judge's model must not
change while the run trains, so a judge on the run's own model server is refused (`refuse_own_judges`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from pydantic import Field, SecretStr

from gristmill.internal.redaction import redact_text
from gristmill_env.errors import RewardError
from gristmill_env.rewards.outcomes import RewardResult, short
from gristmill_env.rewards.registry import reward
from gristmill_env.rewards.remote import RewardServer
from gristmill_env.rewards.reward import FunctionReward, Reward
from gristmill_env.settings.servers import Url

logger = logging.getLogger(__name__)

_QUESTION: Final = """Grade the answer to a task.

Task:
{prompt}

Answer:
{completion}
"""
_GROUP: Final = """Compare answers to the same task.

Task:
{prompt}
"""
_NUMBER: Final = r"(-?[0-9]+(?:\.[0-9]+)?)"
_REST: Final = r"(?:\s*(?:/|out of)\s*([0-9]+))?(?:\s+[-\u2013\u2014(]\s*[^\W\d].*|[^\w\n]*)$"
"""The rest of a line after a grade: the best grade, as in 7/10, and a reason, as in 7 - right."""
_SCORE: Final = re.compile(rf"^[^\w\n]*(?:\w+ )?score\W*?{_NUMBER}{_REST}", re.IGNORECASE | re.MULTILINE)
_VERDICT: Final = re.compile(r"^[^\w\n]*([0-9]+)\W+(yes|no)\b.*$", re.IGNORECASE | re.MULTILINE)
_GRADE: Final = re.compile(rf"^[^\w\n]*(A[0-9]+)\W+?{_NUMBER}{_REST}", re.MULTILINE)
_T = TypeVar("_T")
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Judge:
    """A judge's model: requests with limits, kept replies, and their cost."""

    def __init__(
        self,
        base_url: str,
        model_name: str,
        api_key: SecretStr | None,
        max_tokens: int,
        at_once: int,
        per_minute: float | None,
        cache: str | None,
        prices: tuple[float, float] | None,
    ) -> None:
        self._server = RewardServer(base_url, api_key, "judge", timeout=300.0, before_request=self._wait_for_turn)
        self._model, self._max_tokens, self._prices = model_name, max_tokens, prices
        self._free = asyncio.Semaphore(at_once)
        self._pause = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        # Runs outlive a container, whose other folders do not.
        self._kept = None if cache is None else _Kept(Path(os.environ.get("GRISTMILL_RUNS_DIR") or "runs") / cache)

    async def ask(self, text: str, read: Callable[[str], _T]) -> tuple[_T, dict[str, float]]:
        """Returns what `read` finds in the reply, and the parts of the score: seconds and tokens, and the cost if
        `prices` are set. A reply that `read` refuses is not kept, so that a later run asks again.

        Raises RewardError.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }
        key = hashlib.sha256(json.dumps([self._server.base_url, body]).encode()).hexdigest()
        if self._kept is not None and (reply := await asyncio.to_thread(self._kept.get, key)) is not None:
            return read(reply), self._parts(0.0, _Usage())
        async with self._free:
            began = time.monotonic()
            answer = await self._server.post("chat/completions", body)
            seconds = time.monotonic() - began
        try:
            decoded = msgspec.json.decode(answer, type=_Reply)
            reply = decoded.choices[0].message.content or ""
        except (ValueError, IndexError) as error:
            url = redact_text(self._server.base_url)
            raise RewardError(
                "judge_invalid",
                f"the judge at {url} does not answer as OpenAI's chat endpoint does ({error}): "
                f"{short(answer[:200].decode(errors='replace'))}; is base_url the address of a server with "
                "/v1/chat/completions?",
                url=url,
            ) from error
        verdict = read(reply)
        if self._kept is not None:
            await asyncio.to_thread(self._kept.put, key, reply)
        return verdict, self._parts(seconds, decoded.usage or _Usage())

    async def _wait_for_turn(self) -> None:
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._pause
        await asyncio.sleep(turn - now)

    def _parts(self, seconds: float, usage: _Usage) -> dict[str, float]:
        parts = {"seconds": seconds, "tokens": float(usage.prompt_tokens + usage.completion_tokens)}
        if self._prices is not None:
            given, written = self._prices
            parts["cost"] = (usage.prompt_tokens * given + usage.completion_tokens * written) / 1e6
        return parts


class _Kept:
    """The replies of a judge in a file, which several processes may use. A reply that was kept is not asked for
    again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def get(self, key: str) -> str | None:
        with closing(self._connected()) as table:
            row = table.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Keeps a reply. If the disk is full, the reply counts all the same, and is asked for again."""
        try:
            with closing(self._connected()) as table, table:
                table.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except (sqlite3.Error, RewardError) as error:
            if not self._failed:
                logger.warning("the judge's cache %s cannot be written: %s", self._path, error)
            self._failed = True

    def _connected(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            table = sqlite3.connect(self._path, timeout=60)
            table.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)")
        except (OSError, sqlite3.Error) as error:
            raise RewardError(
                "judge_cache_unusable",
                f"the judge's cache {self._path} cannot be used: {error}; name another file in `cache`, or remove it",
                path=self._path,
            ) from error
        return table


_ServerName = Annotated[str, Field(min_length=1)]
_AtOnce = Annotated[int, Field(gt=0)]
_Tokens = Annotated[int, Field(gt=0)]
_PerMinute = Annotated[float, Field(gt=0)] | None


@reward("judge")
class Judge:
    """The grade that another model gives a completion, from 0 to 1.

    `template` is the question. Its placeholders are `{prompt}`, `{completion}`, `{answer}` and the columns of the
    row. The judge writes a number of `scale`, whose ends become 0 and 1; or with `rubric`, a list of criteria,
    whether the answer meets each, and the score is the share that it meets.

    Options: `base_url`, `model_name` and `api_key` of a server with OpenAI's chat endpoint. `at_once` and
    `per_minute` bound the requests of this reward, repeated ones too, `max_tokens` its reply. `cache` names a file
    below the folder of runs (GRISTMILL_RUNS_DIR, by default runs/), which keeps replies. `prices`, in dollars for a
    million tokens of prompt and reply, give the part `cost`, next to `seconds` and `tokens`. `frozen` says that a
    model on the run's own server is not the one that the run trains.
    """

    def __init__(
        self,
        *,
        base_url: Url,
        model_name: _ServerName,
        api_key: SecretStr | None = None,
        template: str = _QUESTION,
        scale: tuple[float, float] = (1.0, 10.0),
        rubric: list[str] | None = None,
        max_tokens: _Tokens = 1024,
        at_once: _AtOnce = 8,
        per_minute: _PerMinute = None,
        cache: str | None = None,
        prices: tuple[float, float] | None = None,
        frozen: bool = False,
    ) -> None:
        """Raises RewardError for a scale that does not rise, and an empty rubric."""
        if scale[0] >= scale[1] or rubric == []:
            raise RewardError(
                "judge_scale", "a judge's scale rises from its first number to its second; a rubric is not empty"
            )
        self.base_url, self.frozen = base_url, frozen
        self._judge = _Judge(base_url, model_name, api_key, max_tokens, at_once, per_minute, cache, prices)
        self._template, self._scale, self._rubric = template, scale, rubric

    async def __call__(self, completion: str, prompt: str, row: Mapping[str, Any], answer: str = "") -> RewardResult:
        """Grades one completion. Raises RewardError."""
        question = filled(self._template, {**row, "prompt": prompt, "completion": completion, "answer": answer})
        if self._rubric is None:
            low, high = self._scale
            task = f"Give a score from {low:g} to {high:g}. End with a line of this form:\nScore: {high:g}"
        else:
            criteria = "\n".join(f"{number}. {text}" for number, text in enumerate(self._rubric, 1))
            task = (
                f"Decide for each criterion whether the answer meets it:\n{criteria}\n"
                "Write a line of this form for each criterion, and nothing after these lines:\n1: yes"
            )
        return RewardResult(*await self._judge.ask(f"{question}\n{task}", self._value))

    def _value(self, reply: str) -> float:
        if self._rubric is not None:
            verdicts = {int(number): word.lower() == "yes" for number, word in _VERDICT.findall(reply)}
            if sorted(verdicts) != [*range(1, len(self._rubric) + 1)]:
                raise _unreadable(reply, f"a verdict for each of {len(self._rubric)} criteria")
            return float(sum(verdicts.values()) / len(verdicts))
        low, high = self._scale
        scores = _SCORE.findall(reply)
        number, best = scores[-1] if scores else ("nan", "")
        if not low <= float(number) <= high or (best and float(best) != high):
            raise _unreadable(reply, f"a score from {low:g} to {high:g}")
        return (float(number) - low) / (high - low)


@reward("judge_group")
class JudgeGroup:
    """The grades that another model gives all completions of a group at once, from 0 to 1, relative to one another.

    One request shows the judge all completions, each with an id. The judge grades each from 0 to 10. A reply that does
    not have each id exactly once is an error. The idea is RULER's (OpenPipe, 2025): to compare is easier than to
    grade alone, and the advantages of a group need only its order. Options as for `judge`.
    """

    def __init__(
        self,
        *,
        base_url: Url,
        model_name: _ServerName,
        api_key: SecretStr | None = None,
        template: str = _GROUP,
        max_tokens: _Tokens = 2048,
        at_once: _AtOnce = 8,
        per_minute: _PerMinute = None,
        cache: str | None = None,
        prices: tuple[float, float] | None = None,
        frozen: bool = False,
    ) -> None:
        self.base_url, self.frozen = base_url, frozen
        self._judge = _Judge(base_url, model_name, api_key, max_tokens, at_once, per_minute, cache, prices)
        self._template = template

    async def __call__(
        self, completions: list[str], prompt: str, row: Mapping[str, Any], answer: str = ""
    ) -> list[RewardResult]:
        """Grades a group. Raises RewardError."""
        question = filled(self._template, {**row, "prompt": prompt, "answer": answer})
        names = [f"A{number}" for number in range(1, len(completions) + 1)]
        # No answer can end itself and begin another one: it does not know the others, of which the mark is made.
        mark = hashlib.sha256(json.dumps(completions).encode()).hexdigest()[:8]
        tags = (f"{name}-{mark}" for name in names)
        tagged = "\n\n".join(f"<{tag}>\n{text}\n</{tag}>" for tag, text in zip(tags, completions, strict=True))
        task = (
            "Grade each answer from 0 to 10, relative to the others. Write a line of this form for each answer, and "
            "nothing after these lines:\nA1: 7"
        )
        values, parts = await self._judge.ask(f"{question}\n{tagged}\n\n{task}", lambda reply: _grades(reply, names))
        shares = {name: part / len(names) for name, part in parts.items()}
        return [RewardResult(values[name] / 10, shares) for name in names]


def _grades(reply: str, names: Collection[str]) -> dict[str, float]:
    grades = _GRADE.findall(reply)
    values = {name: float(grade) for name, grade, best in grades if best in ("", "10")}
    if len(grades) != len(names) or set(values) != set(names) or not all(0 <= one <= 10 for one in values.values()):
        raise _unreadable(reply, f"a grade from 0 to 10 for each of {', '.join(names)}")
    return values


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Returns the template with its placeholders replaced, all at once: braces in a value stay.

    Raises RewardError for a placeholder without a value.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise RewardError(
                "judge_placeholder",
                f"the judge's template has {{{match[1]}}}; there are {', '.join(map(str, values))}",
                placeholder=match[1],
                known=list(map(str, values)),
            )
        return str(values[match[1]])

    return _PLACEHOLDER.sub(value, template)


def refuse_own_judges(rewards: Iterable[Reward], servers: Iterable[str]) -> None:
    """Raises RewardError if a judge is on one of the run's model `servers`, and its model is not said to be frozen.

    The run trains the model of these servers. Such a judge would change with the policy.
    """
    own = {_place(url.removeprefix("dns+")) for url in servers}
    for made in rewards:
        for name, leaf in made.leaves().items():
            judge = leaf.function if isinstance(leaf, FunctionReward) else None
            if isinstance(judge, Judge | JudgeGroup) and not judge.frozen and _place(judge.base_url) in own:
                raise RewardError(
                    "judge_not_frozen",
                    f"reward '{name}': the judge at {judge.base_url} is the model server of this run, whose weights "
                    "change with every step; name another server, or set frozen: true for a model of this server that "
                    "is not trained",
                    reward=name,
                    url=judge.base_url,
                )


def _place(url: str) -> tuple[str, int]:
    """Returns host and port of a URL, equal for the names of this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "127.0.0.1" if host in ("localhost", "::1") else host, parts.port or (443 if parts.scheme == "https" else 80)


def _unreadable(reply: str, expected: str) -> RewardError:
    return RewardError("judge_unreadable", f"the judge's reply lacks {expected}: {short(reply[-200:])}")
