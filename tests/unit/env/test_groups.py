"""From a rollout to a group: alignment of every array, and when there must be none."""

from __future__ import annotations

import numpy as np
import pytest

from gristmill import Permit, SamplingParams, TrajectoryGroup, VersionSpan
from gristmill_env.data.dataset import Item
from gristmill_env.drops import DropReason
from gristmill_env.groups import build_group, drop_reason
from gristmill_env.inference import Completion
from gristmill_env.inference.wire import LabelSpan
from gristmill_env.prompts import Prompt
from gristmill_env.rewards import Score
from gristmill_env.rollout import Rollout
from gristmill_env.tally import Tally
from gristmill_env.versions import UnpublishedWeightsError, version_spans


def completion(*tokens: int, labels: tuple[tuple[str, int, int], ...] = ()) -> Completion:
    return Completion(list(tokens), [-token / 10 for token in tokens], "stop", [LabelSpan(*span) for span in labels])


def rollout(*scores: Score, completions: list[Completion] | None = None) -> Rollout:
    return Rollout(
        item=Item(row=12, index=2, prompt="?", answer="1", columns={}),
        prompt=Prompt("?", (100, 101, 102)),
        sampling=SamplingParams(temperature=0.7, max_tokens=4),
        completions=completions or [completion(1) for _ in scores],
        texts=["" for _ in scores],
        scores=list(scores),
    )


def scored(*totals: float) -> Rollout:
    return rollout(*(Score(total, {"length": total}) for total in totals))


def test_a_group_holds_the_tokens_as_they_were_sent_and_sampled() -> None:
    made = rollout(
        Score(0.25, {"length": 0.25, "accuracy": None}),
        Score(1.0, {"length": 1.0, "accuracy": 1.0}),
        completions=[completion(1, 2), completion(3)],
    )
    spans = [[VersionSpan("1.3", 0, 2)], [VersionSpan("1.4", 0, 1)]]
    sent = build_group(made, Permit(group_id="g00000012", row=12), "sums", "host-1", spans)
    group = TrajectoryGroup.decode(sent.encode())
    assert group.lengths.tolist() == [5, 4]
    assert group.tokens.tolist() == [100, 101, 102, 1, 2, 100, 101, 102, 3]
    assert group.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True]
    assert group.logprobs == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0, 0, -0.3])
    assert group.rewards.tolist() == [0.25, 1.0]
    assert group.reward_parts == {"length": [0.25, 1.0], "accuracy": [None, 1.0]}
    assert (group.group_id, group.row, group.run_id, group.env_id) == ("g00000012", 12, "sums", "host-1")
    assert group.sampling == SamplingParams(temperature=0.7, max_tokens=4)
    assert str(group.oldest_version) == "1.3"
    assert group.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("totals", "reason"),
    [
        ((1.0, 1.0), DropReason.SAME_SCORES),
        ((0.1 + 0.2, 0.3), DropReason.SAME_SCORES),
        ((0.0, 1e-3), None),
        ((1.0,), None),
    ],
)
def test_groups_of_one_score_are_dropped(totals: tuple[float, ...], reason: DropReason | None) -> None:
    assert drop_reason(scored(*totals), ensure_scores_are_not_same=True) is reason
    assert drop_reason(scored(*totals), ensure_scores_are_not_same=False) is None


def test_a_failed_or_missing_score_drops_the_group() -> None:
    good, failed, silent = Score(1.0, {"a": 1.0}), Score(None, {"a": None}, error="a: boom"), Score(None, {"a": None})
    for same in (True, False):
        assert drop_reason(rollout(good, failed), ensure_scores_are_not_same=same) is DropReason.REWARD_ERROR
        assert drop_reason(rollout(good, silent), ensure_scores_are_not_same=same) is DropReason.NO_SCORE


def test_the_servers_labels_become_version_spans() -> None:
    spans = version_spans(completion(1, 2, 3, labels=(("1.3", 0, 2), ("1.4", 2, 3))), "1.3", published=True)
    assert spans == [VersionSpan("1.3", 0, 2), VersionSpan("1.4", 2, 3)]


@pytest.mark.parametrize("labels", [(("default", 0, 1),), (("1.3", 0, 1), ("default", 1, 2)), ()])
def test_tokens_of_unpublished_weights_are_not_taken(labels: tuple[tuple[str, int, int], ...]) -> None:
    with pytest.raises(UnpublishedWeightsError):
        version_spans(completion(1, 2, labels=labels), "1.3", published=True)
    assert version_spans(completion(1, 2, labels=labels), "1.3", published=False) == [VersionSpan("1.3", 0, 2)]


def test_a_hint_when_nearly_all_groups_score_the_same(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    for number in range(200):
        tally.add(None if number % 20 == 0 else DropReason.SAME_SCORES)
    hints = [record.getMessage() for record in caplog.records]
    assert 1 <= len(hints) <= 4  # said again now and then, not with every group
    assert "dropped as same_scores" in hints[0]
    assert "nothing to learn from" in hints[0]
    assert str(tally) == "10 groups submitted, 190 same_scores dropped"


def test_no_hint_when_groups_get_through(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    for number in range(200):
        tally.add(None if number % 3 == 0 else DropReason.SAME_SCORES)
    assert caplog.records == []
