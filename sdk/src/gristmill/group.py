"""The trajectory group, which the environment sends, the API stores and the trainer trains on.

On the wire a group is one msgpack map whose arrays are raw little-endian bytes, so that readers never build Python
lists of tokens. A group of 16 x 4096 tokens takes 0.1 ms, compared with 60 ms as JSON. The media type and the `format`
key give the version of the format. Readers ignore unknown keys.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.errors import GroupError
from gristmill.sequence import Sequence, fields_of

if TYPE_CHECKING:
    from gristmill.run import Permit

GROUP_MEDIA_TYPE = "application/vnd.gristmill.group.v1+msgpack"
BATCH_MEDIA_TYPE = "application/vnd.gristmill.batch.v1+msgpack"

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

_LABEL = re.compile(r"([0-9]{1,15})\.([0-9]{1,15})")
"""Both numbers have at most 15 digits, because JSON readers and Lua hold such numbers exactly as doubles."""


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Weights after `step` optimizer steps of the run's `incarnation`-th trainer.

    The API increases the incarnation each time a trainer takes the run. Versions therefore only increase, although a
    trainer that resumes from a checkpoint repeats steps: 1.17 < 1.18 < 2.15. The string "2.15" is the label that the
    model server keeps and returns with every completion.

    Calls accept a PolicyVersion or its label, and sessions return PolicyVersions. The records of `gristmill.run` and
    the spans of a group have the label, as on the wire: `str(version)`.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def of(cls, version: PolicyVersion | str) -> PolicyVersion:
        """Returns the version, which may be its label. Raises ValueError as `parse`."""
        return version if isinstance(version, PolicyVersion) else cls.parse(version)

    @classmethod
    @functools.lru_cache(maxsize=1024)  # A run has few labels, and every sequence of every group names a label.
    def parse(cls, label: str) -> PolicyVersion:
        """Parses a label. Raises ValueError for any other text, including vLLM's initial label "default"."""
        match = _LABEL.fullmatch(label) if isinstance(label, str) else None
        if match is None:
            raise ValueError(f"{label!r} is not the label of a policy version such as '1.20' (incarnation.step)")
        return cls(int(match[1]), int(match[2]))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of the completions. The trainer divides its logits by `temperature`."""

    temperature: float
    top_p: float = 1.0
    max_tokens: int


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion tokens [start, end) were sampled by the weights labelled `version` ("1.20")."""

    version: str
    start: int
    end: int


class _Wire(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of a group on the wire. `bytes` fields are flat little-endian arrays."""

    format: int
    group_id: str
    run_id: str
    env_id: str
    row: int
    lengths: bytes
    tokens: bytes
    logprobs: bytes
    mask: bytes
    rewards: bytes
    reward_parts: dict[str, list[float | None]]
    finish_reasons: list[str]
    sampling: SamplingParams
    versions: list[list[VersionSpan]]
    advantages: bytes | None = None
    ref_logprobs: bytes | None = None
    distill_ids: bytes | None = None
    distill_logprobs: bytes | None = None
    overrides: dict[str, Any] | None = None
    messages: list[Any] | None = None
    meta: dict[str, Any] | None = None
    rollouts: bytes | None = None


class _Objects(msgspec.Struct):
    """The fields that become Python objects, as undecoded bytes."""

    reward_parts: msgspec.Raw = msgspec.Raw()
    finish_reasons: msgspec.Raw = msgspec.Raw()
    versions: msgspec.Raw = msgspec.Raw()
    overrides: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    meta: msgspec.Raw = msgspec.Raw()


MAX_OBJECT_BYTES = 1 << 20
"""Most encoded bytes that a group may carry in addition to its arrays. One such byte can become an object of 64 bytes,
so the length of a body alone does not limit the memory that decoding takes."""

MAX_DEPTH = 64
"""Most lists and objects inside each other that a submitted group may have in one of its fields. Python and pydantic
end at a few hundred."""

NO_LOGPROBS = "no_logprobs"
"""Key of `meta`: True if the sampler's log-probabilities were not recorded. `logprobs` are zeros then."""

SOURCE = "source"
"""Key of `meta`: the name of the source of the run from which the group's row is, if the run has several."""

TOOLS = "tools"
"""Key of `meta`: the tools of the prompts, in OpenAI's form, if the group has messages and each has the same tools."""

_ENV_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OBJECTS = msgspec.msgpack.Decoder(_Objects)
_DECODER = msgspec.msgpack.Decoder(_Wire)


def _plain(value: Any) -> Any:
    """Returns a scalar of numpy, or of a subclass of a plain type, as the plain type that msgspec encodes."""
    if isinstance(value, np.generic):
        return value.item()
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a value is of type {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


class Tokenizer(Protocol):
    """The method that tokenizers of the packages `transformers` and `tokenizers` share."""

    def decode(self, ids: Any, skip_special_tokens: bool = ...) -> Any: ...


class SequenceText(NamedTuple):
    """One sequence as text."""

    prompt: str
    """The tokens before the first sampled token, with special tokens."""
    completion: str
    """The other tokens, without special tokens. A conversation of several turns is one text."""


def sequence_texts(
    tokenizer: Tokenizer, tokens: abc.Sequence[abc.Sequence[int]], mask: abc.Sequence[abc.Sequence[bool]]
) -> list[SequenceText]:
    """Decodes sequences. `mask`: for each token, whether it was sampled."""
    texts = []
    for ids, sampled in zip(tokens, mask, strict=True):
        start = next((place for place, is_sampled in enumerate(sampled) if is_sampled), len(ids))
        prompt = tokenizer.decode(list(ids[:start]), skip_special_tokens=False)
        texts.append(SequenceText(str(prompt), str(tokenizer.decode(list(ids[start:]), skip_special_tokens=True))))
    return texts


@dataclass(frozen=True, eq=False, repr=False)
class TrajectoryGroup:
    """G scored sequences of one prompt. N is the total number of tokens of all sequences.

    A sequence is its prompt followed by its completion. The flat arrays hold the sequences one after the other.

    Mostly each sequence is a rollout. A rollout of an agent may also consist of several sequences, its branches
    (`rollouts`). They have one reward and one advantage, and the loss counts their trained tokens as one sequence. If
    branches share a sampled turn, only one of them has the turn in its mask.
    """

    group_id: str
    run_id: str
    env_id: str
    row: int
    """The permit's row: the dataset row number. The count continues through the epochs."""
    lengths: I32
    """i32[G]: tokens per sequence, prompt included."""
    tokens: I32
    """i32[N]."""
    logprobs: F32
    """f32[N]: log-probability under the sampling distribution at trained positions, 0 elsewhere.
    See `logprobs_known`."""
    mask: Bool
    """bool[N]: True for tokens that were sampled and are trained on."""
    rewards: F32
    """f32[G]: the weighted total. The branches of a rollout have the same reward and the same parts."""
    reward_parts: dict[str, list[float | None]]
    """Unweighted values of each reward by its name, one value per sequence; None if the reward skipped the sequence."""
    finish_reasons: list[str]
    """vLLM's finish reason of each sequence: "stop" or "length"."""
    sampling: SamplingParams
    versions: list[list[VersionSpan]]
    """For each sequence, the weights that sampled each span of the completion."""
    advantages: F32 | None = None
    """f32[N]: advantages that the environment sets. The trainer uses them instead of advantages from the rewards."""
    ref_logprobs: F32 | None = None
    """f32[N]: the reference model's log-probabilities, for a KL penalty."""
    distill_ids: I32 | None = None
    """i32[N*K]: ids of a teacher's K likeliest tokens at each position; -1 fills positions with fewer ids."""
    distill_logprobs: F32 | None = None
    """f32[N*K]: the teacher's log-probabilities of the tokens in `distill_ids`."""
    overrides: dict[str, Any] | None = None
    messages: list[Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    rollouts: I32 | None = None
    """i32[G]: the rollout of each sequence. The first is 0, and each is equal to the one before or higher by 1. None:
    each sequence is a rollout. See `rollout_of`."""

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of(
        cls,
        permit: Permit,
        sequences: abc.Sequence[Sequence],
        *,
        version: PolicyVersion | str,
        sampling: SamplingParams,
        meta: dict[str, Any] | None = None,
    ) -> TrajectoryGroup:
        """Returns the group of a permit: one sequence per rollout, in the order of `sequences`.

        `permit`: as `Client.permits` or `PermitSession` returned it. `version`: the weights that sampled the
        completions, by the model server's label; `Sequence.versions` overrides it. `dataclasses.replace` sets the
        fields that are not here, such as `rollouts`.

        Raises GroupError with the reason, as `decode`. `values["sequence"]` is the number of the sequence if the
        mistake is in one sequence.
        """
        label = str(version)
        return cls(
            group_id=permit.group_id,
            run_id=permit.run_id,
            env_id=permit.holder,
            row=permit.row,
            **fields_of(sequences),
            sampling=sampling,
            versions=[
                [VersionSpan(label, 0, len(one.completion))]
                if one.versions is None
                else [VersionSpan(str(name), start, end) for name, start, end in one.versions]
                for one in sequences
            ],
            meta=meta or {},
        )

    @property
    def size(self) -> int:
        """G, the number of sequences."""
        return len(self.lengths)

    @property
    def rollout_of(self) -> I32:
        """i32[G]: the rollout of each sequence, also without `rollouts`."""
        return np.arange(self.size, dtype=np.int32) if self.rollouts is None else self.rollouts

    @property
    def rollout_starts(self) -> npt.NDArray[np.int64]:
        """i64[R]: the first sequence of each of the R rollouts."""
        return np.flatnonzero(np.diff(self.rollout_of, prepend=-1))

    @property
    def rollout_count(self) -> int:
        """R, the number of rollouts."""
        return self.size if self.rollouts is None else int(self.rollouts[-1]) + 1

    @property
    def rollout_rewards(self) -> F32:
        """f32[R]: the reward of each rollout."""
        return self.rewards[self.rollout_starts]

    @property
    def logprobs_known(self) -> bool:
        """Whether `logprobs` come from the sampler. Some Atropos environments do not record them."""
        return self.meta.get(NO_LOGPROBS) is not True

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest weights that sampled any token of the group."""
        return min(self.policy_versions)

    @property
    def policy_versions(self) -> set[PolicyVersion]:
        """The weights that sampled the group."""
        return set(map(PolicyVersion.parse, {span.version for spans in self.versions for span in spans}))

    def texts(self, tokenizer: Tokenizer) -> list[SequenceText]:
        """Returns prompt and completion of each sequence as text. See `sequence_texts`."""
        ends = np.cumsum(self.lengths)[:-1]
        return sequence_texts(
            tokenizer,
            [part.tolist() for part in np.split(self.tokens, ends)],
            [part.tolist() for part in np.split(self.mask, ends)],
        )

    def __repr__(self) -> str:
        """Returns one short line, because the arrays of a group may hold millions of numbers."""
        rewards = f"{self.rewards.min():.3g}..{self.rewards.max():.3g} (mean {self.rollout_rewards.mean():.3g})"
        branches = "" if self.rollouts is None else f" of {self.rollout_count} rollouts"
        return (
            f"<TrajectoryGroup {self.group_id} of {self.run_id}, row {self.row}: {self.size} sequences{branches}, "
            f"{len(self.tokens)} tokens, rewards {rewards}>"
        )

    def encode(self) -> bytes:
        """Returns the group as bytes of `GROUP_MEDIA_TYPE`.

        Raises GroupError if the fields other than arrays take more than `MAX_OBJECT_BYTES`, or hold an integer of more
        than 64 bits.
        """
        wire = _Wire(
            format=1,
            group_id=self.group_id,
            run_id=self.run_id,
            env_id=self.env_id,
            row=self.row,
            lengths=_bytes(self.lengths, "<i4"),
            tokens=_bytes(self.tokens, "<i4"),
            logprobs=_bytes(self.logprobs, "<f4"),
            mask=np.packbits(self.mask, bitorder="little").tobytes(),
            rewards=_bytes(self.rewards, "<f4"),
            reward_parts=self.reward_parts,
            finish_reasons=self.finish_reasons,
            sampling=self.sampling,
            versions=self.versions,
            advantages=_optional_bytes(self.advantages, "<f4"),
            ref_logprobs=_optional_bytes(self.ref_logprobs, "<f4"),
            distill_ids=_optional_bytes(self.distill_ids, "<i4"),
            distill_logprobs=_optional_bytes(self.distill_logprobs, "<f4"),
            overrides=self.overrides,
            messages=self.messages,
            meta=self.meta or None,
            rollouts=_optional_bytes(self.rollouts, "<i4"),
        )
        try:
            body = _ENCODER.encode(wire)
        except (TypeError, OverflowError) as error:
            raise GroupError("not_plain", f"the group holds a value that msgpack does not have: {error}") from error
        _bound_objects(body)
        return body

    @classmethod
    def decode(cls, body: bytes) -> TrajectoryGroup:
        """Decodes and checks bytes of `GROUP_MEDIA_TYPE`. Raises GroupError with the reason."""
        try:
            _bound_objects(body)
            wire = _DECODER.decode(body)
        except (ValueError, RecursionError) as error:
            raise GroupError("not_a_group", f"not a trajectory group: {error}") from error
        if wire.format != 1:
            raise GroupError("group_format", f"group format {wire.format} is not known here; this side reads format 1")
        tokens = _array(wire.tokens, "<i4", "tokens")
        packed = np.frombuffer(wire.mask, np.uint8)
        if len(packed) != (len(tokens) + 7) // 8:
            raise GroupError(
                "length_mismatch",
                f"mask has {len(packed)} bytes; {len(tokens)} tokens need {(len(tokens) + 7) // 8}",
                field="mask",
            )
        return cls(
            group_id=wire.group_id,
            run_id=wire.run_id,
            env_id=wire.env_id,
            row=wire.row,
            lengths=_array(wire.lengths, "<i4", "lengths"),
            tokens=tokens,
            logprobs=_array(wire.logprobs, "<f4", "logprobs"),
            mask=np.unpackbits(packed, count=len(tokens), bitorder="little").astype(np.bool_),
            rewards=_array(wire.rewards, "<f4", "rewards"),
            reward_parts=wire.reward_parts,
            finish_reasons=wire.finish_reasons,
            sampling=wire.sampling,
            versions=wire.versions,
            advantages=_optional_array(wire.advantages, "<f4", "advantages"),
            ref_logprobs=_optional_array(wire.ref_logprobs, "<f4", "ref_logprobs"),
            distill_ids=_optional_array(wire.distill_ids, "<i4", "distill_ids"),
            distill_logprobs=_optional_array(wire.distill_logprobs, "<f4", "distill_logprobs"),
            overrides=wire.overrides,
            messages=wire.messages,
            meta=wire.meta or {},
            rollouts=_optional_array(wire.rollouts, "<i4", "rollouts"),
        )


def _bound_objects(body: bytes) -> None:
    objects = _OBJECTS.decode(body)
    count = sum(len(memoryview(getattr(objects, name))) for name in objects.__struct_fields__)
    if count > MAX_OBJECT_BYTES:
        names = ", ".join(objects.__struct_fields__)
        raise GroupError(
            "objects_too_large", f"it carries {count} bytes in {names}; at most {MAX_OBJECT_BYTES} are taken"
        )


def _check(group: TrajectoryGroup) -> None:
    if not _ENV_ID.fullmatch(group.env_id):
        raise GroupError("env_id", f"env_id {group.env_id!r} is not 1 to 128 letters, digits, '.', '_', ':' or '-'")
    size, total = len(group.lengths), len(group.tokens)
    if size == 0:
        raise GroupError("no_sequences", "a group needs at least one sequence")
    # Python's integers are faster than numpy's for the few numbers here.
    lengths: list[int] = group.lengths.tolist()
    if min(lengths) < 1:
        raise GroupError("sequence_length", f"sequence lengths must be at least 1, found {min(lengths)}")
    if sum(lengths) != total:
        raise GroupError(
            "length_mismatch", f"lengths sum to {sum(lengths)}, but there are {total} tokens", field="lengths"
        )
    if int(group.tokens.min()) < 0:
        raise GroupError("negative_token", f"token ids must not be negative, found {int(group.tokens.min())}")
    _same("logprobs", len(group.logprobs), total, "tokens")
    _same("mask", len(group.mask), total, "tokens")
    _same("rewards", len(group.rewards), size, "sequences")
    _same("finish_reasons", len(group.finish_reasons), size, "sequences")
    _same("versions", len(group.versions), size, "sequences")
    for name, values in group.reward_parts.items():
        _same(f"reward_parts[{name!r}]", len(values), size, "sequences")
        if not all(value is None or math.isfinite(value) for value in values):
            raise GroupError("not_finite", f"reward_parts[{name!r}] holds NaN or infinity", field="reward_parts")
    for name, flat in (("advantages", group.advantages), ("ref_logprobs", group.ref_logprobs)):
        if flat is not None:
            _same(name, len(flat), total, "tokens")
            _finite(name, flat)
    _finite("rewards", group.rewards)
    if group.rollouts is not None:
        _check_rollouts(group, group.rollouts.tolist())
    _not_positive("logprobs", _finite("logprobs", group.logprobs))
    if not group.mask.any():
        raise GroupError("nothing_trained", "no token of the group is trained (an all-zero mask)")
    if not 0 < group.sampling.temperature < float("inf"):
        raise GroupError("temperature", f"sampling temperature must be positive, found {group.sampling.temperature}")
    if not 0 < group.sampling.top_p <= 1:
        raise GroupError("top_p", f"sampling top_p must be above 0 and at most 1, found {group.sampling.top_p}")
    _check_teacher(group, total)
    starts = np.cumsum([0, *lengths[:-1]])
    trained = np.add.reduceat(group.mask, starts, dtype=np.int64).tolist()
    for index, (spans, length, count) in enumerate(zip(group.versions, lengths, trained, strict=True)):
        _check_spans(index, spans, length, count)
    for name, value in (("overrides", group.overrides), ("messages", group.messages), ("meta", group.meta)):
        if value:
            _check_plain(name, value)


def _check_rollouts(group: TrajectoryGroup, rollouts: list[int]) -> None:
    _same("rollouts", len(rollouts), group.size, "sequences")
    for index, (before, rollout) in enumerate(itertools.pairwise([-1, *rollouts])):
        if rollout < 0 or rollout - before not in (0, 1):
            raise GroupError(
                "rollout_order",
                f"sequence {index} is of rollout {rollout}, after rollout {before}; rollouts count from 0 without gaps",
                sequence=index,
            )
    parts = {f"reward_parts[{name!r}]": values for name, values in group.reward_parts.items()}
    for name, values in {"rewards": group.rewards.tolist(), **parts}.items():
        for index in range(1, len(values)):
            if rollouts[index] == rollouts[index - 1] and values[index] != values[index - 1]:
                raise GroupError(
                    "rollout_rewards",
                    f"{name} differs between sequences {index - 1} and {index}, which are branches of rollout "
                    f"{rollouts[index]}: {values[index - 1]} and {values[index]}",
                    field=name,
                    sequence=index,
                )


def _check_teacher(group: TrajectoryGroup, total: int) -> None:
    ids, logprobs = group.distill_ids, group.distill_logprobs
    if ids is None and logprobs is None:
        return
    entries = [0 if array is None else len(array) for array in (ids, logprobs)]
    if ids is None or logprobs is None or entries[0] != entries[1] or entries[0] % total or not entries[0]:
        raise GroupError(
            "length_mismatch",
            f"distill_ids and distill_logprobs have {entries[0]} and {entries[1]} entries; both need the same number "
            f"for each of {total} tokens",
            field="distill_ids",
        )
    if int(ids.min()) < -1:
        raise GroupError("negative_token", f"distill_ids must be token ids, or -1 for none, found {int(ids.min())}")
    if not np.isfinite(logprobs[ids >= 0]).all():
        raise GroupError("not_finite", "distill_logprobs holds NaN or infinity", field="distill_logprobs")


def _check_plain(name: str, value: object) -> None:
    """Checks that a value is what JSON holds, because readers show it as JSON."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item
            pending += item.values()
            if not all(isinstance(key, str) for key in item):
                raise GroupError("not_plain", f"{name} has a key that is not text", field=name)
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise GroupError("not_finite", f"{name} holds NaN or infinity", field=name)
        elif isinstance(item, str):
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                raise GroupError("not_plain", f"{name} holds half of a surrogate pair, which UTF-8 lacks", field=name)
        elif not (item is None or isinstance(item, bool | int)):
            raise GroupError("not_plain", f"{name} holds {type(item).__name__}, which JSON does not have", field=name)


def check_submitted(group: TrajectoryGroup) -> None:
    """Checks `overrides`, `messages` and `meta` of a new group for the readers of runs, and the log-probabilities of
    other models.

    `decode` does not check this, because a store may have groups from before these checks. Raises GroupError.
    """
    if group.ref_logprobs is not None:
        _not_positive("ref_logprobs", float(group.ref_logprobs[group.mask].max()))
    if group.distill_ids is not None and group.distill_logprobs is not None:
        trained = group.distill_logprobs.reshape(len(group.mask), -1)[group.mask]
        taught = trained[group.distill_ids.reshape(len(group.mask), -1)[group.mask] >= 0]
        _not_positive("distill_logprobs", float(taught.max(initial=0)))
    for name, value in (("overrides", group.overrides), ("messages", group.messages), ("meta", group.meta)):
        if value and is_deeper(value, MAX_DEPTH):
            raise GroupError(
                "too_deep", f"{name} has more than {MAX_DEPTH} lists and objects inside each other", field=name
            )
    if not group.messages:
        return
    _same("messages", len(group.messages), group.size, "sequences")
    for index, conversation in enumerate(group.messages):
        if not isinstance(conversation, list | tuple) or not all(map(_is_message, conversation)):
            raise GroupError(
                "not_messages",
                f"messages[{index}] is not a conversation: a list of objects, each with a text `role`",
                field="messages",
                sequence=index,
            )


def is_deeper(value: object, most: int) -> bool:
    """Returns whether a value has more than `most` lists and objects inside each other."""
    level: list[Any] = [value]
    for _ in range(most + 1):
        level = [one for one in level if isinstance(one, dict | list | tuple)]
        if not level:
            return False
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return True


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _check_spans(index: int, spans: list[VersionSpan], length: int, trained: int) -> None:
    """`trained`: tokens of the sequence that are trained on."""
    if not spans:
        raise GroupError("no_version", f"sequence {index} does not name a policy version", sequence=index)
    end = 0
    for span in spans:
        try:
            PolicyVersion.parse(span.version)
        except ValueError as error:
            raise GroupError("not_a_version", f"sequence {index}: {error}", sequence=index) from error
        # A sequence without a trained token has one span of no token.
        if not end <= span.start <= span.end <= length or (span.start == span.end and (trained or len(spans) > 1)):
            raise GroupError(
                "version_span",
                f"sequence {index}: version span [{span.start}, {span.end}) is empty, overlaps the span before it, or "
                f"is outside its {length} tokens",
                sequence=index,
            )
        end = span.end
    if (covered := sum(span.end - span.start for span in spans)) < trained:
        raise GroupError(
            "version_span",
            f"sequence {index}: its version spans name {covered} tokens, but {trained} are trained on",
            sequence=index,
        )


def _same(name: str, found: int, wanted: int, unit: str) -> None:
    if found != wanted:
        raise GroupError("length_mismatch", f"{name} has {found} entries for {wanted} {unit}", field=name)


def _finite(name: str, values: F32) -> float:
    """Returns the highest value. Raises GroupError for NaN or infinity. One NaN makes both min() and max() NaN."""
    lowest, highest = float(values.min()), float(values.max())
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise GroupError("not_finite", f"{name} holds NaN or infinity", field=name)
    return highest


def _not_positive(name: str, highest: float) -> None:
    """`highest`: the highest of some log-probabilities. The rounding of log 1 may be positive."""
    if highest > 1e-3:
        raise GroupError(
            "positive_logprob", f"log-probabilities must not be positive, found {highest:.4f} in {name}", field=name
        )


def _bytes(array: npt.NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _optional_bytes(array: npt.NDArray[Any] | None, dtype: str) -> bytes | None:
    return None if array is None else _bytes(array, dtype)


def _array(raw: bytes, dtype: str, name: str) -> npt.NDArray[Any]:
    if len(raw) % 4:
        raise GroupError("length_mismatch", f"{name} has {len(raw)} bytes, not a multiple of 4", field=name)
    return np.frombuffer(raw, dtype)


def _optional_array(raw: bytes | None, dtype: str, name: str) -> npt.NDArray[Any] | None:
    return None if raw is None else _array(raw, dtype, name)
