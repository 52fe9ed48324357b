"""A group as the page shows it: a rollout is one entry, and its branches are a tree."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gristmill_view import turns
from gristmill_view.samples import question
from gristmill_view.source import LEFT_OUT

_MOST_TOKENS: Final = 20_000
"""Tokens of one rollout that the page gets."""


def group_json(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Returns a group as JSON values. `rows`: of the table of rollouts, at least one. `tokenizer`: may be None.

    `completions` has one entry per rollout. With several branches it has `branches`, the sequences, and their `tree`.
    `left_out` has the errors of the rollouts that failed.
    """
    first = rows[0]
    shown_rows = [row for row in rows if row["tokens"] or row["completion"] is not None]
    conversations = turns.conversations([row["messages"] for row in shown_rows])
    rollouts: dict[int, list[int]] = {}
    """The places in `kept` of the sequences of each rollout."""
    for at, row in enumerate(shown_rows):
        rollouts.setdefault(row["sequence"] if row["rollout"] is None else row["rollout"], []).append(at)
    messages = None
    if conversations is not None:
        firsts = [places[0] for places in rollouts.values()]  # other branches may begin in another way
        replies = [shown_rows[at]["turns"] or 0 for at in firsts] if len(firsts) < len(shown_rows) else None
        messages = turns.common_prompt([conversations[at] for at in firsts], replies)
    reader = _Reader(tokenizer, (shown_rows or rows)[0], messages)
    return {
        "group_id": shown_id(first["group_id"]),
        "row": first["row"],
        "index": first["index"],
        "source": first["source"],
        "env_id": first["env_id"],
        "step": None if first["outcome"] == "evaluation" else first["step"],
        "prompt": first["prompt"],
        "question": None if first["prompt"] is None else question(first["prompt"]),
        "answer": first["answer"],
        "messages": messages,
        "outcome": first["outcome"],
        "reason": first["outcome_reason"],
        "error": None if shown_rows else first["error"],
        "left_out": [
            {"reason": row["outcome_reason"], "error": row["error"]} for row in rows if row["outcome"] == LEFT_OUT
        ],
        "staleness": first["staleness"],
        "completions": [
            reader.rollout(
                number,
                [shown_rows[at] for at in places],
                None if conversations is None else [conversations[at] for at in places],
            )
            for number, places in rollouts.items()
        ],
    }


def shown_id(group_id: str) -> str:
    """Returns a group's id as it is in paths: the id of an evaluated prompt has a slash."""
    return group_id.replace("/", "~")


class _Reader:
    """Makes the page's data of the rollouts of one group."""

    def __init__(self, tokenizer: Any, first: Mapping[str, Any], prompt: Sequence[turns.Turn] | None) -> None:
        """`first`: the group's first row. `prompt`: the group's messages, if the environment sent them."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._prompt_ids = list((first["tokens"] or ())[: first["prompt_tokens"]])
        self._decoded = functools.cache(lambda ids, plain: _decoded(tokenizer, ids, plain))

    def rollout(
        self, number: int, rows: Sequence[Mapping[str, Any]], conversations: Sequence[list[turns.Turn]] | None
    ) -> dict[str, Any]:
        """Returns one rollout. `rows`: of its branches. With several it has `branches` and their `tree`."""
        sequences, tokens_left = [], _MOST_TOKENS
        for row in rows:
            sequences.append(_sequence(row, self._tokenizer, tokens_left))
            tokens_left -= len(sequences[-1]["tokens"])
        first = rows[0]
        rollout_facts = {
            **sequences[0],
            "rollout": number,
            "reward": first["reward"],
            "parts": dict(first["reward_parts"] or ()),
            **({"extracted": first["extracted"]} if first["answer_searched"] else {}),
        }
        if len(rows) == 1:
            return {**rollout_facts, "turns": self._turns(first, None if conversations is None else conversations[0])}
        if any(one["finish_reason"] == "length" for one in sequences):
            rollout_facts["finish_reason"] = "length"
        advantages = [one["advantage"] for one in sequences if one["advantage"] is not None]
        rollout_facts["advantage"] = advantages[0] if advantages else None
        return {
            **rollout_facts,
            "text": None,
            "tokens": [],
            "branches": sequences,
            "tree": self._tree(rows, conversations),
        }

    def _tree(
        self, rows: Sequence[Mapping[str, Any]], conversations: Sequence[list[turns.Turn]] | None
    ) -> list[turns.Node]:
        branches = [
            turns.Branch(row["sequence"], [], np.array(row["tokens"] or (), np.int32), _spans(row)) for row in rows
        ]
        prompt: Sequence[turns.Turn] = self._prompt or ()
        if conversations is None:
            prompt = [self._prompt_turn(self._prompt_ids)]
            conversations = [
                self._of_tokens(row["tokens"] or [], spans)
                for row, spans in zip(rows, turns.sampled_spans(branches), strict=True)
            ]
        paths = zip(branches, conversations, strict=True)
        return turns.tree([dataclasses.replace(branch, turns=path) for branch, path in paths], prompt)

    def _of_tokens(self, tokens: list[int], replies: Sequence[turns.Span]) -> list[turns.Turn]:
        """Returns the turns of a branch whose messages are not known; the first one is its prompt."""
        start = replies[0][0] if replies else len(tokens)
        return [self._prompt_turn(tokens[:start]), *turns.of_mask(tokens, replies, self._text, start)]

    def _prompt_turn(self, ids: Sequence[int]) -> turns.Turn:
        return {"role": "prompt", "content": self._text(ids, False)}

    def _turns(self, row: Mapping[str, Any], conversation: list[turns.Turn] | None) -> list[turns.Turn]:
        """Returns the turns; none if the completion is one text, which is then shown as the model sampled it."""
        text = row["completion"]
        if conversation is not None:
            rest = conversation[len(self._prompt or ()) :]
            if len(rest) > 1 or text is None or rest[0].get("tool_calls"):
                return rest
        if row["replies"] and self._tokenizer is not None:
            return turns.of_mask(row["tokens"], _spans(row), self._text, row["prompt_tokens"])
        turn = turns.with_thinking({"role": "assistant", "content": text or ""})
        return [turn] if "thinking" in turn else []

    def _text(self, ids: Sequence[int], plain: bool) -> str:
        # Branches share their beginnings.
        return self._decoded(tuple(ids), plain)


def _sequence(row: Mapping[str, Any], tokenizer: Any, most: int) -> dict[str, Any]:
    """Returns one sequence with at most `most` tokens."""
    first, last = row["version_first"], row["version_last"]
    return {
        "sequence": row["sequence"],
        "text": row["completion"],
        "advantage": row["advantage"],
        "finish_reason": row["finish_reason"],
        "version": first if first == last else f"{first} to {last}",
        "outcome": row["outcome"],
        "reason": row["outcome_reason"],
        "error": row["error"],
        "tokens": list(_tokens(row, tokenizer, most)) if row["tokens"] else [],
    }


def _spans(row: Mapping[str, Any]) -> list[turns.Span]:
    """Returns the replies that the group trains in a sequence with several replies or branches."""
    pairs = row["replies"] or []
    return list(zip(pairs[::2], pairs[1::2], strict=True))


def _tokens(row: Mapping[str, Any], tokenizer: Any, most: int) -> Iterator[dict[str, Any]]:
    start = row["prompt_tokens"] or 0
    ids = row["tokens"][start : start + most]
    mask, sampler, trainer = row["mask"], row["sampler_logprobs"], row["trainer_logprobs"]
    entropy, advantages = row["entropy"], row["advantages"]
    for at, (text, name) in enumerate(_pieces(tokenizer, ids), start):
        trained = bool(mask[at]) if mask else True
        ours = sampler[at] if sampler and trained else None
        theirs = trainer[at] if trainer and trained else None
        yield {
            "text": text,
            "name": name,
            "mask": trained,
            "sampler": ours,
            "trainer": theirs,
            "ratio": math.exp(min(60.0, max(-60.0, theirs - ours)))
            if ours is not None and theirs is not None
            else None,
            "entropy": entropy[at] if entropy and trained else None,
            "advantage": (advantages[at] if advantages else row["advantage"]) if trained else None,
        }


def _decoded(tokenizer: Any, ids: Sequence[int], plain: bool) -> str:
    """Returns the text of tokens; without a tokenizer their ids."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return str(tokenizer.decode(list(ids), skip_special_tokens=plain))


def _pieces(tokenizer: Any, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yields (text, name) of each token. Without a tokenizer the name is the id."""
    if tokenizer is None:
        yield from (("", str(number)) for number in ids)
        return
    from tokenizers.decoders import DecodeStream

    # A character may be of several tokens: the last of them gets it, so that the texts make up the completion.
    stream = DecodeStream(skip_special_tokens=True)
    for number in ids:
        text = stream.step(tokenizer, number) or ""
        yield text, text or tokenizer.id_to_token(number) or str(number)
