"""Converts Atropos' JSON to the binary group that the store keeps, and back for GET /batch.

A group is converted when it is submitted. So leases, the archive and all readers know one form. Values that the two
forms write differently:

    masks                 the token's id where trained, -100 elsewhere   <->  the mask
    inference_logprobs    1.0 where not sampled                          <->  logprobs, 0 where not trained
    overrides (per sequence), group_overrides                            <->  overrides = {"sequences", "group"}
    generation_params     temperature, top_p, max_tokens                 <->  sampling
    no inference_logprobs                                                <->  logprobs_known is False
    images, and generation_params                                        <->  meta
    distill_* of k that varies by position                                ->  padded with id -1 and log-probability 0,
                                                                              unless almost all entries were padding
    distill_* of k > 1 times the same id, each of probability 1           ->  a position without a teacher
    policy version        JSON has none: the version that is served when the group is stored

A trainer of Atropos gets the values that the environment sent. So a field that the binary group would not return
exactly, such as a score that 32 bits round, is also kept as JSON text. The texts are in one more key of the group's
map, `atropos`, which readers of groups pass over.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from gristmill import GroupError, SamplingParams, TrajectoryGroup, VersionSpan
from gristmill.group import F32, I32, NO_LOGPROBS, Bool
from gristmill_api.atropos.messages import Mismatch, Scored

F64 = npt.NDArray[np.float64]
KEYS: Final = Scored.__struct_fields__
"""The 14 keys of a group in a batch of Atropos. Every group has all of them, in this order."""
NOT_TRAINED: Final = -100
NOT_SAMPLED: Final = np.float32(1.0)
_PADDING: Final = -1
_CELLS: Final = 1 << 22
_TIMES: Final = 8
"""A teacher's arrays may have `_CELLS` entries, or `_TIMES` the entries that were sent."""
_HIGHEST_TOKEN: Final = 2**31 - 1
_UNNAMED, _UNNUMBERED = "a99999999", 2**32 - 1
"""Id and row of a group that is not stored yet."""
NAME_BYTES: Final = len(_UNNAMED)


@dataclass(frozen=True)
class Stored:
    """A group's bytes, in which the script that stores them writes the id and the row."""

    body: bytes
    name_at: int
    """Offset of the id, NAME_BYTES long."""
    row_at: int
    """Offset of the row, an u32, big-endian."""


@dataclass(frozen=True)
class SubmittedGroup:
    """A group that is to be stored, without its id and the version of the weights."""

    group: TrajectoryGroup
    env_id: int | None
    left_out: tuple[str, ...] = ()
    """Names of the optional fields that did not fit."""
    unusable: str = ""
    """Why no trainer of /v1 can use the group: its binary form lacks some of the fields."""
    texts: Mapping[str, bytes] = field(default_factory=dict)
    """JSON of the fields that `group` would not return exactly."""

    @property
    def sequences(self) -> int:
        return self.group.size

    @property
    def tokens(self) -> int:
        return len(self.group.tokens)

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        arrays = (value for value in vars(self.group).values() if isinstance(value, np.ndarray))
        return sum(one.nbytes for one in arrays) + sum(map(len, self.texts.values()))

    def stored(self, run_id: str, version: str) -> Stored:
        """Returns the group's bytes. `version`: the weights that are served."""
        spans = [[VersionSpan(version, one.start, one.end) for one in spans] for spans in self.group.versions]
        body = replace(self.group, run_id=run_id, versions=spans).encode()
        if self.texts:
            body = _with(body, "atropos", dict(self.texts))
        name_at = body.index(_UNNAMED.encode())
        return Stored(body, name_at, body.index(b"\xa3row\xce", name_at) + 5)


def convert(scored: Scored, left_out: Collection[str] = ()) -> SubmittedGroup:
    """Converts values whose lengths agree. Blocking: the work grows with the group.

    Raises Mismatch for a group that no trainer could use: token ids that are negative or beyond 32 bits, no trained
    token, or scores beyond the range of 32-bit floats.
    """
    lengths = np.array([len(tokens) for tokens in scored.tokens], np.int32)
    tokens = _integers("tokens", scored.tokens)
    if len(wrong := np.flatnonzero((tokens < 0) | (tokens > _HIGHEST_TOKEN))):
        at = int(np.searchsorted(lengths.cumsum(), wrong[0], "right"))
        raise Mismatch(("tokens", at), f"holds {tokens[wrong[0]]}, which is not the id of a token")
    masks = _integers("masks", scored.masks)
    mask = masks != NOT_TRAINED
    if not mask.any():
        raise Mismatch(("masks",), "no token is trained: every mask is -100")
    rewards = _narrow(np.array(scored.scores))
    if not np.isfinite(rewards).all():
        raise Mismatch(("scores",), "holds a number beyond 32-bit floats")
    certain: dict[str, Any] = {
        "group_id": _UNNAMED,
        "run_id": "",
        "env_id": _env_name(scored.env_id),
        "row": _UNNUMBERED,
        "lengths": lengths,
        "tokens": tokens.astype(np.int32),
        "mask": mask,
        "rewards": rewards,
        "reward_parts": {},
        "finish_reasons": ["stop"] * len(lengths),
        "versions": [[VersionSpan("0.0", *_completion(part))] for part in np.split(mask, lengths.cumsum()[:-1])],
    }
    flat = {name: _floats(getattr(scored, name)) for name in ("advantages", "ref_logprobs", "inference_logprobs")}
    try:
        group, unusable = TrajectoryGroup(**certain, **_uncertain(scored, flat, mask)), ""
        group.encode()
    # A group's values come from outside, so any error of the libraries that read them is an error of this group: an
    # integer beyond 64 bits in a message, images of many megabytes, a value that is nested too deep.
    except Exception as error:  # noqa: BLE001
        named = str(error) if isinstance(error, GroupError) else f"{type(error).__name__}: {error}"
        unusable = f"no_binary_form: {named.encode(errors='backslashreplace').decode()}"
        zeros = np.zeros(len(tokens), np.float32)
        plain = SamplingParams(temperature=1.0, max_tokens=int(lengths.max()))
        group = TrajectoryGroup(**certain, logprobs=zeros, sampling=plain, meta={NO_LOGPROBS: True})
    sent = {**msgspec.structs.asdict(scored), "tokens": tokens, "masks": masks, "scores": np.array(scored.scores)}
    sent |= {name: values for name, values in flat.items() if values is not None}
    returned = _values(group)
    texts = {key: _text(getattr(scored, key)) for key in KEYS if not _same(sent[key], returned[key])}
    return SubmittedGroup(group, scored.env_id, tuple(sorted(left_out)), unusable, texts)


def to_json(body: bytes) -> bytes:
    """Returns a stored group as JSON with all 14 keys. Blocking: the work grows with the group. Raises GroupError."""
    group = TrajectoryGroup.decode(body)
    values = _values(group) | {key: orjson.Fragment(text) for key, text in _TEXTS.decode(body).atropos.items()}
    ends = group.lengths.cumsum()[:-1]
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            # As 64 bits, because a client reads the digits of a number as 64 bits.
            wide = value.astype(np.float64) if value.dtype == np.float32 else value
            values[key] = wide if key == "scores" else np.split(wide, ends)
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def _values(group: TrajectoryGroup) -> dict[str, Any]:
    """Returns the values of Atropos' keys, without the texts that are kept. Values by token are flat arrays."""
    overrides = group.overrides or {}
    sampling = {name: getattr(group.sampling, name) for name in ("temperature", "top_p", "max_tokens")}
    return {
        "tokens": group.tokens,
        "masks": np.where(group.mask, group.tokens, NOT_TRAINED),
        "scores": group.rewards,
        "advantages": group.advantages,
        "ref_logprobs": group.ref_logprobs,
        "messages": group.messages,
        "generation_params": group.meta.get("generation_params", sampling),
        "inference_logprobs": np.where(group.mask, group.logprobs, NOT_SAMPLED) if group.logprobs_known else None,
        "overrides": overrides.get("sequences"),
        "group_overrides": overrides.get("group"),
        "images": group.meta.get("images"),
        "env_id": _number(group.env_id),
        "distill_token_ids": _unpadded(group.distill_ids, group.distill_ids, group),
        "distill_logprobs": _unpadded(group.distill_logprobs, group.distill_ids, group),
    }


def _uncertain(scored: Scored, flat: Mapping[str, F64 | None], mask: Bool) -> dict[str, Any]:
    """Returns the fields of a group whose values may have no binary form."""
    logprobs = flat["inference_logprobs"]
    distill_ids, distill_logprobs = _teacher(scored)
    overrides = {"sequences": scored.overrides or None, "group": scored.group_overrides or None}
    sampled = np.zeros(len(mask)) if logprobs is None else np.where(mask, logprobs, 0)
    return {
        "logprobs": _narrow(sampled),
        "sampling": _sampling(scored.generation_params or {}, max(map(len, scored.tokens))),
        "advantages": _narrow(flat["advantages"]),
        "ref_logprobs": _narrow(flat["ref_logprobs"]),
        "distill_ids": distill_ids,
        "distill_logprobs": distill_logprobs,
        "overrides": {name: value for name, value in overrides.items() if value is not None} or None,
        "messages": scored.messages or None,
        "meta": {
            "generation_params": scored.generation_params,
            "images": scored.images,
            **({NO_LOGPROBS: True} if logprobs is None else {}),
        },
    }


def _integers(name: str, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    try:
        return np.frombuffer(_packed(rows, "q"), np.int64)
    except struct.error as error:
        raise Mismatch((name,), "holds a number beyond 64 bits") from error


def _floats(rows: Sequence[Sequence[float]] | None) -> F64 | None:
    """Returns the values of all sequences; None for an absent field, and for the empty list that BaseEnv may send."""
    return np.frombuffer(_packed(rows, "d"), np.float64) if rows else None


def _packed(rows: Sequence[Sequence[float]], code: str) -> bytes:
    # numpy takes twice as long for a list of Python's numbers.
    return b"".join(struct.pack(f"{len(row)}{code}", *row) for row in rows)


def _narrow(values: Any) -> Any:
    """Returns f32 of f64, and None of None. A value beyond the range is infinite, which a group refuses."""
    with np.errstate(over="ignore"):
        return None if values is None else values.astype(np.float32)


def _same(sent: Any, returned: Any) -> bool:
    if isinstance(sent, np.ndarray):
        return isinstance(returned, np.ndarray) and np.array_equal(sent, returned)
    return not isinstance(returned, np.ndarray) and bool(sent == returned)


def _text(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except OverflowError:  # An integer beyond 64 bits.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class _Texts(msgspec.Struct):
    atropos: dict[str, bytes] = {}


_TEXTS = msgspec.msgpack.Decoder(_Texts)


def _with(body: bytes, key: str, value: Any) -> bytes:
    """Returns a msgpack map with one more key."""
    count, start = (body[0] & 0x0F, 1) if body[0] != 0xDE else (int.from_bytes(body[1:3], "big"), 3)
    more = msgspec.msgpack.encode(key) + msgspec.msgpack.encode(value)
    return b"\xde" + (count + 1).to_bytes(2, "big") + body[start:] + more


def _sampling(params: dict[str, Any], longest: int) -> SamplingParams:
    """Returns the values of generation_params that have the names of OpenAI's API."""

    def number(name: str, default: float) -> float:
        value = params.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    return SamplingParams(
        temperature=number("temperature", 1.0) or 1.0,
        top_p=number("top_p", 1.0),
        max_tokens=int(number("max_tokens", longest)),
    )


def _completion(mask: Bool) -> tuple[int, int]:
    """Returns the span of the tokens from the first trained token to the sequence's end, in the completion."""
    return 0, len(mask) - int(mask.argmax())


def _teacher(scored: Scored) -> tuple[I32 | None, F32 | None]:
    """Returns token ids i32[N*K] and log-probabilities f32[N*K], where K is the length of the longest position. One may
    be missing; the trainer refuses such a group."""
    ids, logprobs = _positions(scored.distill_token_ids), _positions(scored.distill_logprobs)
    taught = [not _is_filler(*pair) for pair in zip(ids, logprobs, strict=True)] if ids and logprobs else None
    return _padded(ids, taught, _PADDING, np.int32), _padded(logprobs, taught, 0.0, np.float32)


_Row = TypeVar("_Row", list[int], list[float])


def _positions(rows: list[list[_Row]] | None) -> list[_Row]:
    return [position for sequence in rows or () for position in sequence]


def _is_filler(ids: list[int], logprobs: list[float]) -> bool:
    """Returns whether a position is a filler, such as [0] * k with [0.0] * k, which environments send for positions
    without a teacher. A token that is listed several times, each time with probability 1, is not a distribution."""
    return len(ids) > 1 and not any(logprobs) and len(set(ids)) == 1


def _padded(
    positions: Sequence[Sequence[float]], taught: Sequence[bool] | None, padding: float, dtype: type[Any]
) -> Any:
    if not positions:
        return None
    width = max(map(len, positions))
    if len(positions) * width > max(_CELLS, _TIMES * sum(map(len, positions))):
        raise GroupError("too_much_padding", f"one position has {width} entries of a teacher, and most have far fewer")
    flat = np.full((len(positions), width), padding, dtype)
    with np.errstate(over="ignore"):  # A group refuses what is not finite.
        for row, position, present in zip(flat, positions, taught or itertools.repeat(True), strict=False):
            if present:
                row[: len(position)] = position
    return flat.reshape(-1)


def _unpadded(values: F32 | I32 | None, ids: I32 | None, group: TrajectoryGroup) -> list[Any] | None:
    if values is None or ids is None:
        return None
    shape = (len(group.tokens), -1)
    present = ids.reshape(shape) != _PADDING
    rows = [row[in_row].tolist() for row, in_row in zip(values.reshape(shape), present, strict=True)]
    starts = np.concatenate(([0], np.cumsum(group.lengths)))
    return [rows[start:end] for start, end in itertools.pairwise(starts)]


def _env_name(number: int | None) -> str:
    """Returns the name in /v1 of an environment of Atropos, by its number."""
    return "atropos" if number is None or abs(number) > 2**63 else f"atropos-{number}"


def _number(env_id: str) -> int | None:
    """Returns the number of an environment of Atropos, by its name in /v1."""
    name, _, number = env_id.partition("-")
    return int(number) if name == "atropos" and number.isdecimal() else None
