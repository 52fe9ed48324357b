"""The options, the page and the progress lines that all benchmarks have."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_STARTED = time.monotonic()


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the option `--results`. `name`: the benchmark's name."""
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--results", type=Path, help="folder to write the results to; default: only show them")
    return options


def heading(title: str, facts: Mapping[str, str]) -> list[str]:
    """Returns the first lines of a page."""
    return [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]


def publish(page: str, results: Path | None, name: str, data: str | None = None) -> None:
    """Shows a page, and writes it to NAME.md in the folder `results`. `data`: the text of NAME.json."""
    print(page, end="")
    if results is not None:
        write(page, results, name, data)


def write(page: str, results: Path, name: str, data: str | None = None) -> None:
    """Writes NAME.md in the folder `results`, and NAME.json if there is `data`."""
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.md").write_text(page)
    if data is not None:
        (results / f"{name}.json").write_text(f"{data}\n")
    say(f"written: {results / name}.md")


def say(text: str) -> None:
    """Prints a line with the time since the start."""
    print(f"[{time.monotonic() - _STARTED:6.0f} s] {text}", file=sys.stderr, flush=True)
