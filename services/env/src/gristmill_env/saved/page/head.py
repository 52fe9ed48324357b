"""The top of the page: the groups' origin, their scores, and the controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.redaction import redact
from gristmill_env.saved.group import SavedGroup
from gristmill_env.saved.page.text import escaped, number, share
from gristmill_env.saved.summary import Summary, Values, histogram, quantile

_HEIGHT = 72


def head_html(title: str, first: SavedGroup | None, summary: Summary) -> str:
    """Renders the top. `first`: the group that provides model, time and settings; None when the file has no group."""
    return (
        f"<header>\n<h1>{escaped(title)}</h1>\n{_origin(first)}"
        f'<dl class="facts">{"".join(_fact(*fact) for fact in _facts(summary))}</dl>\n'
        f'<div class="columns">{_distribution(summary)}{_rewards(summary)}</div>\n{_settings(first)}</header>\n'
        f"{_CONTROLS}"
    )


def _origin(first: SavedGroup | None) -> str:
    if first is None:
        return "<p>No groups.</p>\n"
    words = [f"model {first.model}"] if first.model else []
    if first.versions:
        words.append(f"weights {', '.join(first.versions)}")
    if first.time is not None:
        words.append(f"{first.time:%-d %B %Y, %H:%M} UTC")
    return f'<p class="origin">{escaped(" · ".join(words))}</p>\n' if words else ""


def _facts(summary: Summary) -> list[tuple[str, str, str]]:
    facts = [
        ("groups", str(summary.groups), f"{summary.completions} completions"),
        ("mean total", number(summary.rewards.mean), _spread(summary.rewards)),
        ("same score", share(summary.same, summary.groups), "groups that tell nothing apart"),
        ("cut short", share(summary.cut, summary.completions), "completions without their end"),
    ]
    if summary.tokens:
        mean = sum(summary.tokens) / len(summary.tokens)
        facts.append(("tokens", f"{mean:.0f}", f"mean; 90 % have {quantile(summary.tokens, 0.9)} or fewer"))
    if summary.failed:
        facts.append(("failed", str(summary.failed), "completions on which a reward failed"))
    return facts


def _spread(values: Values) -> str:
    return f"{number(values.low)} to {number(values.high)}" if values.count else "no totals"


def _fact(name: str, value: str, note: str) -> str:
    return f"<div><dt>{escaped(name)}</dt><dd><b>{escaped(value)}</b><span>{escaped(note)}</span></dd></div>"


def _distribution(summary: Summary) -> str:
    bars = histogram(summary.totals)
    if not bars:
        return ""
    top = max(bar.count for bar in bars)
    width = 100 / len(bars)
    shapes = "".join(
        f'<rect x="{at * width + 0.4:.2f}" y="{_HEIGHT - height:.2f}" width="{width - 0.8:.2f}" height="{height:.2f}">'
        f"<title>{escaped(f'{number(bar.low)} to {number(bar.high)}: {bar.count}')}</title></rect>"
        for at, bar in enumerate(bars)
        if (height := bar.count / top * _HEIGHT)
    )
    return (
        '<figure><figcaption>Totals of all completions</figcaption><svg role="img" aria-label="Histogram of totals" '
        f'viewBox="0 0 100 {_HEIGHT}" preserveAspectRatio="none">{shapes}</svg>'
        f'<div class="axis"><span>{number(bars[0].low)}</span><span>{number(bars[-1].high)}</span></div></figure>'
    )


def _rewards(summary: Summary) -> str:
    if not summary.parts:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{number(values.mean)}</td>'
        f"<td>{number(values.low) if values.count else '–'}</td><td>{number(values.high) if values.count else '–'}</td>"
        f"<td>{values.silent}</td></tr>"
        for name, values in summary.parts.items()
    )
    return (
        '<div class="table"><table><thead><tr><th scope="col">reward</th><th scope="col">mean</th>'
        '<th scope="col">min</th><th scope="col">max</th><th scope="col">no score</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _settings(first: SavedGroup | None) -> str:
    if first is None or not first.settings:
        return ""
    rows = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
        for name, value in _shown(redact(first.settings)).items()
    )
    return f'<details class="settings"><summary>Settings</summary><dl>{rows}</dl></details>\n'


def _shown(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the set values, without sections. Omits `params`, which may hold keys, because a page may be shared."""
    shown: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            shown |= {} if name == "params" else _shown(value)
        elif isinstance(value, list):
            shown[name] = ", ".join(_reward(one) if isinstance(one, Mapping) else str(one) for one in value)
        elif value is not None:
            shown[name] = str(value)
    return shown


def _reward(spec: Mapping[str, Any]) -> str:
    return f"{spec.get('weight', 1):g} × {spec.get('name') or spec.get('type')}"


_CONTROLS = """<nav aria-label="Choose groups">
<label>Sort <select id="sort">
<option value="number">as saved</option>
<option value="-mean">best first</option>
<option value="mean">worst first</option>
<option value="-spread">most mixed first</option>
<option value="-tokens">longest first</option>
</select></label>
<label>Show <select id="show">
<option value="all">all groups</option>
<option value="mixed">scores differ</option>
<option value="same">scores are the same</option>
<option value="cut">with cut completions</option>
<option value="failed">with failed rewards</option>
</select></label>
<label>Score at least <input id="least" type="number" step="any" inputmode="decimal"></label>
<label>at most <input id="most" type="number" step="any" inputmode="decimal"></label>
<label class="find">Find <input id="find" type="search" placeholder="text"></label>
<button id="toggle" type="button">Open all</button>
<output id="count"></output>
</nav>
"""
