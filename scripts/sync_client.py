#!/usr/bin/env python3
"""Writes the SDK's blocking client, sync_client.py, from its async client, client.py.

The two clients differ only in `async`, `await`, and the names in `REPLACEMENTS`.

    python scripts/sync_client.py            write it
    python scripts/sync_client.py --check    fail when the file is not current (a unit test does the same)
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parents[1] / "sdk" / "src" / "gristmill"
SOURCE = SDK / "client.py"
TARGET = SDK / "sync_client.py"

HEAD = '"""The trajectory API\'s blocking client. scripts/sync_client.py writes this file from client.py.'
REPLACEMENTS = (
    (r'\A"""[^\n]*', HEAD),
    (r"Async client of the trajectory API: one method", "Blocking client of the trajectory API: one method"),
    (r"(for `patience` seconds, and then raises ApiUnreachable\.)", r"\1\n\n    Several threads may use one client."),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"^import asyncio\n", "import time\n"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\bAsyncGenerator\[RunEvent, None\]", "Generator[RunEvent, None, None]"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bconnections\.async_client\(self\.url, limits=None,", "connections.client(self.url,"),
    (r"\bClient:", "SyncClient:"),
    (r"\baiter_bytes\b", "iter_bytes"),
    (r"\baread\b", "read"),
    (r"\baclose\b", "close"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
)


def main() -> int:
    """Writes the file, or checks it. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the SDK's blocking client from its async client.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not current")
    check = parser.parse_args().check
    text = sync_client()
    if text == TARGET.read_text(encoding="utf-8"):
        return 0
    if check:
        print(f"{TARGET.name} is not current: run python scripts/sync_client.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.name}")
    return 0


def sync_client() -> str:
    """Returns the text of sync_client.py.

    Raises ValueError if a replacement does not match, or an async word remains.
    """
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in REPLACEMENTS:
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"{SOURCE.name} does not contain {pattern!r}: change REPLACEMENTS")
    code = text.partition("from __future__")[2]
    if left := re.search(r"\b(async|await|asyncio|a(iter|read|send|enter|exit)\w*)\b", code):
        raise ValueError(f"{left[0]!r} of {SOURCE.name} remains in {TARGET.name}: add it to REPLACEMENTS")
    return _formatted(text)


def _formatted(text: str) -> str:
    """Sorts the imports and joins the lines that have become shorter."""
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format"]):
        ruff = [str(Path(sys.executable).with_name("ruff")), *command, "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, check=True, text=True).stdout
    return text


if __name__ == "__main__":
    sys.exit(main())
