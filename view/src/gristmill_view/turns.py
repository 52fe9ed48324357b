"""The turns of rollouts: from the conversations that the environment sent, else from the tokens' mask.

Without conversations (`include_messages: false`) each run of sampled tokens is one reply of the model, and the tokens
between two replies are one turn of the environment, with the chat template's special tokens.

The branches of a rollout are paths of a tree (`tree`): turns that several branches begin with are there once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gristmill.group_checks import is_deeper

Turn = dict[str, Any]
"""role, content, and sometimes thinking, name, tool_calls (`Call.shown`), answers (`id` and `name` of the call whose
result it is), and in a tree trained (whether a branch trains the reply)."""
Node = dict[str, Any]
"""A part of a tree. parent: the place of the node that it continues, or None; turns; sequences: of the branches that
share it, one if it is the end of a branch; continues: whether the group's prompt comes before it."""
Span = tuple[int, int]
"""The first token of a reply and the token after its last."""
_MOST_NAMED: Final = 50
"""Arguments of one call that are shown one by one."""
_MOST_INDENTED: Final = 10_000
"""Characters of an argument that is shown on several lines."""
_SHORT: Final = 60
"""Characters of an argument that is shown on one line."""
_DEEPEST_INDENT: Final = 16
"""Lists and objects inside each other in an argument that is shown on several lines."""


@dataclass(frozen=True)
class Call:
    """A call of a tool, in any form in which clients send it."""

    id: str | None
    name: str
    arguments: list[tuple[str, str]]
    """Name and text of each argument. One argument without a name if they are not a JSON object."""

    @property
    def text(self) -> str:
        """The arguments as one text."""
        return ", ".join(f"{name}={text}" if name else text for name, text in self.arguments)

    @property
    def shown(self) -> dict[str, Any]:
        """The call as JSON values."""
        return {"id": self.id, "name": self.name, "arguments": [list(pair) for pair in self.arguments]}


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence of a rollout. T: its tokens."""

    sequence: int
    turns: Sequence[Turn]
    tokens: npt.NDArray[np.int32]
    """[T]"""
    trained: Sequence[Span]
    """The replies that the group trains in this branch."""


# --- Conversations ---------------------------------------------------------------------------------------------
def conversations(messages: Sequence[str | None]) -> list[list[Turn]] | None:
    """Returns the conversation of each sequence from JSON, with the thinking of replies apart.

    None if any of them is missing, or is not a list of messages that ends with a reply.
    """
    parsed = [_conversation(one) for one in messages]
    present = [one for one in parsed if one is not None]
    return present if present and len(present) == len(parsed) else None


def common_prompt(known: Sequence[Sequence[Turn]], replies: Sequence[int] | None = None) -> list[Turn]:
    """Returns the messages that all conversations begin with, up to the turn before a reply.

    `replies`: of each conversation, how many replies at its end were sampled. They are not in the prompt.
    """
    first, shortest = known[0], min(map(len, known)) - 1
    for conversation, sampled in zip(known, replies or (), strict=False):
        places = [place for place, turn in enumerate(conversation) if turn["role"] == "assistant"]
        shortest = min([shortest, *places[max(0, len(places) - sampled) :][:1]])
    common = 0
    while common < shortest and all(one[common] == first[common] for one in known):
        common += 1
    while common > 0 and first[common - 1]["role"] == "assistant":
        common -= 1
    return list(first[:common])


def of_mask(
    tokens: Sequence[int], replies: Sequence[Span], decode: Callable[[Sequence[int], bool], str], start: int
) -> list[Turn]:
    """Returns the turns of the tokens from `start` on, which is not inside a reply.

    `decode`: returns the text of tokens, without special tokens if its second argument is True.
    """
    turns: list[Turn] = []
    for begin, end in [*replies, (len(tokens), len(tokens))]:
        for role, ids in (("environment", tokens[start:begin]), ("assistant", tokens[begin:end])):
            if len(ids):
                turns.append(with_thinking({"role": role, "content": decode(ids, role == "assistant")}))
        start = end
    return turns


def with_thinking(turn: Turn) -> Turn:
    """Returns a reply with its thinking apart from its answer."""
    content, thinking = turn["content"], turn.get("thinking")
    if turn["role"] != "assistant" or thinking or not isinstance(content, str) or "</think>" not in content:
        return turn
    thinking, _, rest = content.partition("</think>")
    return {**turn, "content": rest.strip(), "thinking": thinking.strip().removeprefix("<think>").strip()}


def _conversation(text: str | None) -> list[Turn] | None:
    """Atropos' `include_messages` may store the whole sequence as one user message, which is not a conversation."""
    try:
        conversation = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(conversation, list)
        or not conversation
        or not all(isinstance(one, Mapping) for one in conversation)
    ):
        return None
    turns: list[Turn] = []
    open_calls: list[Call] = []
    for message in conversation:
        turn = with_thinking(_turn(message))
        if calls := tool_calls(message):
            turn["tool_calls"] = [call.shown for call in calls]
            open_calls = calls
        elif turn["role"] == "tool" and (call := _answered(message.get("tool_call_id"), open_calls)) is not None:
            open_calls = [one for one in open_calls if one is not call]
            turn["answers"] = {"id": call.id, "name": call.name}
        turns.append(turn)
    return turns if all(turn["role"] for turn in turns) and turns[-1]["role"] == "assistant" else None


def _turn(message: Mapping[str, Any]) -> Turn:
    turn = {name: message[name] for name in ("content", "name") if message.get(name) is not None}
    turn["role"] = message["role"] if isinstance(message.get("role"), str) else ""
    turn.setdefault("content", "")
    for name in ("reasoning_content", "reasoning"):
        if isinstance(thinking := message.get(name), str) and thinking:
            return {**turn, "thinking": thinking}
    return turn


# --- Tool calls ------------------------------------------------------------------------------------------------
def tool_calls(message: Mapping[str, Any]) -> list[Call]:
    """Returns the calls of a message. `arguments` may be a JSON object, its text, or anything else."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    return [_call(one) for one in (calls if isinstance(calls, list) else [calls])]


def _call(value: Any) -> Call:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return Call(None, "", [("", _json_text(value))])
    identity = value.get("id")
    return Call(identity if isinstance(identity, str) else None, function["name"], _arguments(function))


def _arguments(function: Mapping[str, Any]) -> list[tuple[str, str]]:
    given = function.get("arguments")
    if given is None:
        return []
    values = given
    if isinstance(given, str):
        try:
            values = json.loads(given, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            return [("", given)]  # as the model wrote it
    if not isinstance(values, Mapping) or len(values) > _MOST_NAMED:
        return [("", _json_text(given))]
    return [(name, _json_text(value)) for name, value in values.items()]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a name is there twice, and one of its values would not be shown")
    return unique


def _json_text(value: Any) -> str:
    """Returns a text as it is, and other values as JSON, on several lines if that is not long."""
    if isinstance(value, str):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "[nested too deep]"
    lines = _SHORT < len(text) <= _MOST_INDENTED and not is_deeper(value, _DEEPEST_INDENT)
    return json.dumps(value, ensure_ascii=False, indent=1) if lines else text


def _answered(identity: Any, calls: Sequence[Call]) -> Call | None:
    """Returns the call of a tool's result: by its id, or else the first one if the result or the calls have no ids."""
    if identity is None:
        return next(iter(calls), None)
    with_id = next((call for call in calls if call.id == identity), None)
    return with_id or next((call for call in calls if call.id is None), None)


# --- Branches --------------------------------------------------------------------------------------------------
def sampled_spans(branches: Sequence[Branch]) -> list[list[Span]]:
    """Returns the replies of each branch: those that it trains, and those that another branch with the same beginning
    trains."""
    order = sorted(range(len(branches)), key=lambda at: branches[at].tokens.astype(">i4").tobytes())
    sampled = [set(branch.trained) for branch in branches]
    # In the order of their tokens, the branches between two branches all share the tokens that those two share.
    for places in (order, order[::-1]):
        for before, at in itertools.pairwise(places):
            shared = _shared(branches[before].tokens, branches[at].tokens)
            sampled[at] |= {span for span in sampled[before] if span[1] <= shared}
    return [_apart(spans) for spans in sampled]


def tree(branches: Sequence[Branch], prompt: Sequence[Turn]) -> list[Node]:
    """Returns the nodes of a rollout's tree, each after its parent, and branches in their order.

    Turns that several branches begin with are one node. A reply that two branches train is two replies, even if both
    have the same text: the model sampled it twice. `prompt`: the group's messages, left out of branches that begin
    with them.
    """
    paths = [_marked(*pair) for pair in zip(branches, sampled_spans(branches), strict=True)]
    skipped = [len(prompt) if list(branch.turns[: len(prompt)]) == list(prompt) else 0 for branch in branches]
    keys = [[json.dumps(turn, sort_keys=True) for turn in branch.turns] for branch in branches]
    nodes: list[Node] = []
    pending: list[tuple[int | None, list[int], int]] = []
    """The nodes to make, the next one last: parent, branches, and the first turn."""
    for start in {*skipped}:
        members = [at for at, skip in enumerate(skipped) if skip == start]
        pending += [(None, part, start) for part in _alike(paths, keys, members, start)]
    pending.sort(key=lambda made: made[1][0], reverse=True)
    while pending:
        parent, members, start = pending.pop()
        end = start
        if len(members) == 1:
            end = len(paths[members[0]])
        else:
            while len(_alike(paths, keys, members, end)) == 1:
                end += 1
        turns = [
            {**turn, "trained": True} if any(paths[at][place].get("trained") for at in members) else turn
            for place, turn in enumerate(paths[members[0]][start:end], start)
        ]
        nodes.append(
            {
                "parent": parent,
                "turns": turns,
                "sequences": [branches[at].sequence for at in members],
                "continues": parent is None and skipped[members[0]] > 0,
            }
        )
        if len(members) > 1:
            parts = _alike(paths, keys, members, end)
            pending += [(len(nodes) - 1, part, end) for part in reversed(parts)]
    return nodes


def _alike(
    paths: Sequence[Sequence[Turn]], keys: Sequence[Sequence[str]], members: Sequence[int], place: int
) -> list[list[int]]:
    """Returns the branches among `members` in parts with the same turn at `place`. A branch that has ended is one."""
    parts: list[list[int]] = []
    numbers: dict[str, int] = {}
    """The newest part of each turn to which a branch may come."""
    trained: set[int] = set()
    for at in members:
        if place >= len(paths[at]):
            parts.append([at])
            continue
        key, trains = keys[at][place], paths[at][place].get("trained") is True
        part = numbers.get(key)
        if part is None or (trains and part in trained):
            part = numbers[key] = len(parts)
            parts.append([])
        parts[part].append(at)
        if trains:
            trained.add(part)
    return parts


def _marked(branch: Branch, replies: Sequence[Span]) -> list[Turn]:
    """Returns the turns of a branch, its replies with `trained`.

    The last reply of the turns is the last of `replies`, and so on backwards; replies before these were not sampled.
    Nothing is marked if there are more sampled replies than turns of the model.
    """
    places = [place for place, turn in enumerate(branch.turns) if turn["role"] == "assistant"]
    turns = list(branch.turns)
    if len(replies) > len(places):
        return turns
    own = {start for start, _ in branch.trained}
    starts = [None] * (len(places) - len(replies)) + [start for start, _ in replies]
    for place, start in zip(places, starts, strict=True):
        turns[place] = {**turns[place], "trained": start in own}
    return turns


def _shared(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Returns how many tokens both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(np.argmax(differ)) if differ.any() else length


def _apart(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans in their order, without those that overlap one before them."""
    kept: list[Span] = []
    for start, end in sorted(spans):
        if not kept or start >= kept[-1][1]:
            kept.append((start, end))
    return kept
