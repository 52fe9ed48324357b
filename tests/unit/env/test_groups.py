"""From scored rollouts to a group: alignment of every array, and rollouts that make no group."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.errors import raises
from tests.support.rollouts import Said, rollout_of

from gristmill import Permit, SamplingParams, TrajectoryGroup, VersionSpan
from gristmill_env.data import user
from gristmill_env.data.dataset import Item
from gristmill_env.errors import DropReason, EnvError, UnpublishedWeightsError
from gristmill_env.inference import Completion
from gristmill_env.inference.types import LabelSpan
from gristmill_env.progress import Tally
from gristmill_env.rewards import CorrectnessReward, Score, create_reward
from gristmill_env.rewards.reward import FunctionReward
from gristmill_env.rollouts.groups import (
    Rollout,
    RolloutGroup,
    build_group,
    drop_reason,
    trainable,
    version_spans,
)
from gristmill_env.rollouts.prompts import Prompt


def completion(*tokens: int, labels: tuple[tuple[str, int, int], ...] = ()) -> Rollout:
    """Returns a rollout of one reply."""
    logprobs = [-token / 10 for token in tokens]
    reply = Completion(list(tokens), logprobs, "stop", [LabelSpan(*span) for span in labels])
    return rollout_of(Prompt("?", (100, 101, 102), (user("?"),)), Said(reply, "text"))


def rollout_group(*scores: Score, completions: list[Rollout] | None = None) -> RolloutGroup:
    return RolloutGroup(
        item=Item(row=12, index=2, prompt="?", answer="1"),
        sampling=SamplingParams(temperature=0.7, max_tokens=4),
        rollouts=completions or [completion(1) for _ in scores],
        scores=list(scores),
        seconds=0.1,
    )


def scored(*totals: float) -> RolloutGroup:
    return rollout_group(*(Score(total, {"length": total}) for total in totals))


def test_group_holds_the_prompt_tokens_and_the_sampled_tokens() -> None:
    made = rollout_group(
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
def test_groups_with_equal_scores_are_dropped(totals: tuple[float, ...], reason: DropReason | None) -> None:
    assert drop_reason(scored(*totals), least=min(2, len(totals)), ensure_scores_are_not_same=True) is reason
    assert drop_reason(scored(*totals), least=min(2, len(totals)), ensure_scores_are_not_same=False) is None


GOOD, BAD = Score(1.0, {"a": 1.0}), Score(0.0, {"a": 0.0})
FAILED, SILENT = Score(None, {"a": None}, error="a: boom"), Score(None, {"a": None})


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ((GOOD, FAILED), DropReason.REWARD_ERROR),
        ((GOOD, SILENT), DropReason.NO_SCORE),
        ((FAILED,), DropReason.REWARD_ERROR),
        ((SILENT,), DropReason.NO_SCORE),
        ((SILENT, FAILED, GOOD), DropReason.REWARD_ERROR),
    ],
)
def test_a_group_with_fewer_than_two_scores_is_dropped(scores: tuple[Score, ...], reason: DropReason) -> None:
    for same in (True, False):
        assert drop_reason(rollout_group(*scores), least=2, ensure_scores_are_not_same=same) is reason


def test_group_drops_unscored_completions_and_trains_the_rest() -> None:
    made = rollout_group(GOOD, FAILED, BAD, SILENT, completions=[completion(number) for number in (1, 2, 3, 4)])
    assert drop_reason(made, least=2, ensure_scores_are_not_same=True) is None
    spans = [[VersionSpan(f"1.{number}", 0, 1)] for number in range(4)]
    group = build_group(made, Permit(group_id="g00000012", row=12), "sums", "host-1", spans)
    assert group.tokens.tolist() == [100, 101, 102, 1, 100, 101, 102, 3]
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.reward_parts == {"a": [1.0, 0.0]}
    assert [spans[0].version for spans in group.versions] == ["1.0", "1.2"]


def test_group_with_fewer_scores_than_the_least_number_is_dropped() -> None:
    made = rollout_group(GOOD, BAD, FAILED)
    assert drop_reason(made, least=3, ensure_scores_are_not_same=True) is DropReason.REWARD_ERROR
    assert drop_reason(made, least=2, ensure_scores_are_not_same=True) is None


def test_group_with_equal_scores_among_scored_completions_is_dropped() -> None:
    assert (
        drop_reason(rollout_group(GOOD, FAILED, GOOD), least=2, ensure_scores_are_not_same=True)
        is DropReason.SAME_SCORES
    )


def test_rollout_with_nothing_to_train_on_is_left_out_of_its_group() -> None:
    reply = Completion([7], [-1.0], "stop", [])
    untrained = rollout_of(Prompt("?", (100,), (user("?"),)), Said(reply, "no", trained=False))
    made = rollout_group(GOOD, BAD, GOOD, completions=[completion(1), untrained, completion(3)])
    assert trainable(made) == [0, 2]


def test_group_of_several_turns_trains_only_sampled_tokens() -> None:
    last = [LabelSpan("1.4", 0, 1), LabelSpan("1.5", 1, 2)]
    rollout = rollout_of(
        Prompt("?", (100, 101), (user("?"),)),
        Said(Completion([1, 2], [-0.1, -0.2], "stop", [LabelSpan("1.3", 0, 2)]), "one"),
        Said(
            Completion([3], [-0.3], "stop", [LabelSpan("1.4", 0, 1)]), "two", [user("Lower.")], [50, 51, 52],
            trained=False,
        ),
        Said(Completion([4, 5], [-0.4, -0.5], "length", last), "3", [user("Higher.")], [53]),
    )  # fmt: skip
    made = rollout_group(GOOD, BAD, completions=[rollout, completion(9, labels=(("1.4", 0, 1),))])
    versions = [version_spans(one, "1.5", published=True) for one in made.rollouts]
    permit = Permit(group_id="g00000012", row=12)
    group = build_group(made, permit, "sums", "host-1", versions, include_messages=True)
    assert group.tokens.tolist()[:10] == [100, 101, 1, 2, 50, 51, 52, 3, 53, 4]
    assert group.mask.tolist()[:11] == [False, False, True, True, False, False, False, False, False, True, True]
    assert group.logprobs[:11] == pytest.approx([0, 0, -0.1, -0.2, 0, 0, 0, 0, 0, -0.4, -0.5])
    assert group.versions[0] == [
        VersionSpan("1.3", 0, 2), VersionSpan("1.4", 5, 6), VersionSpan("1.4", 7, 8), VersionSpan("1.5", 8, 9)
    ]  # fmt: skip
    assert group.messages is not None
    assert [message["content"] for message in group.messages[0]] == ["?", "one", "Lower.", "two", "Higher.", "3"]
    assert (rollout.replies, rollout.sampled, rollout.text) == (3, 5, "3")


def test_group_leaves_out_messages_above_the_size_limit(caplog: pytest.LogCaptureFixture) -> None:
    reply = Completion([7], [-1.0], "stop", [LabelSpan("1.3", 0, 1)])
    huge = rollout_of(Prompt("?", (100,), (user("x" * 600_000),)), Said(reply, "no"))
    made = rollout_group(GOOD, BAD, completions=[huge, completion(1)])
    spans = [[VersionSpan("1.3", 0, 1)]] * 2
    permit = Permit(group_id="g00000012", row=12)
    assert build_group(made, permit, "sums", "host-1", spans, include_messages=True).messages is None
    assert [record.name for record in caplog.records] == ["gristmill_env.rollouts.groups"]
    assert f"row {made.item.index} " in caplog.text


def test_the_servers_labels_become_version_spans() -> None:
    spans = version_spans(completion(1, 2, 3, labels=(("1.3", 0, 2), ("1.4", 2, 3))), "1.3", published=True)
    assert spans == [VersionSpan("1.3", 0, 2), VersionSpan("1.4", 2, 3)]


@pytest.mark.parametrize(
    ("labels", "code"),
    [
        ((("default", 0, 1),), "weights_unpublished"),
        ((("1.3", 0, 1), ("default", 1, 2)), "weights_unpublished"),
        ((("1.3", 0, 1),), "weight_label_missing"),
        ((), "weight_label_missing"),
    ],
)
def test_version_spans_refuse_tokens_of_unpublished_weights(
    labels: tuple[tuple[str, int, int], ...], code: str
) -> None:
    with raises(UnpublishedWeightsError, code) as raised:
        version_spans(completion(1, 2, labels=labels), "1.3", published=True)
    assert isinstance(raised.value, EnvError), "logged in one line, not as a traceback"
    assert version_spans(completion(1, 2, labels=labels), "1.3", published=False) == [VersionSpan("1.3", 0, 2)]


@pytest.mark.parametrize("reason", DropReason)
def test_tally_logs_a_hint_if_nearly_all_groups_are_dropped(
    reason: DropReason, caplog: pytest.LogCaptureFixture
) -> None:
    tally = Tally()
    for number in range(200):
        tally.add(None if number % 20 == 0 else reason)
    hints = [record.args for record in caplog.records]
    assert 1 <= len(hints) <= 4  # logged from time to time, not for every group
    assert all(reason.value in (hint or ()) for hint in hints)
    assert str(tally) == f"10 groups submitted, 190 {reason} dropped"


def test_tally_names_the_rollouts_that_were_left_out() -> None:
    tally = Tally()
    tally.add(None)
    assert "rollouts" not in str(tally)
    tally.failed_rollouts += 3
    assert "3 rollouts failed" in str(tally)


def test_tally_logs_no_hint_if_groups_are_submitted(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    for number in range(200):
        tally.add(None if number % 3 == 0 else DropReason.SAME_SCORES)
    assert caplog.records == []


def test_tally_ends_a_run_whose_rewards_fail_on_every_row_with_the_first_error() -> None:
    tally = Tally()
    tally.add(DropReason.REWARD_ERROR, "an error before a row with scores")
    tally.add(DropReason.SAME_SCORES)
    for row in range(64):
        tally.check(None)
        tally.add(DropReason.REWARD_ERROR, f"judge: KeyError: 'verdict' of row {row}")
    with raises(EnvError, "every_row_fails", rows=64, reasons=["reward_error"]) as raised:
        tally.check(None)
    assert "judge: KeyError: 'verdict' of row 0" in str(raised.value)
    tally.check(7)  # ten steps' worth of rows are more


def test_tally_ends_a_run_with_the_name_of_a_source_whose_rows_all_fail() -> None:
    tally = Tally()
    for row in range(64):
        tally.check(None)
        tally.add(None, source="sums")
        tally.add(DropReason.BAD_ROW, f"row {row}", "words")
    with raises(EnvError, "every_row_fails", rows=64, reasons=["bad_row"], source="words"):
        tally.check(None)
    assert {name: dict(counts) for name, counts in tally.by_source.items()} == {
        "sums": {"submitted": 64}, "words": {"dropped": 64}
    }  # fmt: skip


def own_extraction(completion: str, row: Mapping[str, Any], **_: Any) -> str | None:
    raise AssertionError("a user's extraction must not run on the event loop")


def test_group_carries_the_answers_and_times_of_the_table_of_rollouts() -> None:
    made = rollout_group(Score(0.0, {"accuracy": 0.0}), Score(1.0, {"accuracy": 1.0}))
    spans = [[VersionSpan("1.3", 0, 1)]] * 2
    permit = Permit(group_id="g00000012", row=12)
    accuracy = create_reward("accuracy")
    correctness = CorrectnessReward("accuracy", accuracy, compares=True)
    texts = [replace(one, text=text) for one, text in zip(made.rollouts, ("#### 41", "so 7"), strict=True)]
    made = replace(made, rollouts=texts)
    meta = TrajectoryGroup.decode(build_group(made, permit, "r", "e", spans, correctness=correctness).encode()).meta
    assert (meta["answer"], meta["extracted"], meta["seconds"]) == ("1", ["41", None], 0.1)
    assert abs(meta["submitted_ms"] / 1000 - time.time()) < 60
    assert isinstance(accuracy, FunctionReward)
    users = CorrectnessReward("own", replace(accuracy, extract_answer=own_extraction), compares=True)
    assert "extracted" not in build_group(made, permit, "r", "e", spans, correctness=users).meta
    long = replace(made, rollouts=[replace(one, text=one.text + " " * 30_000) for one in texts])
    assert build_group(long, permit, "r", "e", spans, correctness=correctness).meta["extracted"] == [None, None]
    unreadable = replace(made, item=replace(made.item, columns={"choices": "A) x B) y"}))
    choices = CorrectnessReward("mcq", create_reward("mcq"), compares=True)
    assert build_group(unreadable, permit, "r", "e", spans, correctness=choices).meta["extracted"] == [None, None]
