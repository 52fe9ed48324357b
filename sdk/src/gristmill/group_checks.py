"""The checks of a trajectory group: those of every group, and those of a group that is submitted."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gristmill.errors import GroupError
from gristmill.policy_version import PolicyVersion, VersionSpan

if TYPE_CHECKING:
    from gristmill.group import TrajectoryGroup

MAX_DEPTH = 64
"""Most lists and objects inside each other that a submitted group may have in one of its fields. Python and pydantic
end at a few hundred."""

_ENV_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def check(group: TrajectoryGroup) -> None:
    """Checks what holds for every group, new or stored. Raises GroupError."""
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


def _finite(name: str, values: npt.NDArray[np.float32]) -> float:
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
