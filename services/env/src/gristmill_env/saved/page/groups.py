"""One group of the page: its prompt, and its completions with their scores."""

from __future__ import annotations

from gristmill_env.saved.group import Message, SavedCompletion, SavedGroup, content_of
from gristmill_env.saved.page.text import escaped, number
from gristmill_env.saved.summary import all_same

_TEASER = 140


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
        "cut": _flag(any(c.cut for c in group.completions)),
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
    if completion.cut:
        notes += '<span class="cut" title="it ended because there was no more room">cut</span>'
    parts = "".join(
        f'<span class="part{"" if value is not None else " silent"}">{escaped(name)} <b>{number(value)}</b></span>'
        for name, value in completion.scores.items()
    )
    failed = f'<p class="failed">{escaped(completion.error)}</p>' if completion.error is not None else ""
    if completion.messages is None:
        body = f"<pre>{escaped(completion.text) or '<i>empty</i>'}{'<mark>…</mark>' if completion.cut else ''}</pre>"
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
    return "failed" if completion.error is not None else number(completion.total)


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
