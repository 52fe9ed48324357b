"""The turns of one agent's rollout as the tokens that were sent and sampled, in a forest.

A program that calls a chat endpoint sends the whole conversation with each request, as messages. `Turns` finds the
turn that a request continues: the deepest stored turn whose conversation the request's messages begin with. The next
prompt is then the stored tokens of that turn and the tokens of the new messages, so that nothing that was sampled is
tokenized again. A request that continues no stored turn begins another root. So does one whose chat template cannot
continue a reply with tool calls token by token.

Retries, sub-agents, parallel calls and shortened histories need no further rules: they are branches or roots.
`branches` returns each path from a root to a leaf as one sequence. A sampled turn is trained in the first path that
contains it, and is context in the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill_env.data import Message
from gristmill_env.errors import EpisodeError
from gristmill_env.gateway.dialects import RequestError, template_message
from gristmill_env.inference import Completion, LabelSpan

_ENCODER = msgspec.json.Encoder(order="deterministic")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
"""The keys of a message that decide whether two messages are the same. Clients add others, such as `refusal: null`,
and few send a reply's reasoning back."""


class Stored(msgspec.Struct, frozen=True, eq=False, tag="turn"):
    """A turn as it is in a file. Arrays are bytes, least significant byte first."""

    parent: int | None
    """Number of the turn before."""
    given: bytes
    sampled: bytes
    logprobs: bytes
    labels: list[LabelSpan]
    """The server's weight labels by position in `sampled`."""
    finish_reason: str
    more: list[dict[str, Any]]
    """The messages of the request that no earlier turn has."""
    answer: dict[str, Any]
    """The model's message in OpenAI's form, as the agent received it."""
    request: bytes
    """Identifies the request among repetitions: its messages, its other fields and its idempotency key."""
    key: bytes
    """Identifies the conversation up to and including the reply, with the tools."""
    trained: bool = True
    """Whether the reply was sampled from the distribution that is trained."""
    tools: list[dict[str, Any]] = []
    """Of a root: the request's tools. A conversation keeps its tools, because a request with others begins a root."""
    rendered: bool = False
    """Of a root: whether the request continues an earlier turn, whose conversation was rendered again."""


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """One reply of the model. P: tokens of the prompt that no earlier turn has. R: tokens of the reply."""

    number: int
    """Its place in the order of the replies."""
    parent: Turn | None
    stored: Stored
    given: NDArray[np.int32]
    """[P]: the whole prompt of a root; else the tokens between the parent's reply and this reply."""
    sampled: NDArray[np.int32]
    """[R]"""
    logprobs: NDArray[np.float32]
    """[R]: under the distribution from which a token was drawn."""
    length: int
    """Number of tokens up to the end of this reply."""

    @property
    def last_token(self) -> int | None:
        return int(self.sampled[-1]) if len(self.sampled) else None

    @property
    def reply(self) -> Message:
        """The model's message in the form of chat templates."""
        return template_message(self.stored.answer)

    def path(self) -> list[Turn]:
        """Returns the turns from the root to this turn."""
        path: list[Turn] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of this reply."""
        parts = [part for turn in self.path() for part in (turn.given, turn.sampled)]
        ids: list[int] = np.concatenate(parts).tolist()
        return ids

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation up to and including this reply."""
        return tuple(message for turn in self.path() for message in (*turn.stored.more, turn.reply))


@dataclass(frozen=True)
class Place:
    """Where a request's messages belong."""

    parent: Turn | None
    """The turn that the request continues; None if it begins a conversation."""
    more: tuple[Message, ...]
    """The messages after the parent's reply, or all messages."""
    key: bytes
    """Identifies the request's messages and tools."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The request's tools."""
    rendered: bool = False
    """Whether the request continues a turn, but begins another root: the template could not continue the tokens."""

    def rendered_again(self) -> Place:
        """Returns the place of a request whose whole conversation is rendered again."""
        assert self.parent is not None
        return Place(None, (*self.parent.messages, *self.more), self.key, self.tools, rendered=True)


@dataclass(frozen=True)
class Branch:
    """A path from a root to a leaf, as one sequence. P: prompt of the root. C: tokens after it."""

    prompt: NDArray[np.int32]
    """[P]"""
    token_ids: NDArray[np.int32]
    """[C]"""
    logprobs: NDArray[np.float32]
    """[C]: 0 where the mask is False."""
    mask: NDArray[np.bool_]
    """[C]: True for tokens that are trained on in this branch."""
    labels: list[LabelSpan]
    """The weight labels of the replies that no earlier branch has, by position in `token_ids`."""
    turns: list[Turn]
    sampled: int
    """Tokens of the replies that no earlier branch has, trained on or not."""


class Turns:
    """The turns of one rollout."""

    def __init__(self) -> None:
        self.tokens = 0
        """Number of stored tokens."""
        self._turns: list[Turn] = []
        self._by_key: dict[bytes, list[Turn]] = {}
        """The turns of each conversation: a retry may draw the same text."""

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    def __getitem__(self, number: int) -> Turn:
        return self._turns[number]

    def place(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Place:
        """Returns the place of a request. `tools`: the request's tools, which are part of the prompt."""
        key = _digest(b"", list(tools or ()))
        parent: Turn | None = None
        after = 0
        for number, message in enumerate(messages, 1):
            key = _digest(key, _identity(message))
            if message["role"] == "assistant" and (found := self._by_key.get(key)):
                # Of equal replies, the agent has the one with its reasoning, or else the newest.
                thought, before = message.get("reasoning_content"), parent
                parent = max(
                    found,
                    key=lambda turn: (
                        bool(thought) and turn.reply.get("reasoning_content") == thought,
                        turn.parent is before,
                        turn.number,
                    ),
                )
                after = number
        return Place(parent, tuple(messages[after:]), key, tuple(tools or ()))

    def add(
        self,
        place: Place,
        given: Sequence[int],
        completion: Completion,
        answer: Mapping[str, Any],
        *,
        request: bytes = b"",
        trained: bool = True,
    ) -> Turn:
        """Stores a reply. `given`: the prompt's tokens that the parent does not have. The rest: as in `Stored`.

        Raises EpisodeError for a reply that cannot be compared with the messages of a request.
        """
        try:
            identity = _identity(template_message(answer))
        except (RequestError, RecursionError) as error:
            raise EpisodeError(
                "reply_not_parsed", f"the model server parsed a reply into a message that cannot be continued: {error}"
            ) from error
        return self.restore(
            Stored(
                parent=None if place.parent is None else place.parent.number,
                given=np.array(given, "<i4").tobytes(),
                sampled=np.array(completion.token_ids, "<i4").tobytes(),
                logprobs=np.array(completion.logprobs, "<f4").tobytes(),
                labels=list(completion.labels),
                finish_reason=completion.finish_reason,
                more=[dict(message) for message in place.more],
                answer=dict(answer),
                request=request,
                key=_digest(place.key, identity),
                trained=trained,
                tools=[dict(tool) for tool in place.tools] if place.parent is None else [],
                rendered=place.rendered,
            )
        )

    def restore(self, stored: Stored) -> Turn:
        """Adds a turn of a file, after the turns before it. Raises IndexError for a turn without its parent."""
        parent = None if stored.parent is None else self._turns[stored.parent]
        given, sampled = np.frombuffer(stored.given, "<i4"), np.frombuffer(stored.sampled, "<i4")
        new = len(given) + len(sampled)
        length = new if parent is None else parent.length + new
        turn = Turn(
            len(self._turns), parent, stored, given, sampled, np.frombuffer(stored.logprobs, "<f4"), length
        )  # fmt: skip
        self._turns.append(turn)
        self.tokens += new
        self._by_key.setdefault(stored.key, []).append(turn)
        return turn

    def branches(self, unread: Set[int] = frozenset(), untrained: Set[int] = frozenset()) -> list[Branch]:
        """Returns the path to each leaf, in the order of the leaves' replies. Each turn is trained in one of them.

        `unread`: numbers of turns that the agent did not receive. Such a leaf is left out. `untrained`: numbers of
        turns that are context only.
        """
        read = [turn for turn in self._turns if turn.number not in unread]
        continued = {turn.parent.number for turn in read if turn.parent is not None}
        used: set[int] = set()
        branches = []
        for leaf in read:
            if leaf.number not in continued:
                path = leaf.path()
                branches.append(_branch(path, used, untrained))
                used |= {turn.number for turn in path}
        return branches

    def counts(self) -> dict[str, int]:
        """Returns facts about the turns for the log, without those that are 0.

        `conversations`: beginnings, if there are several. `unknown`: requests with a reply that the model did not
        give, for example one that the agent has changed. `untrained`: replies to requests for another distribution.
        `rendered`: conversations that the chat template could not continue token by token.
        """
        roots = sum(turn.parent is None for turn in self._turns)
        rendered = sum(turn.stored.rendered for turn in self._turns)
        unknown = sum(
            any(message["role"] == "assistant" for message in turn.stored.more) and not turn.stored.rendered
            for turn in self._turns
        )
        untrained = sum(not turn.stored.trained for turn in self._turns)
        facts = {"conversations": roots if roots > 1 else 0, "unknown": unknown, "untrained": untrained}
        facts["rendered"] = rendered
        return {name: count for name, count in facts.items() if count}


def _branch(path: Sequence[Turn], used: Set[int], untrained: Set[int]) -> Branch:
    ids, logprobs, mask, labels = [], [], [], []
    place = sampled = 0
    for turn in path:
        new = turn.number not in used
        trained = new and turn.stored.trained and turn.number not in untrained
        given = turn.given if turn.parent is not None else turn.given[:0]
        place += len(given)
        if new:
            labels += [LabelSpan(span.version, place + span.start, place + span.end) for span in turn.stored.labels]
            sampled += len(turn.sampled)
        place += len(turn.sampled)
        ids += [given, turn.sampled]
        logprobs += [np.zeros(len(given), np.float32), turn.logprobs if trained else np.zeros_like(turn.logprobs)]
        mask += [np.zeros(len(given), np.bool_), np.full(len(turn.sampled), trained)]
    parts = np.concatenate(ids), np.concatenate(logprobs), np.concatenate(mask)
    return Branch(path[0].given, *parts, labels, list(path), sampled)


def _identity(message: Message) -> Mapping[str, Any]:
    """Returns what two messages share if one is the other, sent back by a client that wrote it in its own way."""
    same = {key: message[key] for key in _KEYS if message.get(key)}
    calls = message.get("tool_calls") or ()
    if calls:
        same["tool_calls"] = [
            (call.get("id"), call["function"]["name"], _as_javascript(call["function"]["arguments"])) for call in calls
        ]
    return same


def _as_javascript(value: Any) -> Any:
    """Returns a JSON value with whole numbers as integers, because JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _as_javascript(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_javascript(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else value


def _digest(key: bytes, value: object) -> bytes:
    return hashlib.sha256(key + _ENCODER.encode(value)).digest()
