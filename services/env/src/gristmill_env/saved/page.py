"""Saved groups and evaluations as one self-contained HTML page: templates/groups.html.

The page is written group by group, so that the HTML of a long file need not fit into memory. `Reports`
escapes every text. The page's policy allows only its own script and style.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from gristmill.internal.disk import complete_file
from gristmill.internal.redaction import redact
from gristmill.internal.saved import Message, SavedCompletion, SavedGroup, content_of
from gristmill_env.saved.summary import SAME, GroupStats, Values, all_same, figure, histogram, quantile
from gristmill_view.report import Reports

_HEIGHT = 72
_MOST_TEXT = 32 << 20
"""Characters of completions on a page; a browser would be slow with more."""
_TEASER = 140
_THOUGHT = "<think>"


@dataclass(frozen=True)
class Head:
    """The top of an evaluation's page, which the page of saved groups does not have."""

    origin: str
    facts: Sequence[tuple[str, str, str]]
    """Name, value and note."""
    estimates: Sequence[tuple[str, ...]]
    """Figure, value, standard error, interval, prompts."""
    note: str


def write_page(
    groups: Callable[[], Iterable[SavedGroup]], path: Path, title: str, head: Head | None = None
) -> GroupStats:
    """Writes `path` completely or not at all. `groups`: iterates from the start at each call, and is called repeatedly.

    The page of many or long groups has the first of them, and says so. Returns the summary at the top of the page.
    """
    summary = GroupStats.of(groups())
    first = next(iter(groups()), None)
    scale = Scale(summary.rewards.low, summary.rewards.high) if summary.rewards.count else Scale(0.0, 0.0)
    script = (files("gristmill_env.saved") / "templates" / "groups.js").read_text(encoding="utf-8")
    shown = _First(groups(), scale, list(summary.parts))
    parts = Reports("gristmill_env.saved").render(
        "groups.html",
        title,
        script,
        empty=first is None,
        origin=_origin(first) if head is None else head.origin,
        facts=[*(() if head is None else head.facts), *_facts(summary)],
        estimates=() if head is None else head.estimates,
        note="" if head is None else head.note,
        warning=head is None and 0 < summary.groups == summary.same,
        bars=_bars(summary),
        height=_HEIGHT,
        ends=(figure(min(summary.totals, default=0.0)), figure(max(summary.totals, default=0.0))),
        rewards=list(_rewards(summary, _weights(first))),
        settings=_shown(redact(first.settings)) if first is not None and first.settings else {},
        scale=scale if summary.rewards.count else None,
        names=list(summary.parts),
        groups=shown,
        left_out=lambda: summary.groups - shown.count,
    )
    with complete_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as page:
        page.writelines(parts)
    return summary


class _First:
    """The groups of the page: the first ones, up to `_MOST_TEXT` characters of completions."""

    def __init__(self, groups: Iterable[SavedGroup], scale: Scale, names: Sequence[str]) -> None:
        self._groups, self._scale, self._names = groups, scale, names
        self.count = 0

    def __iter__(self) -> Iterator[ShownGroup]:
        characters = 0
        for group in self._groups:
            yield shown_group(group, self.count, self._scale, self._names)
            self.count += 1
            characters += sum(len(content_of(turn)) for one in group.completions for turn in one.turns)
            if characters > _MOST_TEXT:
                return


@dataclass(frozen=True)
class Scale:
    """The least and the greatest total of the whole file. All colours of the page use it."""

    low: float
    high: float

    def shade(self, completion: SavedCompletion) -> str:
        """Returns one of five classes; the middle class if all totals are the same."""
        if completion.error is not None:
            return "shade-failed"
        if completion.total is None:
            return "shade-none"
        if self.high - self.low < SAME:
            return "shade-2"
        return f"shade-{round(4 * (completion.total - self.low) / (self.high - self.low))}"


# --- The top ---------------------------------------------------------------------------------------------------
def _origin(first: SavedGroup | None) -> str:
    if first is None:
        return ""
    words = [f"model {first.model}"] if first.model else []
    if first.versions:
        words.append(f"weights {', '.join(first.versions)}")
    if first.time is not None:
        words.append(f"{first.time:%-d %B %Y, %H:%M} UTC")
    return " · ".join(words)


def _facts(summary: GroupStats) -> list[tuple[str, str, str]]:
    facts = [
        ("groups", str(summary.groups), f"{summary.completions} completions"),
        ("mean total", figure(summary.rewards.mean), _spread(summary.rewards)),
        ("same score", share(summary.same, summary.groups), "groups without a difference to learn from"),
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


def _bars(summary: GroupStats) -> list[dict[str, Any]]:
    bars = histogram(summary.totals)
    top = max((bar.count for bar in bars), default=1)
    width = 100 / max(len(bars), 1)
    return [
        {
            "x": f"{at * width + 0.4:.2f}", "width": f"{width - 0.8:.2f}", "height": f"{height:.2f}",
            "y": f"{_HEIGHT - height:.2f}", "text": f"{figure(bar.low)} to {figure(bar.high)}: {bar.count}",
        }
        for at, bar in enumerate(bars)
        if (height := bar.count / top * _HEIGHT)
    ]  # fmt: skip


def _rewards(summary: GroupStats, weights: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each reward and of the total: name, weight, mean, least, greatest, completions with a score,
    without one, and on which it failed."""
    for name, values in {**summary.parts, "total": summary.rewards}.items():
        low, high = (figure(values.low), figure(values.high)) if values.count else ("–", "–")
        weight = f"{weights[name]:g}" if name in weights else "–"
        yield name, weight, figure(values.mean), low, high, *map(str, (values.count, values.skipped, values.errors))


def _weights(group: SavedGroup | None) -> dict[str, float]:
    """Returns the weight of each reward by the reward's name, as far as the group's settings name them."""
    dataset = group.settings.get("dataset") if group is not None and group.settings else None
    specs = dataset.get("reward_functions") if isinstance(dataset, Mapping) else None
    weights = {}
    for spec in specs if isinstance(specs, list) else ():
        if isinstance(spec, Mapping) and isinstance(spec.get("weight", 1), int | float):
            # The scores of path/to/file.py:near are named near.
            weights[str(spec.get("name") or spec.get("type")).rpartition(":")[2]] = float(spec.get("weight", 1))
    return weights


def _shown(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the set values, without sections. Omits `params`, which may hold keys, because a page may be shared."""
    shown_settings: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            shown_settings |= {} if name == "params" else _shown(value)
        elif isinstance(value, list):
            shown_settings[name] = ", ".join(_reward(one) if isinstance(one, Mapping) else str(one) for one in value)
        elif value is not None:
            shown_settings[name] = str(value)
    return shown_settings


def _reward(spec: Mapping[str, Any]) -> str:
    return f"{spec.get('weight', 1):g} × {spec.get('name') or spec.get('type')}"


# --- A group ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """The value of one reward on a completion."""

    name: str
    value: str
    weight: str
    """Before the name: "0.2 × "; empty if unknown or 1."""
    silent: bool


@dataclass(frozen=True)
class Turn:
    """One message. `ours`: the start of `text` that the configuration or the template wrote."""

    role: str
    text: str
    ours: str = ""


@dataclass(frozen=True)
class Shown:
    """A completion, or several that are equal in text and scores."""

    saved: SavedCompletion
    """The first of them."""
    positions: Sequence[int]
    """From 1."""
    score: str
    total: str
    shade: str
    parts: Sequence[Part]
    advantage: str
    """The total minus the group's mean, with its sign; empty if unknown."""
    rises: bool
    turns: Sequence[Turn]
    """One turn without a role: a single answer."""


@dataclass(frozen=True)
class ShownGroup:
    """The contents of one group on the page."""

    data: dict[str, str]
    place: str
    teaser: str
    marks: Sequence[tuple[str, str]]
    """Class and total of each completion; of an evaluation, how many of its completions are right."""
    turns: Sequence[Turn]
    raw: str | None
    raw_tokens: int | None
    completions: Sequence[Shown]
    why: str
    """Why the group was dropped, or was not asked."""


def shown_group(group: SavedGroup, at: int, scale: Scale, names: Sequence[str]) -> ShownGroup:
    """Returns what the page shows of a group. `at`: position in the file, from 0. `names`: all rewards of the file."""
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
    for number, name in enumerate(names):
        values = [value for c in group.completions if (value := c.scores.get(name)) is not None]
        data[f"reward-{number}"] = repr(sum(values) / len(values)) if values else ""
    teaser = " ".join(group.prompt.split())
    if group.messages is None:
        turns = [Turn("prompt", group.prompt_text or group.prompt)]
    else:
        turns = [_turn(message) for message in group.messages]
    if group.answer is not None:
        turns.append(Turn("answer", group.answer))
    raw = group.prompt_text if group.messages is not None else None
    return ShownGroup(
        data=data,
        place=_place(group, at),
        teaser=teaser if len(teaser) <= _TEASER else teaser[:_TEASER] + "…",
        marks=_marks(group, scale),
        turns=turns,
        raw=raw,
        raw_tokens=group.prompt_tokens if raw is not None else None,
        completions=list(_collapsed(group, mean, scale)),
        why=": ".join(filter(None, (group.reason, group.error))),
    )


def _marks(group: SavedGroup, scale: Scale) -> list[tuple[str, str]]:
    judged = [completion.right for completion in group.completions if completion.right is not None]
    if not judged:
        return [(scale.shade(completion), _total(completion)) for completion in group.completions]
    right = sum(judged)
    shade = "shade-4" if right == len(judged) else "shade-0" if not right else "shade-2"
    return [(shade, f"{right} / {len(judged)}")]


def _collapsed(group: SavedGroup, mean: float | None, scale: Scale) -> Iterator[Shown]:
    """Yields the completions in order; equal ones once, at the place of the first."""
    weights = _weights(group)
    places: dict[str, list[int]] = {}
    firsts: dict[str, SavedCompletion] = {}
    for position, completion in enumerate(group.completions, 1):
        key = repr((completion.text, completion.messages, completion.scores, completion.total, completion.error,
                    completion.finish_reason, completion.tokens, completion.right))  # fmt: skip
        places.setdefault(key, []).append(position)
        firsts.setdefault(key, completion)
    for key, completion in firsts.items():
        difference = completion.total - mean if completion.total is not None and mean is not None else None
        if completion.messages is None:
            ours = _ours(group, completion.text)
            turns = [Turn("", completion.text[len(ours) :], ours)]
        else:
            turns = [_turn(message) for message in completion.messages]
        yield Shown(
            saved=completion,
            positions=places[key],
            score="" if completion.total is None else repr(completion.total),
            total=_total(completion),
            shade=scale.shade(completion),
            parts=[_part(name, value, weights.get(name)) for name, value in completion.scores.items()],
            advantage="" if difference is None else f"{difference:+.2g}" if abs(difference) >= SAME else "0",
            rises=difference is not None and difference > 0,
            turns=turns,
        )


def _part(name: str, value: float | None, weight: float | None) -> Part:
    return Part(name, figure(value), "" if weight in (None, 1.0) else f"{weight:g} × ", value is None)


def _ours(group: SavedGroup, text: str) -> str:
    """Returns the start of a completion that the model did not sample: an opened thought, and the prefill."""
    dataset = group.settings.get("dataset") if group.settings else None
    prefill = dataset.get("prefill") if isinstance(dataset, Mapping) else None
    prefill = prefill if isinstance(prefill, str) else ""
    before = (group.prompt_text or "").removesuffix(prefill).rstrip()
    thought = ""
    if before.endswith(_THOUGHT) and text.lstrip().startswith(_THOUGHT):
        thought = text[: text.index(_THOUGHT) + len(_THOUGHT)]
        rest = text[len(thought) :]
        thought += rest[: len(rest) - len(rest.lstrip())] if prefill else ""
    return thought + prefill if text.startswith(thought + prefill) else ""


def _turn(message: Message) -> Turn:
    return Turn(str(message.get("role", "")), content_of(message))


def _total(completion: SavedCompletion) -> str:
    return "failed" if completion.error is not None else figure(completion.total)


def _place(group: SavedGroup, at: int) -> str:
    row = group.row if group.index is None else group.index
    if row is None:
        return f"group {at + 1}"
    return f"row {row}" if group.source is None else f"{group.source}, row {row}"


def _flag(yes: bool) -> str:
    return "1" if yes else ""


def share(part: int, whole: int) -> str:
    """Returns a percentage such as "12 %"; "none" if `whole` is 0."""
    return f"{100 * part / whole:.3g} %" if whole else "none"
