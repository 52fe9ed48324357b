"""The rewards that depend on the number of tokens: length, soft_overlong, cosine_length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.scoring import scored_length

from gristmill_env.errors import RewardError
from gristmill_env.rewards import create_reward

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
def test_a_cache_longer_than_everything_is_everything(tokens: int, score: float) -> None:
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


@given(tokens=_SOME, target=_LIMIT, bounds=st.tuples(_BOUND, _BOUND))
def test_length_never_falls_nor_leaves_its_bounds(tokens: int, target: int, bounds: tuple[float, float]) -> None:
    options = {"target_tokens": target, "min_reward": bounds[0], "max_reward": bounds[1]}
    said, more = (scored_length("length", count, **options) for count in (tokens, tokens + 1))
    assert min(bounds) - 1e-9 <= said <= more <= max(bounds) + 1e-9


@given(tokens=_SOME, limit=_LIMIT, cache=_LIMIT)
def test_soft_overlong_never_rises_nor_leaves_its_bounds(tokens: int, limit: int, cache: int) -> None:
    said, more = (scored_length("soft_overlong", n, max_tokens=limit, cache_tokens=cache) for n in (tokens, tokens + 1))
    assert -1.0 <= more <= said <= 0.0
    assert (said == -1.0) == (tokens >= limit)
    assert (said == 0.0) == (tokens <= max(0, limit - cache))


@given(tokens=_SOME, limit=_LIMIT, bounds=st.tuples(_BOUND, _BOUND))
def test_cosine_length_never_rises_nor_leaves_its_bounds(tokens: int, limit: int, bounds: tuple[float, float]) -> None:
    options = {"max_tokens": limit, "min_reward": bounds[0], "max_reward": bounds[1]}
    said, more = (scored_length("cosine_length", count, **options) for count in (tokens, tokens + 1))
    assert min(bounds) - 1e-9 <= more <= said + 1e-9
    assert said <= max(bounds) + 1e-9


@pytest.mark.parametrize("params", [{"type": "length"}, {"type": "cosine_length", "params": {"max_tokens": 9}}])
def test_a_length_that_is_not_known_is_an_error_and_no_length_of_0(params: dict[str, object]) -> None:
    made = create_reward(params)
    with raises(RewardError, "tokens_unknown"):
        made.score(["a long text"])
    assert made.score(["a long text", ""], tokens=[[7] * 500, []]) in ([1.0, 0.0], [0.0, 1.0])
