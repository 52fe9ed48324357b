"""Which rollouts are kept for reading."""

from __future__ import annotations

import pytest
from tests.support.groups import make_group
from tests.support.rollouts import Said, rollout_of

from gristmill_env.data import user
from gristmill_env.inference import Completion
from gristmill_env.rollouts.prompts import Prompt
from gristmill_env.tracking import Rollouts, in_words

pytestmark = pytest.mark.slow

REWARDS = (0.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("keep", "per_group", "kept"),
    [
        (32, 1, ["0:0.0", "1:0.0", "2:0.0"]),
        (32, 2, ["0:0.0", "0:1.0", "1:0.0", "1:1.0", "2:0.0", "2:1.0"]),
        (32, 9, [f"{number}:{reward}" for number in range(3) for reward in REWARDS]),
        (32, -1, [f"{number}:{reward}" for number in range(3) for reward in REWARDS]),
        (4, -1, ["1:0.5", "2:0.0", "2:1.0", "2:0.5"]),
        (2, 1, ["1:0.0", "2:0.0"]),
        (0, -1, []),
        (32, 0, []),
    ],
)
def test_kept_rollouts_are_the_first_of_each_group_and_the_latest(keep: int, per_group: int, kept: list[str]) -> None:
    rollouts = Rollouts(keep, per_group)
    for number in range(3):
        group = make_group(f"g{number:08}", lengths=[(2, 3)] * 3, rewards=REWARDS, version=f"1.{number}")
        rollouts.add(group, [f"{number}:{reward}" for reward in REWARDS])
    rows = rollouts.take()
    assert [row[0] for row in rows] == kept
    for text, score, group_id, version in rows:
        row, reward = text.split(":")
        assert (score, group_id, version) == (float(reward), f"g{int(row):08}", f"1.{row}")
    assert rollouts.take() == []


def test_texts_that_do_not_match_the_group_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Rollouts(32, 1).add(make_group(), ["one"])


def test_in_words_shows_the_prefill_once() -> None:
    prompt = Prompt("Q: 1 + 1? A: It is", (1, 2), (user("1 + 1?"),), prefill=" It is", begun=" It is")
    rollout = rollout_of(prompt, Said(Completion([3], [-1.0], "stop", []), " It is 2."))
    assert in_words(rollout) == "Q: 1 + 1? A: It is 2."


def test_in_words_shows_all_turns_of_a_conversation() -> None:
    rollout = rollout_of(
        Prompt("Q: guess A:", (1, 2), (user("guess"),)),
        Said(Completion([3], [-1.0], "stop", []), "4"),
        Said(Completion([6], [-1.0], "stop", []), "7", [user("more")], [5]),
    )
    assert in_words(rollout) == "user: guess\nassistant: 4\nuser: more\nassistant: 7"
