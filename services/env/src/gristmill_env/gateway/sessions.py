"""One agent's rollout at the gateway: its requests in, the model's replies out, and every turn on disk in between.

A reply is sampled from token ids, written to the session's file, and only then answered. A kill of this process
therefore loses no answered turn: `Session` reads the file again, and the agent's client repeats the request that was
not answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gristmill import SamplingParams
from gristmill.internal.disk import make_folder, sync
from gristmill.internal.lines import LineFile, read_lines
from gristmill_env.errors import (
    EnvError,
    EpisodeError,
    InferenceError,
    PromptError,
    PromptRefusedError,
    PromptTooLongError,
)
from gristmill_env.gateway.dialects import ChatRequest, Reply, RequestError
from gristmill_env.gateway.turns import Branch, Place, Stored, Turn, Turns
from gristmill_env.inference import Completion, GenerationRequest, ModelServers
from gristmill_env.rollouts.prompts import PromptBuilder

logger = logging.getLogger(__name__)

_ENCODER = msgspec.json.Encoder(order="deterministic")
_KEY = "gm-"
_MOST_TOKENS = 4_000_000
"""Tokens of all replies of a rollout and of the messages between them."""
_TAIL = 16
"""Tokens of a prompt that the model server sees when it parses a reply: the first token's text depends on them."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The beginning of a rollout, in its session's file."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The end of a rollout, in its session's file."""

    reward: float | None
    parts: dict[str, float] = {}


@dataclass(frozen=True)
class Policy:
    """The model in training."""

    name: str
    prompts: PromptBuilder
    servers: ModelServers
    max_length: int
    """Most tokens of a conversation."""
    tools: bool | None = None
    """Whether the model servers parse tool calls; None if that is unknown."""
    reasoning: bool = False
    """Whether the model servers separate the reasoning from the answer."""
    stop: tuple[str, ...] = ()
    """The run's texts that end a reply, in addition to those of a request."""
    stop_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The run's further sampling parameters, of `GenerationRequest.more`."""
    untrained: bool = False
    """Whether requests for another distribution are answered, and their replies not trained. Otherwise refused."""

    def request(
        self, prompt: Sequence[int], sampling: SamplingParams, stop: Sequence[str] = (), **fields: Any
    ) -> GenerationRequest:
        """Returns a request for replies for which there is room. `stop`: further texts that end them."""
        room = min(sampling.max_tokens, self.max_length - len(prompt))
        return GenerationRequest(
            token_ids=prompt,
            sampling=msgspec.structs.replace(sampling, max_tokens=room),
            stop=(*self.stop, *stop),
            stop_token_ids=self.stop_token_ids,
            more=self.sampling,
            **fields,
        )

    async def parsed(
        self, completion: Completion, before: Sequence[int], tools: Sequence[Any], *, parallel: bool = True
    ) -> dict[str, Any]:
        """Returns a reply as a message of OpenAI's form. The model server parses tool calls and reasoning.

        `before`: the prompt. `tools`: the tools that the prompt has. `parallel`: whether a reply may have several
        calls. Raises InferenceError when no server answers.
        """
        ids = self.prompts.without_end(completion.token_ids)
        if not ids or not (tools or self.reasoning):
            return {"role": "assistant", "content": self.prompts.decode(ids) if ids else ""}
        request: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}
        request["chat_template_kwargs"] = dict(self.prompts.options)
        if tools:
            request |= {"tools": list(tools), "parallel_tool_calls": parallel}
        message = await self.servers.parse(ids, completion.finish_reason, before[-_TAIL:], request, completion.server)
        return {"role": "assistant", **message}


def _seen(task: asyncio.Task[Turn]) -> None:
    """Keeps asyncio from reporting the error of a reply whose client is gone."""
    if not task.cancelled():
        task.exception()


def _closed() -> RequestError:
    return RequestError(410, "session_closed", "the rollout of this session has ended")


@dataclass(frozen=True)
class Prepared:
    """A request that may be sampled."""

    request: ChatRequest
    place: Place
    given: tuple[int, ...]
    """The prompt's tokens that no earlier turn has."""
    token_ids: list[int]
    """The whole prompt."""
    sampling: SamplingParams


class Session:
    """The conversations of one rollout."""

    def __init__(
        self,
        policy: Policy,
        sampling: SamplingParams,
        *,
        most_turns: int = 500,
        folder: Path | None = None,
        number: int = 0,
        evaluation: bool = False,
    ) -> None:
        """`most_turns`: replies. `folder`: the group's folder, in which the session is kept until its group is
        complete; `number`: of the rollout in the group. If the folder has a session of this number, that session
        continues (`resumed`). Without a folder, the session ends with this process.

        Raises OSError; BlockingIOError if another process has the session open; EnvError for a damaged file.
        """
        self.key = _KEY + secrets.token_urlsafe(24)
        """What the agent sends as its API key, or in the path. Unknown here if the session is resumed."""
        self.digest = digest(self.key)
        """Identifies the key."""
        self.resumed = False
        self.ended: End | None = None
        """Set when the rollout has ended, also if it ended before this process began."""
        self.turns = Turns()
        self.failure: EnvError | None = None
        """The last error of the model servers or of the session's file; None if they have worked since."""
        self._policy = policy
        self._sampling = sampling
        self._most_turns = most_turns
        self._evaluation = evaluation
        self._closed = False
        self._unread: set[int] = set()
        self._answers: dict[bytes, asyncio.Task[Turn]] = {}
        """The newest answer to each request, by its messages, its fields and its idempotency key."""
        self._working: set[asyncio.Task[Turn]] = set()
        self._server: str | None = None
        self._writing = asyncio.Lock()
        self._unwritten: EnvError | None = None
        self._path: Path | None = None
        try:
            self._file = None if folder is None else self._open(folder, number)
        except OSError as error:  # the disk is full, or the process that had the permit still has the file
            text = f"the file of a rollout in {folder} cannot be opened: {error.strerror or error}"
            raise EpisodeError("session_not_opened", text, path=folder) from error

    def branches(self) -> list[Branch]:
        """Returns the sequences to train on. A reply of this process that the agent did not receive is left out."""
        return self.turns.branches(self._unread)

    def prepare(self, request: ChatRequest) -> Prepared:
        """Returns the request's prompt as tokens. Raises RequestError."""
        self._refuse_closed()
        if request.tools and request.calls and self._policy.tools is False:
            raise RequestError(
                400, "no_tool_parser", "the model server parses no tool calls: set MODEL_TOOL_PARSER, or send no tools",
                "tools",
            )  # fmt: skip
        if request.constraint.fields and not self._policy.untrained:
            field = request.constraint.fields[0]
            raise RequestError(
                400, "other_distribution",
                f"'{field}' would make the model sample from another distribution than the one that is trained; leave "
                "it out, or set off_policy: untrained of the agent",
                field,
            )  # fmt: skip
        if request.messages[-1]["role"] == "assistant":
            raise RequestError(400, "ends_with_reply", "the last message must not be the model's", "messages")
        place = self.turns.place(request.messages, request.tools)
        try:
            place, given = self._given(place, request)
        except PromptError as error:
            raise RequestError(400, error.code, str(error), "messages") from error
        ids = [*place.parent.token_ids, *given] if place.parent is not None else list(given)
        if len(ids) >= self._policy.max_length:
            raise RequestError(
                400, "context_length_exceeded",
                f"the conversation has {len(ids)} tokens; with the reply it may have {self._policy.max_length}",
                "messages",
            )  # fmt: skip
        sampling = self._sampling
        if request.max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, request.max_tokens))
        return Prepared(request, place, given, ids, sampling)

    async def reply(
        self, prepared: Prepared, *, idempotency: str | None = None, again: bool = False, choice: int = 0
    ) -> Reply:
        """Returns the model's reply, which is then on disk.

        `idempotency`: equal requests with the same key get the same reply. `again`: whether the client repeats a
        request whose answer it did not receive; the repetition gets the reply to the first. `choice`: number of the
        reply, of several to one request. Raises RequestError.
        """
        asked = prepared.request
        how = (prepared.sampling, asked.stop, asked.constraint, asked.calls, asked.parallel_tool_calls)
        name = hashlib.sha256(prepared.place.key + _ENCODER.encode(how)).digest()
        if idempotency is not None:
            name = hashlib.sha256(name + idempotency.encode()).digest()
        if choice:
            name = hashlib.sha256(name + str(choice).encode()).digest()
        task = self._answers.get(name) if again or idempotency is not None else None
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._refuse_more()
            task = self._answers[name] = asyncio.create_task(self._sample(prepared, name))
            self._working.add(task)
            task.add_done_callback(self._working.discard)
            task.add_done_callback(_seen)
        # A client that is gone often repeats its request, which then finds this reply.
        try:
            turn = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `close`; else the client is gone
                raise _closed() from None
            raise
        self._unread.discard(turn.number)
        prompt = turn.length - len(turn.sampled)
        answer = dict(turn.stored.answer)
        reason = "tool_calls" if answer.get("tool_calls") else turn.stored.finish_reason
        stop_text = None
        if reason == "stop" and prepared.request.stop:
            stop_text = self._first_stop(turn.sampled.tolist(), prepared.request.stop)
        return Reply(
            f"{turn.stored.key.hex()[:16]}{turn.number:08x}", self._policy.name, answer, reason, prompt,
            len(turn.sampled), stop_text, turn.number,
        )  # fmt: skip

    async def begin(self) -> None:
        """Records that a program has the rollout's task. Only then can the session be resumed."""
        await self._write(Begin())

    async def end(self, reward: float | None, parts: Mapping[str, float] | None = None) -> None:
        """Records the end of the rollout. `parts`: the named parts of the reward."""
        ended = End(reward, dict(parts or {}))
        await self._write(ended)
        self.ended = ended

    def forget(self) -> None:
        """Removes the session's file, so that the rollout's next attempt begins anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Ends the session. Replies in work are given up."""
        self._closed = True
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _refuse_more(self) -> None:
        """Raises RequestError if the rollout may have no further reply."""
        self._refuse_closed()
        if len(self.turns) + len(self._working) >= self._most_turns:
            raise RequestError(400, "too_many_turns", f"a rollout may have {self._most_turns} replies")
        if self.turns.tokens >= _MOST_TOKENS:
            raise RequestError(400, "too_many_tokens", f"a rollout may have {_MOST_TOKENS} tokens")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise _closed()

    def _given(self, place: Place, request: ChatRequest) -> tuple[Place, tuple[int, ...]]:
        """Returns the prompt's tokens that no earlier turn has, and the place at which they belong."""
        options: dict[str, Any] = {"tools": list(request.tools)} if request.tools else {}
        if place.parent is None:
            return place, self._policy.prompts.build(request.messages, options).token_ids
        *said, reply = place.parent.messages
        last = place.parent.last_token
        between = self._policy.prompts.continuation_tokens(said, place.more, last, options, reply)
        return place.rendered_again() if between.whole else place, between.token_ids

    async def _sample(self, prepared: Prepared, name: bytes) -> Turn:
        request = prepared.request
        generation = self._policy.request(
            prepared.token_ids,
            prepared.sampling,
            request.stop,
            earlier=self._server,
            constraint=request.constraint.sampling,
        )
        try:
            (completion,) = await self._policy.servers.generate(generation, evaluation=self._evaluation)
            answer = await self._parsed(completion, prepared)
            trained = not request.constraint.fields
            turn = self.turns.add(prepared.place, prepared.given, completion, answer, request=name, trained=trained)
        except PromptTooLongError as error:
            raise RequestError(400, "context_length_exceeded", str(error), "messages") from error
        except PromptRefusedError as error:
            raise RequestError(400, error.code, str(error), "messages") from error
        except EnvError as error:
            self.failure = error
            raise RequestError(503, error.code, str(error)) from error
        self.failure = self._unwritten
        self._server = completion.server
        self._unread.add(turn.number)
        async with self._writing:  # first come, first served: a turn's line has the place of its number
            await self._write(turn.stored)
        return turn

    async def _write(self, entry: Stored | Begin | End) -> None:
        """Appends a line to the session's file, if it has one. Raises RequestError if the disk does not take it.

        A beginning or an end may be written again. After a missing turn the session takes no more replies and no more
        lines, which would continue other turns.
        """
        if self._file is None:
            return
        unwritten = self._unwritten
        if unwritten is None:
            try:
                await asyncio.to_thread(self._file.append, msgspec.json.encode(entry))
                if self.failure is not None and self.failure.code == "session_not_written":
                    self.failure = None
            except OSError as error:
                text = f"a rollout cannot be written to {self._path}: {error.strerror or error}; free some space"
                unwritten = EnvError("session_not_written", text, path=self._path)
                if self.failure is None:  # a program may ask again at once, and often
                    logger.warning("%s", text)
                self.failure = unwritten
                if isinstance(entry, Stored):
                    self._unwritten, self._closed = unwritten, True
        if unwritten is not None:
            raise RequestError(503, unwritten.code, str(unwritten))

    async def _parsed(self, completion: Completion, prepared: Prepared) -> dict[str, Any]:
        """Returns the reply as a message of OpenAI's form."""
        request, prompts = prepared.request, self._policy.prompts
        ids = prompts.without_end(completion.token_ids)
        if calls := request.constraint.calls(prompts.decode(ids)) if ids else []:
            return {"role": "assistant", "content": None, "tool_calls": calls}
        parallel, tools = request.parallel_tool_calls, request.tools if request.calls else ()
        answer = await self._policy.parsed(completion, prepared.token_ids, tools, parallel=parallel)
        for stop in request.stop if answer.get("content") else ():
            answer["content"] = answer["content"].partition(stop)[0]
        return answer

    def _first_stop(self, ids: list[int], stops: Sequence[str]) -> str | None:
        """Returns the stop text that the reply reached first; None if it ended without one."""
        text = self._policy.prompts.decode(self._policy.prompts.without_end(ids))
        return min((stop for stop in stops if stop in text), key=text.index, default=None)

    def _open(self, folder: Path, number: int) -> LineFile:
        make_folder(folder)
        existing = next(folder.glob(f"{number}-*.jsonl"), None)
        if existing is not None and existing.stat().st_size == 0:  # no program got its task
            existing.unlink()
            existing = None
        path = existing or folder / f"{number}-{self.digest}.jsonl"
        file = LineFile(path, exclusive=True)
        self._path = path
        if existing is None:
            sync(folder)
            return file
        self.resumed, self.digest = True, existing.stem.partition("-")[2]
        with path.open("rb") as stream:
            for place, line in read_lines(stream):
                try:
                    self._restore(line)
                except (ValueError, IndexError) as error:
                    file.close()
                    raise InferenceError(
                        "session_damaged",
                        f"line {place} of {path} cannot be read ({error}); remove the file",
                        path=path,
                    ) from error
        return file

    def _restore(self, line: bytes) -> None:
        stored = msgspec.json.decode(line, type=Stored | Begin | End)
        if isinstance(stored, End):
            self.ended = stored
        elif isinstance(stored, Stored):
            turn = self.turns.restore(stored)
            self._answers[stored.request] = _done(turn)


class Sessions:
    """The open sessions, by the digests of their keys."""

    def __init__(self, most: int = 4096, folder: Path | None = None) -> None:
        """`folder`: of the run's sessions, in which the sessions of a killed process wait until they are resumed."""
        self._open: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=most)
        """The newest sessions that were removed after their rollouts had ended."""
        self._removed: deque[str] = deque(maxlen=most)
        """The newest sessions that were removed before: they are over, except those that the next process resumes."""
        self._most, self._folder = most, folder

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session) -> None:
        """Opens the session for requests. Raises EnvError if too many are open."""
        if len(self._open) >= self._most:
            raise EnvError(
                "too_many_sessions", f"{self._most} rollouts are open; lower max_num_workers", most=self._most
            )
        self._open[session.digest] = session

    def find(self, keys: Callable[[], list[str]]) -> Session:
        """Returns the session of the first key that has one. Raises RequestError."""
        digests = [digest(key) for key in keys() if key]
        for one in digests:
            if (session := self._open.get(one)) is not None:
                return session
        for one in digests:
            if one in self._ended:
                raise _closed()
            self.refuse_unresumed(one)
            if one in self._removed:
                raise _closed()
        raise RequestError(
            401, "unknown_session",
            "no open rollout has this key: send the session's key as the API key, or its base URL as it was given",
        )  # fmt: skip

    def refuse_unresumed(self, key: str) -> None:
        """Raises RequestError if the session waits for this process to resume it. `key`: the digest of its key."""
        if key not in self._open and self._folder is not None and any(self._folder.rglob(f"*-{key}.jsonl")):
            raise RequestError(503, "session_not_open", "the rollout goes on in a moment; ask again")

    def remove(self, session: Session) -> None:
        """Requests with the session's key are refused from now on."""
        self._open.pop(session.digest, None)
        (self._removed if session.ended is None else self._ended).append(session.digest)


def digest(key: str) -> str:
    """Returns what identifies a key in file names and in memory."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _done(turn: Turn) -> asyncio.Task[Turn]:
    async def answered() -> Turn:
        return turn

    return asyncio.get_running_loop().create_task(answered())
