"""The table of the rewards that ship, for docs/rewards.md: `python -m gristmill_env.rewards.table docs/rewards.md`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from gristmill_env.options import REQUIRED
from gristmill_env.rewards.registry import Definition, find, reward_names

BEGIN = "<!-- rewards: made by python -m gristmill_env.rewards.table docs/rewards.md -->"
END = "<!-- rewards: end -->"


def reward_table() -> str:
    """Returns a Markdown table with names, options with their defaults, and the first lines of the docstrings."""
    ours = [find(name) for name in reward_names()]
    shipped = [definition for definition in ours if definition.target.__module__.startswith("gristmill_env.")]
    return "\n".join(["| name | options | rule |", "|---|---|---|", *(_row(definition) for definition in shipped)])


def with_table(text: str) -> str:
    """Returns `text` with a current table between its markers. Raises ValueError when a marker is missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the markers {BEGIN} and {END} are not there")
    return f"{head}{begin}\n{reward_table()}\n{end}{tail}"


def _row(definition: Definition) -> str:
    options = ", ".join(
        f"`{name}`" if option.default is REQUIRED else f"`{name}: {_yaml(option.default)}`"
        for name, option in definition.options.items()
    )
    rule = (inspect.getdoc(definition.target) or "").partition("\n")[0]
    return f"| `{definition.name}` | {options or 'none'} | {rule} |".replace("\n", " ")


def _yaml(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{', '.join(map(_yaml, value))}]" if isinstance(value, list | tuple) else str(value)


if __name__ == "__main__":
    import gristmill_env.rewards  # noqa: F401  registers them

    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text()))
