"""Every solution of a data set in the schema of GSM8K verifies against its own answer."""

from __future__ import annotations

import pytest
import reasoning_gym

from gristmill_env.answers.symbolic_pool import SymbolicPool
from gristmill_env.rewards.accuracy import accuracy

pytestmark = pytest.mark.slow


async def test_solutions_of_gsm_symbolic_verify(untouched_pool: SymbolicPool) -> None:
    rows = reasoning_gym.create_dataset("gsm_symbolic", size=200, seed=11)
    for row in rows:
        solution, answer = row["metadata"]["answer_cot"], row["answer"]
        assert await accuracy(solution, answer) == 1.0
        assert await accuracy(solution, solution) == 1.0
        wrong = f"{solution}1"
        assert await accuracy(wrong, answer) == 0.0
    assert untouched_pool.asked == 0
