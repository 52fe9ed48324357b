"""The best and the worst rollout of some steps, read straight from a run's archive.

A report shows a dozen completions. The table of rollouts has them too, but making the table decodes every completion of
the run. This module reads the trainer's small records, and decodes only the groups of the chosen steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.archive import segment
from gristmill.archive.trained import TrainedGroup
from gristmill.folders import RunFolder
from gristmill_view.rows import Submitted, Texts, new_frames, read_submitted, step_without_record

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Found:
    """One rollout of a group, as the last of its branches."""

    group: Submitted
    sequence: int

    @property
    def reward(self) -> float:
        return float(self.group.rewards[self.sequence])


def highlights(run: RunFolder, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Returns {"step", "rows"} for each of the steps of which the archive has a completion with a text.

    `rows`: the rollout with the highest reward, and the rollout with the lowest if it is another one.
    """
    ends = _ends(run, steps)
    texts = Texts(run.tokenizer()) if ends else None
    chosen = []
    for step in sorted(ends):
        rows = [_row(one, texts) for one in ends[step] if texts is not None]
        rows = [row for row in rows if row["completion"] is not None]
        if rows:
            chosen.append({"step": step, "rows": rows})
    return chosen


def _ends(run: RunFolder, steps: Sequence[int]) -> dict[int, list[_Found]]:
    """Returns the best and the worst rollout of each step; one of them if both are the same."""
    wanted = frozenset(steps)
    recorded, record = _recorded(run, wanted), run.record()
    newest = 0 if record is None else record.created_ms
    best: dict[int, _Found] = {}
    worst: dict[int, _Found] = {}
    for _, _, created_ms, frames, head in new_frames(run.archive_segments()):
        if created_ms > newest:  # The run was deleted and created again: its earlier groups do not count.
            newest = created_ms
            best, worst = {}, {}
        elif created_ms < newest:
            continue
        known = recorded.get(created_ms)
        if known is not None and segment.parse_id(frames, head) not in known:
            continue
        group = read_submitted(segment.parse(frames, head), run.run_id)
        step = step_without_record(group.oldest_step, record, created_ms) if known is None else known[group.group_id]
        if step is None or step not in wanted:
            continue
        last = {rollout: sequence for sequence, rollout in enumerate(group.rollout_of)}
        for sequence in last.values():
            one = _Found(group, sequence)
            if step not in best or one.reward > best[step].reward:
                best[step] = one
            if step not in worst or one.reward < worst[step].reward:
                worst[step] = one
    return {
        step: [best[step], worst[step]] if worst[step].reward < best[step].reward else [best[step]] for step in best
    }


def _recorded(run: RunFolder, steps: Collection[int]) -> Mapping[int, Mapping[str, int]]:
    """Returns the step of each group that was trained at one of the steps, for each creation that has records."""
    recorded: dict[int, dict[str, int]] = {}
    for _, _, created_ms, frames, head in new_frames(run.trained_segments()):
        of_creation = recorded.setdefault(created_ms, {})
        record = TrainedGroup.decode(segment.parse(frames, head).body)
        if record.step in steps:
            of_creation[record.group_id] = record.step
        else:  # The last record of a group counts.
            of_creation.pop(record.group_id, None)
    return recorded


def _row(one: _Found, texts: Texts) -> dict[str, Any]:
    group, sequence = one.group, one.sequence
    tokens, start = group.tokens[sequence], group.prompt_lengths[sequence]
    (completion,) = texts.completions([tokens[start:]])
    return {
        "group_id": group.group_id,
        "sequence": sequence,
        "rollout": group.rollout_of[sequence],
        "prompt": texts.prompt(tokens[:start]),
        "completion": completion,
        "completion_tokens": len(tokens) - start,
        "reward": one.reward,
        "reward_parts": {name: values[sequence] for name, values in group.parts.items()},
        "finish_reason": None if group.finish_reasons is None else group.finish_reasons[sequence],
        "answer": group.answer,
        **({"extracted": group.extracted[sequence]} if group.answer_searched else {}),
    }
