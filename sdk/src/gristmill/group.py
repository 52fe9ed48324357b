"""The trajectory group, which the environment sends, the API stores and the trainer trains on.

On the wire a group is one msgpack map whose arrays are raw little-endian bytes, so that readers never build Python
lists of tokens. A group of 16 x 4096 tokens takes 0.1 ms, compared with 60 ms as JSON. The media type and the `format`
key give the version of the format. Readers ignore unknown keys.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.errors import GroupError
from gristmill.group_checks import check
from gristmill.policy_version import PolicyVersion, VersionSpan
from gristmill.sequence import Sequence, fields_of

if TYPE_CHECKING:
    from gristmill.run import Permit

GROUP_MEDIA_TYPE = "application/vnd.gristmill.group.v1+msgpack"
BATCH_MEDIA_TYPE = "application/vnd.gristmill.batch.v1+msgpack"

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of the completions. The trainer divides its logits by `temperature`."""

    temperature: float
    top_p: float = 1.0
    max_tokens: int


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

NO_LOGPROBS = "no_logprobs"
"""Key of `meta`: True if the sampler's log-probabilities were not recorded. `logprobs` are zeros then."""

SOURCE = "source"
"""Key of `meta`: the name of the source of the run from which the group's row is, if the run has several."""

TOOLS = "tools"
"""Key of `meta`: the tools of the prompts, in OpenAI's form, if the group has messages and each has the same tools."""

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
        check(self)

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
