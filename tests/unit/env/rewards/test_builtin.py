"""The small rewards: lengths, form, and text."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.scoring import scored, scored_length

from gristmill_env.errors import RewardError
from gristmill_env.rewards import create_reward
from gristmill_env.rewards.builtin import exact_match

# length, soft_overlong, cosine_length.

_SOME = st.integers(0, 500)
_LIMIT = st.integers(1, 400)
_BOUND = st.floats(-10, 10)


@pytest.mark.parametrize(("tokens", "score"), [(0, 0.0), (1, 0.25), (2, 0.5), (4, 1.0), (400, 1.0)])
def test_length_rises_to_its_target(tokens: int, score: float) -> None:
    assert scored_length("length", tokens, target_tokens=4) == score


@pytest.mark.parametrize(("tokens", "score"), [(0, -1.0), (1, -0.25), (4, 2.0), (9, 2.0)])
def test_length_rises_from_one_bound_to_the_other(tokens: int, score: float) -> None:
    assert scored_length("length", tokens, target_tokens=4, min_reward=-1, max_reward=2) == score
    assert scored_length("length", tokens, target_tokens=4, min_reward=2, max_reward=-1) == score


@pytest.mark.parametrize(
    ("tokens", "score"),
    [(0, 0.0), (50, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (5000, -1.0)],
)
def test_soft_overlong_is_equation_13_of_dapo(tokens: int, score: float) -> None:
    assert scored_length("soft_overlong", tokens, max_tokens=100, cache_tokens=20) == pytest.approx(score, abs=1e-12)
    assert scored_length("soft_overlong", tokens, max_tokens=100) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("tokens", [0, 80])
def test_soft_overlong_with_room_is_not_negative_zero(tokens: int) -> None:
    assert math.copysign(1.0, scored_length("soft_overlong", tokens, max_tokens=100)) == 1.0


@pytest.mark.parametrize(("tokens", "score"), [(0, 0.0), (1, -0.25), (4, -1.0)])
def test_soft_overlong_limits_its_cache_to_max_tokens(tokens: int, score: float) -> None:
    assert scored_length("soft_overlong", tokens, max_tokens=4, cache_tokens=400) == score


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, 1.0), (25, (1 + math.sqrt(0.5)) / 2), (50, 0.5), (100, 0.0), (900, 0.0)]
)
def test_cosine_length_falls_along_half_a_cosine(tokens: int, score: float) -> None:
    assert scored_length("cosine_length", tokens, max_tokens=100) == pytest.approx(score, abs=1e-12)


def test_cosine_length_uses_custom_bounds() -> None:
    for bounds in ({"min_reward": 0.5, "max_reward": 2.0}, {"min_reward": 2.0, "max_reward": 0.5}):
        said = [scored_length("cosine_length", tokens, max_tokens=100, **bounds) for tokens in (0, 50, 100)]
        assert said == pytest.approx([2.0, 1.25, 0.5])


@pytest.mark.slow
@given(tokens=_SOME, target=_LIMIT, bounds=st.tuples(_BOUND, _BOUND))
def test_length_never_decreases_and_stays_within_its_bounds(
    tokens: int, target: int, bounds: tuple[float, float]
) -> None:
    options = {"target_tokens": target, "min_reward": bounds[0], "max_reward": bounds[1]}
    said, more = (scored_length("length", count, **options) for count in (tokens, tokens + 1))
    assert min(bounds) - 1e-9 <= said <= more <= max(bounds) + 1e-9


@pytest.mark.slow
@given(tokens=_SOME, limit=_LIMIT, cache=_LIMIT)
def test_soft_overlong_never_increases_and_stays_within_its_bounds(tokens: int, limit: int, cache: int) -> None:
    said, more = (scored_length("soft_overlong", n, max_tokens=limit, cache_tokens=cache) for n in (tokens, tokens + 1))
    assert -1.0 <= more <= said <= 0.0
    assert (said == -1.0) == (tokens >= limit)
    assert (said == 0.0) == (tokens <= max(0, limit - cache))


@pytest.mark.slow
@given(tokens=_SOME, limit=_LIMIT, bounds=st.tuples(_BOUND, _BOUND))
def test_cosine_length_never_increases_and_stays_within_its_bounds(
    tokens: int, limit: int, bounds: tuple[float, float]
) -> None:
    options = {"max_tokens": limit, "min_reward": bounds[0], "max_reward": bounds[1]}
    said, more = (scored_length("cosine_length", count, **options) for count in (tokens, tokens + 1))
    assert min(bounds) - 1e-9 <= more <= said + 1e-9
    assert said <= max(bounds) + 1e-9


@pytest.mark.parametrize("params", [{"type": "length"}, {"type": "cosine_length", "params": {"max_tokens": 9}}])
def test_length_reward_of_an_unknown_length_is_an_error(params: dict[str, object]) -> None:
    made = create_reward(params)
    with raises(RewardError, "tokens_unknown"):
        made.score(["a long text"])
    assert made.score(["a long text", ""], tokens=[[7] * 500, []]) in ([1.0, 0.0], [0.0, 1.0])


# format.

FORMAT: list[tuple[dict[str, Any], str, float]] = [
    ({}, "<answer>25</answer>", 1.0),
    ({}, "<think>20 + 5</think> 25", 1.0),
    ({}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({}, "<answer></answer> no, <answer>25</answer>", 1.0),
    ({}, "<answer>\n25\n</answer>", 1.0),
    ({}, "25", 0.0),
    ({}, "", 0.0),
    ({}, "<answer>25", 0.0),
    ({}, "25</answer>", 0.0),
    ({}, "</answer>25<answer>", 0.0),
    ({}, "<answer> </answer>", 0.0),
    ({}, "<answer></answer><answer></answer>", 0.0),  # text between two empty pairs is not inside a pair
    ({}, "<answer>25 <answer></answer>", 0.0),  # the innermost pair, as accuracy reads it
    ({}, "<answer>25</think>", 0.0),
    ({}, "<answers>25</answers>", 0.0),
    ({"require_all_tags": True}, "<answer>25</answer>", 0.0),
    ({"require_all_tags": True}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({"preferred_tags": ["solution"]}, "<solution>25</solution>", 1.0),
    ({"preferred_tags": ["solution"]}, "<answer>25</answer>", 0.0),
    ({}, "<Answer>25</ANSWER>", 1.0),
    ({"preferred_tags": ["Answer"]}, "<answer>25</answer>", 1.0),
    ({"case_sensitive": True}, "<Answer>25</Answer>", 0.0),
    ({"case_sensitive": True}, "<answer>25</answer>", 1.0),
    ({"case_sensitive": True, "preferred_tags": ["Answer"]}, "<Answer>25</Answer>", 1.0),
    ({"case_sensitive": True, "preferred_tags": ["Answer"]}, "<answer>25</answer>", 0.0),
    ({"strict": True}, "<think>20 + 5</think> 25", 1.0),
    ({"strict": True}, "<THINK>20 + 5</THINK> 25", 1.0),
    ({"strict": True, "case_sensitive": True}, "<THINK>20 + 5</THINK> 25", 0.0),
    ({"strict": True}, "\n<think>20 + 5</think><answer>25</answer>", 1.0),
    ({"strict": True}, "Well. <think>20 + 5</think> 25", 0.0),
    ({"strict": True}, "<think>20</think><think>5</think> 25", 0.0),
    ({"strict": True}, "<think>20 + 5</think>", 0.0),
    ({"strict": True}, "<answer>25</answer>", 0.0),
]


@pytest.mark.parametrize(("params", "completion", "score"), FORMAT)
def test_format_scores_completions_by_their_tags(params: dict[str, Any], completion: str, score: float) -> None:
    assert scored("format", params, completion) == score


def test_format_refuses_a_list_of_no_tags() -> None:
    with raises(RewardError, "parameter_invalid", parameter="preferred_tags", problem="too_short"):
        scored("format", {"preferred_tags": []}, "<answer>25</answer>")


# tag_count: an equal part for every tag that occurs once.

TAGS: list[tuple[dict[str, Any], str, float]] = [
    ({}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({}, "<think>\n20 + 5\n</think>\n<answer>\n25\n</answer>", 1.0),
    ({}, "<think>20 + 5</think> 25", 0.5),
    ({}, "<answer>25</answer>", 0.5),
    ({}, "<think>20 + 5</think><answer>25", 0.75),
    ({}, "<think>20 + 5", 0.25),
    ({}, "", 0.0),
    ({}, "25", 0.0),
    ({}, "<think>20</think><think>5</think><answer>25</answer>", 0.5),
    ({}, "<answer>25</answer>" * 9, 0.0),
    ({"preferred_tags": ["answer"]}, "<answer>25</answer>", 1.0),
    ({"preferred_tags": ["answer"]}, "<think>5</think>", 0.0),
    ({"preferred_tags": ["a", "b", "c"]}, "<a>1</a><b>", 0.5),
]


@pytest.mark.parametrize(("params", "completion", "score"), TAGS)
def test_tag_count_scores_the_share_of_tags(params: dict[str, Any], completion: str, score: float) -> None:
    assert scored("tag_count", params, completion) == score


_PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "25", " "]), max_size=12)


@pytest.mark.slow
@given(pieces=_PIECES)
def test_tag_count_is_a_multiple_of_a_quarter(pieces: list[str]) -> None:
    assert scored("tag_count", completion="".join(pieces)) in (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.slow
@given(pieces=_PIECES)
def test_tag_count_scores_zero_for_repeated_tags(pieces: list[str]) -> None:
    assert scored("tag_count", completion="".join(pieces * 2)) == 0.0


# reasoning_steps: which text marks a step, which does not, and that one step counts once.

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
def test_reasoning_steps_recognizes_a_step(text: str) -> None:
    assert scored("reasoning_steps", {"min_steps": 2}, text) == 0.5


@pytest.mark.parametrize("text", NONE)
def test_reasoning_steps_ignores_text_that_is_not_a_step(text: str) -> None:
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
def test_reasoning_steps_requires_three_steps_by_default(text: str, score: float) -> None:
    assert scored("reasoning_steps", {}, text) == pytest.approx(score)


@pytest.mark.slow
@given(text=st.text(max_size=60), other=st.sampled_from(ONE + NONE), wanted=st.integers(1, 5))
def test_reasoning_steps_never_falls_with_more_lines(text: str, other: str, wanted: int) -> None:
    alone = scored("reasoning_steps", {"min_steps": wanted}, text)
    longer = scored("reasoning_steps", {"min_steps": wanted}, f"{text}\n{other}")
    assert alone is not None
    assert longer is not None
    assert 0.0 <= alone <= longer <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bomb", "score"),
    [("#" * 200_000, 0.0), (" " * 200_000, 0.0), ("Step " * 50_000, 0.0), ("> * " * 50_000, 1 / 3), (". " * 9**6, 0.0)],
)
def test_reasoning_steps_ends_on_every_completion(bomb: str, score: float) -> None:
    assert scored("reasoning_steps", {}, bomb) == score


# repetition_penalty.

SHORT_AND_RIGHT = [
    "",
    "72",
    "#### 72",
    r"\boxed{72}",
    "The answer is 72.",
    "<think>Half of 144 is 72.</think><answer>72</answer>",
    "Natalia sold 48 / 2 = 24 clips in May. Natalia sold 48 + 24 = 72 clips in both months.\n#### 72",
    "Step 1: 48 / 2 = 24.\nStep 2: 48 + 24 = 72.\nThe answer is 72.",
]


@pytest.mark.parametrize("text", SHORT_AND_RIGHT)
def test_repetition_penalty_does_not_punish_a_short_right_answer(text: str) -> None:
    assert scored("repetition_penalty", {}, text) == 0.0


@pytest.mark.parametrize(
    ("text", "params", "score"),
    [
        ("a b c a b c", {}, -0.25),  # abc bca cab abc: 3 of 4
        ("A b c a B c", {}, -0.25),
        ("a b c a b c", {"max_penalty": -2.0}, -0.5),
        ("a b c a b c", {"max_penalty": 0.0}, 0.0),
        ("a b c a b c", {"ngram_size": 1}, -0.5),
        ("a b c a b c", {"ngram_size": 4}, 0.0),
        ("a b c a b c", {"threshold": 0.25}, 0.0),
        ("a b c a b c", {"threshold": 0.24}, -0.25),
        ("no " * 102, {}, -0.99),
        ("你好" * 40, {}, -67 / 69),
        ("a b c a b c " + "x" * 25, {}, -(1 + 13 / 4) / (5 + 14 / 4)),
        ("x" * 24, {}, 0.0),
    ],
)
def test_repetition_penalty_is_the_share_of_repeated_ngrams(text: str, params: dict[str, float], score: float) -> None:
    assert scored("repetition_penalty", params, text) == pytest.approx(score)


@pytest.mark.parametrize(
    "text",
    [
        "你好" * 40, "そうですね。" * 30, "สวัสดีครับ" * 30, "x=1;" * 60, "!!!!" * 40, r"\frac{1}{2}" * 40, "😀" * 60,
        "안녕하세요" * 30, "ha" * 60, "The sum is 72. " * 20, "0" * 200, "Short words first, then " + "你好" * 400,
    ],
)  # fmt: skip
def test_repetition_penalty_finds_repetition_in_every_script(text: str) -> None:
    assert -1.0 <= (scored("repetition_penalty", {}, text) or 0.0) <= -0.85


@pytest.mark.parametrize(
    "text",
    [
        "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水玉出昆冈",
        r"\frac{1}{2}+\frac{3}{4}-\frac{5}{6}=\frac{6}{12}+\frac{9}{12}-\frac{10}{12}=\frac{5}{12}",
        "https://example.org/a/long/path/with/several/parts/and/a/name.html",
    ],
)
def test_repetition_penalty_does_not_punish_long_words(text: str) -> None:
    assert scored("repetition_penalty", {}, text) == 0.0


_TEXT = st.lists(st.sampled_from("abcd"), max_size=40).map(" ".join)


@pytest.mark.slow
@given(text=_TEXT, size=st.integers(1, 5), most=st.floats(-5, 0), threshold=st.floats(0, 1))
def test_repetition_penalty_stays_within_its_bounds(text: str, size: int, most: float, threshold: float) -> None:
    params = {"ngram_size": size, "max_penalty": most, "threshold": threshold}
    value = scored("repetition_penalty", params, text)
    assert value is not None
    assert most <= value <= 0.0


@pytest.mark.slow
@given(text=_TEXT, times=st.integers(1, 4))
def test_repetition_penalty_never_shrinks_with_one_more_repetition(text: str, times: int) -> None:
    params = {"threshold": 0.0}
    said, again = (scored("repetition_penalty", params, " ".join([text] * count)) for count in (times, times + 1))
    assert said is not None
    assert again is not None
    assert again <= said + 1e-12


# exact_match: the same text, except for differences that do not count.


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("The answer is Paris.", "Paris"),
        ("the answer is paris", "PARIS"),
        ("#### New   York", "new york"),
        ("<answer>\nNew\nYork\n</answer>", "New York"),
        (r"\boxed{\text{Paris}}", "Paris"),
        ("The answer is **Paris**!", "Paris."),
        ("Paris", "Paris"),
        ("<think>Rome?</think> Paris.", "#### Paris"),
        ("STRASSE", "Straße"),
        ("#### 東京", "東京"),
        ("#### cafe\u0301", "caf\u00e9"),
        ("caf\u00e9", "cafe\u0301"),
        ("It\u2019s", "it's"),
        ("\u201cyes\u201d", '"yes"'),
        ("#### \uff30aris", "Paris"),
        ("\uff17\uff12", "72"),
        ("\U0001d7d5\U0001d7d0", "72"),
        ("#### \u1112\u1161\u11ab", "\ud55c"),
        ("New\u200b York\u200e", "New York"),
        ("co\u00adop", "coop"),
        ("well\u2011known", "well-known"),
    ],
)
def test_exact_match_scores_one_for_the_same_text(completion: str, gold: str) -> None:
    assert exact_match(completion, gold) == 1.0


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("The answer is Paris.", "Rome"),
        ("The answer is Paris, France.", "Paris"),
        ("It is Paris", "Paris"),
        ("Paris. The answer is Rome.", "Paris"),
        ("<think>Paris</think>", "Paris"),
        ("", "Paris"),
        ("#### 72.0", "72"),
        ("#### well-known", "well known"),
        ("#### NewYork", "New York"),
        ("7\u00b2", "72"),
        ("cafe", "caf\u00e9"),
    ],
)
def test_exact_match_scores_zero_for_another_text(completion: str, gold: str) -> None:
    assert exact_match(completion, gold) == 0.0


def test_exact_match_follows_its_options() -> None:
    assert exact_match("#### paris", "Paris", ignore_case=False) == 0.0
    assert exact_match("#### Paris", "Paris", ignore_case=False) == 1.0
    assert exact_match("#### It's (nearly) done", "its nearly done", ignore_punctuation=True) == 1.0
    assert exact_match("#### It's (nearly) done", "its nearly done") == 0.0
    assert exact_match("Paris", "Paris", whole_if_unmarked=False) == 0.0
    assert exact_match("#### Paris", "Paris", whole_if_unmarked=False) == 1.0


@pytest.mark.parametrize("gold", ["", "  ", "...", "#### "])
def test_exact_match_of_an_empty_gold_gives_no_score(gold: str) -> None:
    assert exact_match("Paris", gold) is None
