"""The growth of a long run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.soak import growth, of_folder


def test_growth_is_the_slope_per_thousand_steps_whatever_a_few_samples_are() -> None:
    steps = range(0, 2000, 20)
    values = [5 + 0.003 * step for step in steps]
    assert growth(steps, values).slope == pytest.approx(3)
    values[::10] = [100.0] * 10
    assert growth(steps, values).slope == pytest.approx(3, rel=0.1)


def test_interval_has_the_slope_of_noise_in_nearly_all_cases() -> None:
    noise = np.random.default_rng(0)
    found = [growth(range(60), noise.normal(0, 1, 60).tolist()) for _ in range(200)]
    assert all(one.low <= one.slope <= one.high for one in found)
    inside = sum(one.low <= 0 <= one.high for one in found)
    assert 180 <= inside < 200


def test_folder_has_the_size_and_the_number_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("c", "a/d", "a/b/e"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    found = of_folder(tmp_path, 7)
    assert (found.step, found.files) == (7, 3)
    assert found.size == pytest.approx(3, abs=0.1)
