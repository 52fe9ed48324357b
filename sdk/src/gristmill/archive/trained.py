"""The trainer's records of the groups of each step: `<run>/trained/000001.gmz`, ..., in the format of the archive.

The archive has the group as it was submitted. A record here has the trainer's half: the step, the outcome of each
sequence, and for each trained token its log-probability under the trainer's policy, its advantage and its entropy. A
group that is delivered again, because its step was not saved, has several records; the last one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.errors import GristmillError

TRAINED_FOLDER: Final = "trained"
TOKENIZER_FOLDER: Final = "tokenizer"
"""Folder in TRAINED_FOLDER with the tokenizer of the run's model, so that the run's folder alone gives the texts."""
TRAINED_SCHEMA: Final = "trained-group"
TRAINED: Final = "trained"
NOT_RECORDED: Final = "not_recorded"
"""Outcome of a group whose details were left out, because the disk was slower than the training."""

F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class _WireSequence(msgspec.Struct, array_like=True):
    outcome: str
    tokens: int
    mask: bytes
    logprobs: bytes
    advantages: bytes
    entropy: bytes | None


class _Wire(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: int = 1
    group_id: str
    step: int
    version: str
    outcome: str | None = None
    sequences: dict[int, _WireSequence] = {}


@dataclass(frozen=True, eq=False)
class TrainedSequence:
    """One sequence of a step. L: its tokens, prompt included, up to seq_len; M: its trained tokens."""

    outcome: str
    """"trained", or the reason for not training on it, such as "overlong_filtered"."""
    mask: Bool
    """bool[L]: the tokens in the loss."""
    logprobs: F32 | None
    """f32[M]: log-probabilities of the trained tokens under the policy before the step's first update."""
    advantages: F32
    """f32[M], or f32[1] if all tokens have the same advantage, or f32[0] if no token is trained."""
    entropy: F32 | None
    """f32[M]: entropy of the policy at the trained tokens, nats."""

    @property
    def token_advantages(self) -> F32:
        """f32[M]: the advantage of each trained token."""
        count = int(self.mask.sum())
        return np.broadcast_to(self.advantages, count) if len(self.advantages) == 1 else self.advantages


@dataclass(frozen=True, eq=False)
class TrainedGroup:
    """A group in one step."""

    group_id: str
    step: int
    version: str
    """Policy version of the weights that the step produced."""
    outcome: str | None
    """The reason why the whole group was not trained on, `NOT_RECORDED`, or None: `sequences` has the outcomes."""
    sequences: dict[int, TrainedSequence]
    """By the sequence's index in the group."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            _Wire(
                group_id=self.group_id,
                step=self.step,
                version=self.version,
                outcome=self.outcome,
                sequences={
                    index: _WireSequence(
                        outcome=one.outcome,
                        tokens=len(one.mask),
                        mask=np.packbits(one.mask, bitorder="little").tobytes(),
                        logprobs=b"" if one.logprobs is None else one.logprobs.astype("<f4").tobytes(),
                        advantages=one.advantages.astype("<f4").tobytes(),
                        entropy=None if one.entropy is None else one.entropy.astype("<f4").tobytes(),
                    )
                    for index, one in self.sequences.items()
                },
            )
        )

    @classmethod
    def decode(cls, body: bytes) -> TrainedGroup:
        """Raises GristmillError for other bytes."""
        try:
            wire = _DECODER.decode(body)
        except ValueError as error:
            raise GristmillError("not_a_trained_group", f"not a trained group: {error}") from error
        if wire.format != 1:
            raise GristmillError(
                "trained_group_format",
                f"this trained group has format {wire.format}; this gristmill reads format 1",
                format=wire.format,
            )
        return cls(
            group_id=wire.group_id,
            step=wire.step,
            version=wire.version,
            outcome=wire.outcome,
            sequences={index: _sequence(one) for index, one in wire.sequences.items()},
        )


_DECODER = msgspec.msgpack.Decoder(_Wire)


def _sequence(wire: _WireSequence) -> TrainedSequence:
    mask = np.unpackbits(np.frombuffer(wire.mask, np.uint8), count=wire.tokens, bitorder="little").astype(np.bool_)
    return TrainedSequence(
        outcome=wire.outcome,
        mask=mask,
        logprobs=np.frombuffer(wire.logprobs, "<f4") if wire.logprobs else None,
        advantages=np.frombuffer(wire.advantages, "<f4"),
        entropy=None if wire.entropy is None else np.frombuffer(wire.entropy, "<f4"),
    )
