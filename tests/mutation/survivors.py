"""The known survivors, each with the reason why no test can distinguish it from the unchanged script."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.mutation.mutants import Mutant

PATH: Final = Path(__file__).with_name("survivors.toml")
Key = tuple[str, str, str, int]


def read(path: Path = PATH) -> dict[Key, str]:
    """The reasons, by mutant."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", [])
    return {(entry["script"], entry["line"], entry["change"], entry.get("nth", 1)): entry["why"] for entry in entries}


def add(survivors: Iterable[Mutant], path: Path = PATH) -> None:
    """Appends the survivors, with their reasons left to be written."""
    with path.open("a", encoding="utf-8") as file:
        for mutant in survivors:
            entry = {"script": mutant.script, "line": mutant.line, "change": mutant.change}
            numbered = {**entry, "nth": mutant.nth} if mutant.nth > 1 else entry
            file.write("\n[[survivor]]\n")
            # A TOML basic string accepts every JSON string.
            file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in numbered.items())
            file.write('why = ""\n')
