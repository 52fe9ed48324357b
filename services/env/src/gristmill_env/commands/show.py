"""Output that several commands share."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill_env.saved.summary import Summary, Values, figure, quantile


def plain(text: str) -> Text:
    """Returns text without rich's [markup] and a terminal's control characters, both of which a model may write."""
    return Text("".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text))


def show_summary(console: Console, summary: Summary) -> None:
    """Prints a table of the rewards, and a line of totals."""
    table = Table("reward", "mean", "min", "max", "no score")
    for name, values in {**summary.parts, "total": summary.rewards}.items():
        table.add_row(plain(name), *_numbers(values))
    console.print(table)
    words = [f"{summary.groups} groups", f"{summary.completions} completions"]
    if summary.tokens:
        words.append(
            f"{sum(summary.tokens) / len(summary.tokens):.0f} tokens on average (90 % have "
            f"{quantile(summary.tokens, 0.9)} or fewer)"
        )
    words.append(f"{summary.cut} cut at max_tokens")
    words.append(f"{summary.same} groups of one score")
    if summary.failed:
        words.append(f"a reward failed on {summary.failed}")
    console.print(", ".join(words), highlight=False, soft_wrap=True)


def _numbers(values: Values) -> tuple[str, str, str, str]:
    low, high = (figure(values.low), figure(values.high)) if values.count else ("none", "none")
    return figure(values.mean), low, high, str(values.silent)
