"""Tries every mutant of the store's Lua scripts: `make mutants`.

    python -m tests.mutation.run [SCRIPT...]

With names of scripts, it tries only their mutants. It adds survivors that survivors.toml lacks to that file, and a
person then writes the reason. A listed survivor that a test now finds is also an error. Two mutants run at a time.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation import survivors
from tests.mutation.mutants import LUA, Mutant, all_mutants
from tests.mutation.plan import stages
from tests.mutation.trial import Trial, Verdict

AT_ONCE = 2
_PATIENCE = 6.0
"""The time limit of a trial, as a multiple of the time that the unchanged scripts take."""


@contextlib.contextmanager
def scripts_with(mutant: Mutant | None) -> Iterator[Path]:
    """A folder whose lua/ holds the scripts, one of them mutated."""
    with tempfile.TemporaryDirectory(prefix="gristmill-mutant-") as name:
        folder = Path(name)
        shutil.copytree(LUA, folder / "lua")
        if mutant is not None:
            (folder / "lua" / mutant.script).write_text(mutant.text, encoding="utf-8")
        yield folder


class Judge:
    """Runs the tests against mutants. Knows how long the tests take on the unchanged scripts."""

    def __init__(self) -> None:
        self._limits: dict[tuple[str, ...], float] = {}
        self._measuring = threading.Lock()

    def judge(self, mutant: Mutant) -> Verdict:
        with scripts_with(mutant) as folder:
            for tests in stages(mutant.script):
                verdict, _ = Trial(folder, tests, self._limit(tests)).run()
                if verdict is not Verdict.SURVIVED:
                    return verdict
        return Verdict.SURVIVED

    def _limit(self, tests: tuple[str, ...]) -> float:
        """Seconds."""
        with self._measuring:
            if tests not in self._limits:
                started = time.monotonic()
                with scripts_with(None) as folder:
                    verdict, output = Trial(folder, tests, 900).run()
                if verdict is not Verdict.SURVIVED:
                    raise RuntimeError(f"these fail on the scripts as they are: {' '.join(tests)}\n{output[-4000:]}")
                self._limits[tests] = _PATIENCE * (time.monotonic() - started)
            return self._limits[tests]


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in all_mutants() if not names or mutant.script in names]
    known = survivors.read()
    judge = Judge()
    verdicts: dict[Mutant, Verdict] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, verdict in zip(chosen, pool.map(judge.judge, chosen), strict=True):
            verdicts[mutant] = verdict
            mark = " (known)" if mutant.key in known else ""
            print(f"{len(verdicts):4}/{len(chosen)} {verdict.value:<9} {mutant}{mark}", flush=True)  # noqa: T201
    alive = [mutant for mutant, verdict in verdicts.items() if verdict is Verdict.SURVIVED]
    new = [mutant for mutant in alive if mutant.key not in known]
    found = [mutant for mutant in chosen if mutant.key in known and mutant not in alive]
    survivors.add(new)
    counts = Counter(verdicts.values())
    print(f"{len(chosen)} mutants: {', '.join(f'{counts[verdict]} {verdict.value}' for verdict in Verdict)}")  # noqa: T201
    for title, mutants in (
        ("survivors.toml does not say why they survive", new),
        ("known as survivors, and found", found),
    ):
        if mutants:
            print(f"\n{title}:", *mutants, sep="\n  ")  # noqa: T201
    return 1 if new or found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
