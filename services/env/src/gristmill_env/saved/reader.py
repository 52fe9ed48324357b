"""Reads groups from our JSONL, Atropos' JSONL, and the rollouts that a run archived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill import TrajectoryGroup, read_archive
from gristmill.folders import EVALUATION_FILE, EVALUATION_GROUPS_FILE
from gristmill.group import SOURCE, TOOLS
from gristmill.internal.lines import read_lines
from gristmill.internal.saved import FORMAT, Message, SavedCompletion, SavedGroup, content_of
from gristmill_env.errors import SavedError

T = TypeVar("T")
Decode = Callable[[Sequence[int], bool], str]
"""Converts token ids to text; the second argument keeps special tokens."""
_OURS = msgspec.json.Decoder(SavedGroup)


class AtroposGroup(msgspec.Struct):
    """The fields that are read. Each list has one entry per sequence; a sequence includes its prompt."""

    tokens: list[list[int]]
    scores: list[float]
    masks: list[list[int]] = []
    """-100 for a token that was given instead of sampled."""
    messages: list[Any] | None = None
    inference_logprobs: list[list[float]] | None = None


_THEIRS = msgspec.json.Decoder(AtroposGroup | list[AtroposGroup])


class _Kind(msgspec.Struct):
    """The keys that distinguish the kinds of lines."""

    format: int | None = None
    completions: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()
    scores: msgspec.Raw = msgspec.Raw()


_KIND = msgspec.json.Decoder(_Kind | list[Any])
_NOT_TRAINED = -100


def no_tokenizer(token_ids: Sequence[int], special: bool) -> str:
    """A `Decode` for sources whose groups should all hold text. Raises SavedError."""
    raise SavedError("no_tokenizer", "this group holds token ids and no text, and a tokenizer to read them is missing")


def read_groups(source: Path, decode: Decode = no_tokenizer) -> Iterator[SavedGroup]:
    """Yields the groups of a file or a folder, one in memory at a time. The folder is of an evaluation or of a run
    (`runs/quickstart`, or its rollouts/).

    Of a run that was deleted and created again under its id, yields the groups of the newest training.
    `decode`: converts token ids to text; called only for groups without text. A torn last line after a kill is
    skipped with a warning. Raises SavedError naming the line, and ArchiveError.
    """
    if (source / EVALUATION_FILE).is_file():
        source /= EVALUATION_GROUPS_FILE
    if source.is_dir():
        for archived in read_archive(source, newest_only=True):
            if archived.schema == "group":
                yield from_trajectory(TrajectoryGroup.decode(archived.body), decode)
            else:
                yield from _line(archived.body, f"group {archived.group_id} of {source}", source.name, decode)
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise SavedError(
            "saved_groups_unreadable", f"cannot read saved groups from {source}: {error.strerror}", path=source
        ) from error
    with file:
        for number, line in read_lines(file):
            yield from _line(line, f"line {number} of {source}", source.stem, decode)


def _line(line: bytes, where: str, name: str, decode: Decode) -> Iterator[SavedGroup]:
    kind = _decoded(_KIND.decode, line, where)
    if isinstance(kind, list) or (bytes(kind.tokens) and bytes(kind.scores)):
        theirs = _decoded(_THEIRS.decode, line, where)
        for group in theirs if isinstance(theirs, list) else [theirs]:
            yield from_atropos(group, name, where, decode)
    elif not bytes(kind.completions):
        raise SavedError(
            "not_a_saved_group",
            f"{where} is not a saved group: it has neither completions nor tokens and scores",
            where=where,
        )
    elif kind.format != FORMAT:
        raise SavedError(
            "group_format",
            f"{where} has format {kind.format}; this gristmill reads format {FORMAT}",
            where=where,
            format=kind.format,
        )
    else:
        yield _decoded(_OURS.decode, line, where)


def _decoded(decoder: Callable[[bytes], T], line: bytes, where: str) -> T:
    try:
        return decoder(line)
    except (ValueError, RecursionError) as error:
        raise SavedError("not_a_saved_group", f"{where} is not a saved group: {error}", where=where) from error


def from_trajectory(group: TrajectoryGroup, decode: Decode) -> SavedGroup:
    """Converts a group that the trajectory API archived. The group has a row number but neither answer nor columns.

    The group has messages only if the run sent them (`include_messages`). Without messages, the text of a conversation
    with several turns is everything after the first prompt.
    """
    sequences, start = [], 0
    for number, end in enumerate(np.cumsum(group.lengths).tolist()):
        scores = {name: values[number] for name, values in group.reward_parts.items()}
        own = {"finish_reason": group.finish_reasons[number], "scores": scores, "total": float(group.rewards[number])}
        logprobs = group.logprobs[start:end].tolist()
        sequences.append(_Sequence(group.tokens[start:end].tolist(), group.mask[start:end], logprobs, own))
        start = end
    return _saved(
        sequences, group.messages, f"group {group.group_id}", decode,
        run=group.run_id,
        row=group.row,
        tools=group.meta.get(TOOLS),
        source=source if isinstance(source := group.meta.get(SOURCE), str) else None,
        sampling=group.sampling,
        versions=sorted({span.version for spans in group.versions for span in spans}),
    )  # fmt: skip


def from_atropos(group: AtroposGroup, name: str, where: str, decode: Decode) -> SavedGroup:
    """Converts a group. `name`: the run's name; `where`: the group's place, for messages. Raises SavedError."""
    if len(group.scores) != len(group.tokens) or len(group.masks) != len(group.tokens) or not group.tokens:
        raise SavedError(
            "length_mismatch",
            f"{where} has {len(group.tokens)} sequences, {len(group.masks)} masks and {len(group.scores)} scores; "
            "there is one of each a sequence",
            where=where,
            sequences=len(group.tokens),
            masks=len(group.masks),
            scores=len(group.scores),
        )
    sequences = []
    for number, (tokens, mask, score) in enumerate(zip(group.tokens, group.masks, group.scores, strict=True)):
        if len(tokens) != len(mask):
            raise SavedError(
                "length_mismatch",
                f"{where} has a sequence of {len(tokens)} tokens with a mask of {len(mask)}",
                where=where,
                tokens=len(tokens),
                mask=len(mask),
            )
        logprobs = group.inference_logprobs[number] if group.inference_logprobs else []
        known = logprobs if len(logprobs) == len(tokens) else None
        sequences.append(_Sequence(tokens, np.array(mask) != _NOT_TRAINED, known, {"total": score}))
    return _saved(sequences, group.messages, where, decode, run=name)


class _Sequence(NamedTuple):
    """One sequence of a group, with its prompt."""

    tokens: list[int]
    trained: npt.NDArray[np.bool_]
    """bool[tokens]"""
    logprobs: list[float] | None
    own: Mapping[str, Any]
    """The fields of the completion that do not follow from its tokens and messages."""


def _saved(
    sequences: Sequence[_Sequence], messages: list[Any] | None, where: str, decode: Decode, **fields: Any
) -> SavedGroup:
    """Returns the saved form of a group of tokens. `fields`: those that do not follow from its sequences."""
    conversations = conversations_of(messages, len(sequences))
    shared, rests = split_conversations(conversations) if conversations is not None else (None, [])
    completions = []
    # The branches of an agent's rollout differ in their prompts: all after the common beginning belongs to the branch.
    prompts = [one.tokens[: prompt_length(one.trained, where)] for one in sequences]
    differs = (at for at, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    start = next(differs, min(map(len, prompts)))
    for number, (tokens, trained, logprobs, own) in enumerate(sequences):
        mask, rest = trained[start:], rests[number] if rests else []
        completions.append(
            SavedCompletion(
                text=content_of(rest[-1]) if rest else decode(tokens[start:], False),
                messages=rest if len(rest) > 1 else None,
                tokens=int(mask.sum()),
                token_ids=tokens[start:],
                mask=None if mask.all() else mask.tolist(),
                logprobs=None if logprobs is None else logprobs[start:],
                **own,
            )
        )
    prompt_ids = prompts[0][:start]
    text = decode(prompt_ids, True) if shared is None else None
    return SavedGroup(
        prompt=content_of(shared[-1]) if shared else text or "",
        prompt_text=text,
        prompt_tokens=len(prompt_ids),
        prompt_token_ids=prompt_ids,
        messages=shared,
        completions=completions,
        **fields,
    )


def prompt_length(trained: npt.NDArray[np.bool_], where: str) -> int:
    """Returns the tokens before the first sampled token. `trained`: bool[tokens] of one sequence. Raises SavedError."""
    if not trained.any():
        raise SavedError(
            "nothing_trained", f"{where} has a sequence without a completion: its mask trains on no token", where=where
        )
    return int(trained.argmax())


def split_conversations(conversations: list[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """Returns the common beginning of all conversations, up to the turn before an answer, and the rest of each."""
    common = 0
    shortest = min(map(len, conversations)) - 1  # the last message of each is its own
    first = conversations[0]
    while common < shortest and all(conversation[common] == first[common] for conversation in conversations):
        common += 1
    while common > 0 and first[common - 1].get("role") == "assistant":
        common -= 1
    return first[:common], [conversation[common:] for conversation in conversations]


def conversations_of(messages: list[Any] | None, count: int) -> list[list[Message]] | None:
    """Returns the messages if they are conversations that end with an answer, otherwise None.

    Atropos' `include_messages` may store the whole sequence as one user message, and that is not a conversation."""
    if messages is None or len(messages) != count:
        return None
    for conversation in messages:
        if not isinstance(conversation, list) or not all(isinstance(m, dict) and "role" in m for m in conversation):
            return None
        if not conversation or conversation[-1]["role"] != "assistant":
            return None
    return messages
