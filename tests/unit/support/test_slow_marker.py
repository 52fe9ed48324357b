"""tests/unit/conftest.py: a test that takes long has the marker `slow`, and `make quick` does not import its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from secure import ROOT

pytest_plugins = ["pytester"]

BURNS = """
import time
import pytest
def burn():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
"""


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    conftest = (ROOT / "tests" / "unit" / "conftest.py").read_text()
    pytester.makeconftest(conftest.replace("MOST_CPU_SECONDS = 10.0", "MOST_CPU_SECONDS = 0.2"))
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    long\n")
    return pytester


@pytest.mark.slow
def test_test_without_the_marker_fails_if_it_takes_long(tests: pytest.Pytester) -> None:
    marked = "@pytest.mark.slow\ndef test_marked(): burn()\n@pytest.mark.long\ndef test_long(): burn()\n"
    waits = "def test_waits(): time.sleep(0.3)\n"
    child = (
        "def test_child():\n    import subprocess, sys\n    subprocess.run([sys.executable, __file__], check=True)\n"
    )
    own = "if __name__ == '__main__': burn()\n"
    tests.makepyfile(BURNS + "def test_burns(): burn()\n" + marked + waits + child + own)
    result = tests.runpytest_inprocess("-p", "no:schemathesis", "-p", "no:xdist")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*::test_burns*", "*::test_child*"])


@pytest.mark.slow
def test_file_of_slow_tests_is_not_imported(tests: pytest.Pytester) -> None:
    tests.makepyfile(test_heavy="import pytest\nraise RuntimeError\npytestmark = pytest.mark.slow\n")
    tests.makepyfile(test_light="def test_light(): pass\n")
    folder = Path(tests.mkdir("trainer"))
    (folder / "test_torch.py").write_text("raise RuntimeError\n")
    tests.runpytest_inprocess("-p", "no:schemathesis", "-m", "not long and not slow").assert_outcomes(passed=1)
    tests.runpytest_inprocess("-p", "no:schemathesis", "-m", "not long").assert_outcomes(errors=2)


@pytest.mark.slow
def test_file_without_slow_tests_is_not_imported_for_the_slow_ones(tests: pytest.Pytester) -> None:
    tests.makepyfile(test_light="raise RuntimeError\n")
    tests.makepyfile(test_heavy="import pytest\n@pytest.mark.slow\ndef test_heavy(): pass\ndef test_light(): pass\n")
    folder = Path(tests.mkdir("trainer"))
    (folder / "test_torch.py").write_text("def test_torch(): pass\n")
    tests.runpytest_inprocess("-p", "no:schemathesis", "-m", "not long and slow").assert_outcomes(
        passed=2, deselected=1
    )
