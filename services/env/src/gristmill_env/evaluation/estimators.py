"""The formulas of an evaluation: estimates over prompts, and their uncertainty.

The prompt is the unit. Completions of one prompt are correlated, so they carry less information than the same number
of prompts. Standard errors are therefore clustered by prompt, and computed from the per-prompt means (Miller, Adding
Error Bars to Evals, arXiv:2411.00640). With equally many completions per prompt, the two standard errors are equal.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z95 = statistics.NormalDist().inv_cdf(0.975)
"""1.96: half the width of a 95 % interval, in standard errors."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts."""

    value: float
    stderr: float | None
    """Standard deviation of the per-prompt values / √prompts; None for a single prompt."""
    low: float | None
    high: float | None
    """The 95 % interval."""
    prompts: int
    """Number of prompts in the mean."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Returns the probability that k of the prompt's completions, drawn without replacement, include a right one.

    1 − C(n−c, k) / C(n, k), which is unbiased for k ≤ n, as a product of k factors ≤ 1, to avoid large numbers.
    (Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374, section 2.1.)
    Raises ValueError unless 1 ≤ k ≤ samples and 0 ≤ right ≤ samples.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(f"pass@{k} of {right} right among {samples} samples")
    wrong = samples - right
    # With fewer than k wrong completions, a factor is 0.
    return 1.0 - math.prod((wrong - i) / (samples - i) for i in range(k))


def pass_ks(samples: int) -> list[int]:
    """Returns the values of k for pass@k: 1, 2, 4, ... and the number of samples."""
    powers = [2**n for n in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Returns maj@k: the probability that the most frequent answer is right; 1, 0, or between them for a tie.

    `votes`: final answer and whether it is right, one per completion. All right completions count as one answer, even
    if their texts differ. Wrong answers are the same if their text is the same; wrong completions without an answer do
    not vote. Each of t equally frequent answers wins with probability 1/t, so the order of completions is irrelevant.
    (Wang et al., Self-Consistency, arXiv:2203.11171, without a rule for ties.)
    """
    right = sum(is_right for _, is_right in votes)
    wrong = Counter(answer for answer, is_right in votes if not is_right and answer is not None)
    most = max(wrong.values(), default=0)
    if right == 0 or right < most:
        return 0.0
    return 1.0 / (1 + sum(count == right for count in wrong.values()))


def mean(values: Iterable[float]) -> Estimate | None:
    """Returns the mean of per-prompt values on any scale, with a normal interval; None for no values."""
    numbers = list(values)
    if not numbers:
        return None
    value = math.fsum(numbers) / len(numbers)
    stderr = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    if stderr is None:
        return Estimate(value, None, None, None, 1)
    return Estimate(value, stderr, value - Z95 * stderr, value + Z95 * stderr, len(numbers))


def share(values: Iterable[float]) -> Estimate | None:
    """Returns the mean of per-prompt values from 0 to 1; None for no values.

    At 0 and 1 the prompts do not differ, and a normal interval would have no width, so the interval is Wilson's over
    prompts. Otherwise the interval is the normal interval, cut to [0, 1].
    """
    estimate = mean(values)
    if estimate is None:
        return None
    if estimate.value in (0.0, 1.0):
        low, high = wilson(round(estimate.value) * estimate.prompts, estimate.prompts)
        return Estimate(estimate.value, estimate.stderr, low, high, estimate.prompts)
    if estimate.low is None or estimate.high is None:
        return estimate
    return Estimate(estimate.value, estimate.stderr, max(0.0, estimate.low), min(1.0, estimate.high), estimate.prompts)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's score interval, 95 % (Probable Inference, 1927); 0 to z² / (m + z²) for 0 out of m."""
    rate, z2 = successes / trials, Z95 * Z95
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    # At the ends the two terms are equal, and must not leave a rounding error of the wrong sign.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)
