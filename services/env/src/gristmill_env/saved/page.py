"""Saved groups as one self-contained HTML page, with page.css and page.js.

The page is written group by group, so that the HTML of a long file need not fit into memory.

A model's text is untrusted, so all of it is escaped. As a second defence, the page's content security policy allows
only the page's own script and style, by their hashes, and no network requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from gristmill.redaction import redact
from gristmill_env.durable import complete_file
from gristmill_env.saved.group import Message, SavedCompletion, SavedGroup, content_of
from gristmill_env.saved.summary import GroupStats, Values, all_same, figure, histogram, quantile

_HEIGHT = 72
_TEASER = 140


def write_page(groups: Callable[[], Iterable[SavedGroup]], path: Path, title: str) -> GroupStats:
    """Writes `path` completely or not at all. `groups`: iterates from the start at each call, and is called repeatedly.

    Returns the summary at the top of the page.
    """
    summary = GroupStats.of(groups())
    style, script = _resource("page.css"), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    with complete_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as page:
        page.write(
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        )
        first = next(iter(groups()), None)
        page.write(head_html(title, first, summary))
        page.write('<main id="groups">\n')
        for number, group in enumerate(groups()):
            page.write(group_html(group, number, opened=number == 0))
        page.write(f"</main>\n<script>{script}</script>\n</body>\n</html>\n")
    return summary


def _resource(name: str) -> str:
    return (files("gristmill_env.saved") / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def head_html(title: str, first: SavedGroup | None, summary: GroupStats) -> str:
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


def _facts(summary: GroupStats) -> list[tuple[str, str, str]]:
    facts = [
        ("groups", str(summary.groups), f"{summary.completions} completions"),
        ("mean total", figure(summary.rewards.mean), _spread(summary.rewards)),
        ("same score", share(summary.same, summary.groups), "groups that tell nothing apart"),
        ("cut short", share(summary.truncated, summary.completions), "completions without their end"),
    ]
    if summary.tokens:
        mean = sum(summary.tokens) / len(summary.tokens)
        facts.append(("tokens", f"{mean:.0f}", f"mean; 90 % have {quantile(summary.tokens, 0.9)} or fewer"))
    if summary.failed:
        facts.append(("failed", str(summary.failed), "completions on which a reward failed"))
    return facts


def _spread(values: Values) -> str:
    return f"{figure(values.low)} to {figure(values.high)}" if values.count else "no totals"


def _fact(name: str, value: str, note: str) -> str:
    return f"<div><dt>{escaped(name)}</dt><dd><b>{escaped(value)}</b><span>{escaped(note)}</span></dd></div>"


def _distribution(summary: GroupStats) -> str:
    bars = histogram(summary.totals)
    if not bars:
        return ""
    top = max(bar.count for bar in bars)
    width = 100 / len(bars)
    shapes = "".join(
        f'<rect x="{at * width + 0.4:.2f}" y="{_HEIGHT - height:.2f}" width="{width - 0.8:.2f}" height="{height:.2f}">'
        f"<title>{escaped(f'{figure(bar.low)} to {figure(bar.high)}: {bar.count}')}</title></rect>"
        for at, bar in enumerate(bars)
        if (height := bar.count / top * _HEIGHT)
    )
    return (
        '<figure><figcaption>Totals of all completions</figcaption><svg role="img" aria-label="Histogram of totals" '
        f'viewBox="0 0 100 {_HEIGHT}" preserveAspectRatio="none">{shapes}</svg>'
        f'<div class="axis"><span>{figure(bars[0].low)}</span><span>{figure(bars[-1].high)}</span></div></figure>'
    )


def _rewards(summary: GroupStats) -> str:
    if not summary.parts:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{figure(values.mean)}</td>'
        f"<td>{figure(values.low) if values.count else '–'}</td><td>{figure(values.high) if values.count else '–'}</td>"
        f"<td>{values.unscored}</td></tr>"
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


def group_html(group: SavedGroup, at: int, *, opened: bool) -> str:
    """Renders a group as HTML. `at`: position in the file, from 0."""
    totals = group.totals
    mean = sum(totals) / len(totals) if totals else None
    data = {
        "number": str(at),
        "mean": "" if mean is None else repr(mean),
        "spread": repr(max(totals) - min(totals)) if totals else "",
        "tokens": str(max((c.tokens or 0 for c in group.completions), default=0)),
        "same": _flag(all_same(totals)),
        "cut": _flag(any(c.truncated for c in group.completions)),
        "failed": _flag(any(c.error is not None for c in group.completions)),
    }
    attributes = " ".join(f'data-{name}="{escaped(value)}"' for name, value in data.items())
    place = f"row {group.index if group.index is not None else group.row}" if _has_row(group) else f"group {at + 1}"
    teaser = " ".join(group.prompt.split())
    teaser = teaser if len(teaser) <= _TEASER else teaser[:_TEASER] + "…"
    low, high = (min(totals), max(totals)) if totals else (0.0, 0.0)
    marks = "".join(f'<i class="{_shade(c, low, high)}">{escaped(_total(c))}</i>' for c in group.completions)
    completions = "".join(_completion(c, nth, low, high) for nth, c in enumerate(group.completions, 1))
    return (
        f'<details class="group" {attributes}{" open" if opened else ""}>\n'
        f'<summary><span class="place">{escaped(place)}</span><span class="teaser">{escaped(teaser)}</span>'
        f'<span class="marks">{marks}</span></summary>\n{_prompt(group)}'
        f'<div class="completions">\n{completions}</div>\n</details>\n'
    )


def _prompt(group: SavedGroup) -> str:
    if group.messages is None:
        shown = _turn("prompt", group.prompt_text or group.prompt)
    else:
        shown = "".join(_message(message) for message in group.messages)
    if group.answer is not None:
        shown += _turn("answer", group.answer)
    if group.messages is not None and group.prompt_text is not None:
        tokens = f", {len(group.prompt_token_ids)} tokens" if group.prompt_token_ids is not None else ""
        shown += (
            f"<details><summary>as the model saw it{tokens}</summary><pre>{escaped(group.prompt_text)}</pre></details>"
        )
    return f'<section class="prompt">{shown}</section>\n'


def _completion(completion: SavedCompletion, position: int, low: float, high: float) -> str:
    tokens = [f"{completion.tokens} tokens"] if completion.tokens is not None else []
    notes = "".join(f"<span>{escaped(note)}</span>" for note in tokens)
    if completion.truncated:
        notes += '<span class="cut" title="it ended because there was no more room">cut</span>'
    parts = "".join(
        f'<span class="part{"" if value is not None else " silent"}">{escaped(name)} <b>{figure(value)}</b></span>'
        for name, value in completion.scores.items()
    )
    failed = f'<p class="failed">{escaped(completion.error)}</p>' if completion.error is not None else ""
    if completion.messages is None:
        body = (
            f"<pre>{escaped(completion.text) or '<i>empty</i>'}{'<mark>…</mark>' if completion.truncated else ''}</pre>"
        )
    else:
        body = "".join(_message(message) for message in completion.messages)
    score = "" if completion.total is None else repr(completion.total)
    return (
        f'<article data-score="{score}"><header><span class="nth">{position}</span>'
        f'<b class="total {_shade(completion, low, high)}">{escaped(_total(completion))}</b>{parts}{notes}</header>'
        f"{failed}{body}</article>\n"
    )


def _message(message: Message) -> str:
    return _turn(str(message.get("role", "")), content_of(message))


def _turn(role: str, text: str) -> str:
    return f'<div class="turn"><h3>{escaped(role)}</h3><pre>{escaped(text)}</pre></div>'


def _total(completion: SavedCompletion) -> str:
    return "failed" if completion.error is not None else figure(completion.total)


def _shade(completion: SavedCompletion, low: float, high: float) -> str:
    """Returns one of five classes, from the group's lowest to its highest total; the middle class if all are equal."""
    if completion.error is not None:
        return "shade-failed"
    if completion.total is None:
        return "shade-none"
    return f"shade-{round(4 * (completion.total - low) / (high - low)) if high > low else 2}"


def _has_row(group: SavedGroup) -> bool:
    return group.index is not None or group.row is not None


def _flag(yes: bool) -> str:
    return "1" if yes else ""


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters, and characters that reverse the reading direction."""


def escaped(text: str) -> str:
    """Returns `text` escaped for HTML content and quoted attributes; invisible characters become their code points."""
    return html.escape(_UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text), quote=True)


def share(part: int, whole: int) -> str:
    """Returns a percentage such as "12 %"; "none" if `whole` is 0."""
    return f"{100 * part / whole:.3g} %" if whole else "none"
