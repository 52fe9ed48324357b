"""reasoning_steps: which text marks a step, which does not, and that one step counts once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scoring import scored

ONE = [
    "1. Add 20 and 5.",
    "2) Add 20 and 5.",
    "  12. Add 20 and 5.",
    "- Add 20 and 5.",
    "* Add 20 and 5.",
    "• Add 20 and 5.",
    "> - Add 20 and 5.",
    "Step 1: add 20 and 5.",
    "Step 1. Add 20 and 5.",
    "step 1 is to add 20 and 5.",
    "STEP 1",
    "**Step 1:** add 20 and 5.",
    "## Step 1",
    "**First**, add 20 and 5.",
    "First, add 20 and 5.",
    "Firstly we add 20 and 5.",
    "Second, add 5.",
    "Third, add 5.",
    "Next we add 5.",
    "Then add 5.",
    "After that, add 5.",
    "Finally, the sum is 25.",
    "Lastly, the sum is 25.",
    "We have 20. Then we add 5.",
    "1. First, add 20 and 5.",
    "- Step 1: add 20 and 5.",
    "Step 1. First, add 20 and 5.",
]

NONE = [
    "",
    "25",
    "The answer is 25.",
    "We first add 20, then 5, and finally 1.",
    "In step 1 we add.",
    "3.14 is pi.",
    "20.",
    "-5 + 30 = 25",
    "**25**",
    "---",
    "* * *",
    "firstborn",
    "Nextel is a name.",
    "Thence it follows.",
    "Steps: none",
    "1234. is not a number of a line",
]


@pytest.mark.parametrize("text", ONE)
def test_these_mark_one_step(text: str) -> None:
    assert scored("reasoning_steps", {"min_steps": 2}, text) == 0.5


@pytest.mark.parametrize("text", NONE)
def test_these_mark_none(text: str) -> None:
    assert scored("reasoning_steps", {"min_steps": 2}, text) == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("1. Add.\n2. Subtract.", 2 / 3),
        ("1. Add.\n2. Subtract.\n3. Done.", 1.0),
        ("First, add. Next, subtract. Then, done. Finally, check.", 1.0),
        ("Step 1: add.\nStep 2: subtract.", 2 / 3),
        ("1. Add 20. Then add 5.", 2 / 3),
    ],
)
def test_three_are_wanted_where_nothing_else_is_said(text: str, score: float) -> None:
    assert scored("reasoning_steps", {}, text) == pytest.approx(score)


@given(text=st.text(max_size=60), other=st.sampled_from(ONE + NONE), wanted=st.integers(1, 5))
def test_more_lines_never_mark_fewer_steps(text: str, other: str, wanted: int) -> None:
    alone = scored("reasoning_steps", {"min_steps": wanted}, text)
    longer = scored("reasoning_steps", {"min_steps": wanted}, f"{text}\n{other}")
    assert alone is not None
    assert longer is not None
    assert 0.0 <= alone <= longer <= 1.0


@pytest.mark.parametrize(
    ("bomb", "score"),
    [("#" * 200_000, 0.0), (" " * 200_000, 0.0), ("Step " * 50_000, 0.0), ("> * " * 50_000, 1 / 3), (". " * 9**6, 0.0)],
)
def test_no_completion_hangs_it(bomb: str, score: float) -> None:
    assert scored("reasoning_steps", {}, bomb) == score
