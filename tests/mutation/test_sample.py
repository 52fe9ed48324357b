"""The tests find each of a dozen mutants. `make mutants` tries all mutants."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.mutation import survivors
from tests.mutation.mutants import all_mutants
from tests.mutation.run import AT_ONCE, Judge
from tests.mutation.trial import Verdict


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tests_find_a_sample_of_the_mutants() -> None:
    known = survivors.read()
    sample = random.Random(0).sample([mutant for mutant in all_mutants() if mutant.key not in known], 12)
    judge = Judge()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        verdicts = dict(zip(sample, pool.map(judge.judge, sample), strict=True))
    assert not [str(mutant) for mutant, verdict in verdicts.items() if verdict is Verdict.SURVIVED]
