"""The page of saved groups: self-contained, and safe whatever text a model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gristmill_env.saved import SavedGroup
from gristmill_env.saved.page import write_page
from gristmill_env.saved.summary import histogram
from gristmill_env.settings.run import differences

from .conftest import completion, group

HOSTILE = [
    "<script>document.title='taken'</script>",
    "</pre></article></details></main></script></style><script src=//evil.example/x.js></script>",
    "<img src=x onerror=alert(1)><svg onload=alert(1)><iframe srcdoc='<script>1</script>'>",
    '" onmouseover="alert(1)" x=\'',
    "<!--",
    "]]><![CDATA[&#60;script&#62;",
    "javascript:alert(1) <a href=javascript:alert(1)>x</a><style>*{display:none}</style><base href=//evil.example>",
]


class Page(HTMLParser):
    """Parses the page like a browser, as far as these tests need it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "rect", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "rect":
            return
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)

    @property
    def balanced(self) -> bool:
        return not self._open


def page_of(groups: Sequence[SavedGroup], path: Path, title: str = "Groups") -> Page:
    write_page(lambda: groups, path, title)
    return Page(path.read_text(encoding="utf-8"))


def full_of(text: str) -> list[SavedGroup]:
    """Groups with `text` in every place that a model, a row or a configuration can fill."""
    says = [{"role": text, "content": text}, {"role": "user", "content": [{"type": "text", "text": text}]}]
    return [
        group(
            completion(text, 1.0, scores={text: 1.0}, error=text, finish_reason="length"),
            completion("", None, messages=[{"role": "assistant", "content": text}, {"role": "tool", "content": text}]),
            prompt=text,
            prompt_text=text,
            messages=says,
            answer=text,
            model=text,
            versions=[text],
            settings={text: {text: text}},
        ),
        group(completion("x", 0.0), messages=None, prompt_text=text),
    ]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.slow
def test_page_shows_texts_of_models_and_rows_without_executing_them(text: str, tmp_path: Path) -> None:
    page = page_of(full_of(text), tmp_path / "page.html", text)
    harmless = page_of(full_of("words"), tmp_path / "harmless.html", "words")
    assert page.balanced
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in harmless.tags]
    assert [attrs.keys() for _, attrs in page.tags] == [attrs.keys() for _, attrs in harmless.tags]
    assert page.text.count(text) >= 10


def test_page_allows_only_its_own_script_and_fetches_nothing(tmp_path: Path) -> None:
    page = page_of([group(completion("x", 1.0))], tmp_path / "page.html")
    policy = next(attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs) or ""
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "://" not in page.text


def test_page_shows_invisible_characters(tmp_path: Path) -> None:
    page = page_of([group(completion("\x1b[31m\u202eevil\x00 é 漢 👩‍🚀\ttab", 1.0))], tmp_path / "page.html")
    assert "[U+001B][31m[U+202E]evil[U+0000] é 漢 👩‍🚀\ttab" in page.text


def test_page_summarizes_the_groups(tmp_path: Path) -> None:
    groups = [
        group(
            completion("a", 1.0, scores={"accuracy": 1.0}, token_ids=[1, 2, 3]),
            completion("b", 0.5, scores={"accuracy": None}, token_ids=[1], finish_reason="length"),
            row=7,
        ),
        group(completion("c", 0.0), completion("d", 0.0), completion("e", None, error="accuracy: no"), row=9),
    ]
    page = page_of(groups, tmp_path / "page.html")
    facts = dict(zip(page.texts["dt"], page.texts["b"], strict=False))
    assert facts == {
        "groups": "2", "mean total": "0.375", "same score": "50 %", "cut short": "20 %", "tokens": "2", "failed": "1"
    }  # fmt: skip
    opened = [attrs for tag, attrs in page.tags if tag == "details" and attrs.get("class") == "group"]
    assert [(one["data-mean"], one["data-spread"], one["data-same"], one["data-cut"], one["data-failed"])
            for one in opened] == [("0.75", "0.5", "", "1", ""), ("0.0", "0.0", "1", "", "1")]  # fmt: skip
    assert "open" in opened[0]
    assert "open" not in opened[1]
    assert page.texts["i"] == ["1", "0.5", "0", "0", "failed"]
    for text in ("row 7", "3 tokens", "cut", "accuracy: no", "#### 2"):
        assert text in page.text


def test_page_without_groups_reports_that(tmp_path: Path) -> None:
    assert "No groups." in page_of([], tmp_path / "page.html").text


def test_bars_count_every_value() -> None:
    bars = histogram([0.0, 0.05, 0.1, 1.0, 1.0])
    assert [(bar.count, round(bar.low, 9)) for bar in bars if bar.count] == [(1, 0.0), (1, 0.05), (1, 0.1), (2, 0.95)]
    assert [(bar.low, bar.high, bar.count) for bar in histogram([0.3, 0.3])] == [(0.3, 0.3, 2)]
    assert histogram([]) == []


def test_page_hides_params_because_they_may_contain_keys(tmp_path: Path) -> None:
    judge = {"type": "judge", "weight": 0.5, "params": {"api_key": "secret"}}
    settings = {
        "dataset": {"split": "train", "reward_functions": [judge]},
        "environment": {"params": {"key": "secret"}},
    }
    page = page_of([group(completion("x", 1.0), settings=settings)], tmp_path / "page.html")
    assert "0.5 × judge" in page.text
    assert "train" in page.text
    assert "secret" not in page.text
    other = {"dataset": {"split": "test", "reward_functions": [{**judge, "params": {"api_key": "other"}}]}}
    assert differences(settings, other | {"environment": {"params": {}}}) == [
        "dataset.split: train -> test", "dataset.reward_functions", "environment.params"
    ]  # fmt: skip


WEIGHTED = {
    "dataset": {
        "reward_functions": [{"type": "format", "weight": 0.2}, {"type": "rewards/mine.py:accuracy", "weight": 0.8}],
        "prefill": "<answer>",
    }
}


def test_equal_completions_appear_once_with_their_number(tmp_path: Path) -> None:
    same = [completion("5", 0.2, scores={"format": 1.0}) for _ in range(4)]
    page = page_of([group(same[0], completion("2", 1.0), *same[1:])], tmp_path / "page.html")
    articles = [attrs for tag, attrs in page.tags if tag == "article"]
    assert [(one["data-score"], one["data-times"]) for one in articles] == [("0.2", "4"), ("1.0", "1")]
    assert "× 4" in page.text
    assert "1, 3, 4, 5" in page.text
    assert len(page.texts["i"]) == 5, "each completion keeps its mark"


def test_completions_that_differ_in_a_score_are_not_equal(tmp_path: Path) -> None:
    pair = [completion("5", 0.2, scores={"format": 1.0}), completion("5", 0.2, scores={"format": 0.0})]
    page = page_of([group(*pair)], tmp_path / "page.html")
    assert page.count("article") == 2


def test_page_uses_one_colour_scale_for_all_groups(tmp_path: Path) -> None:
    groups = [group(completion("a", 0.0), completion("b", 0.25)), group(completion("c", 0.25), completion("d", 1.0))]
    page = page_of(groups, tmp_path / "page.html")
    shades = [attrs["class"] for tag, attrs in page.tags if tag == "i"]
    assert shades == ["shade-0", "shade-1", "shade-1", "shade-4"]
    assert sum(attrs.get("class", "").startswith("swatch") for _, attrs in page.tags if attrs.get("class")) == 5  # type: ignore[union-attr]


def test_weights_and_advantages_are_shown(tmp_path: Path) -> None:
    pair = [completion("a", 1.0, scores={"format": 1.0, "accuracy": 1.0}), completion("b", 0.2, scores={"format": 1.0})]
    page = page_of([group(*pair, settings=WEIGHTED)], tmp_path / "page.html")
    for text in ("0.2 × format", "0.8 × accuracy", "+0.4", "-0.4"):
        assert text in page.text


def test_page_marks_the_prefill(tmp_path: Path) -> None:
    page = page_of([group(completion("<answer>5</answer>", 1.0), settings=WEIGHTED)], tmp_path / "page.html")
    spans = [(attrs.get("class"), "title" in attrs) for tag, attrs in page.tags if tag == "span"]
    assert ("ours", True) in spans
    assert "<answer>5</answer>" in page.text
    other = page_of([group(completion("5</answer>", 1.0), settings=WEIGHTED)], tmp_path / "other.html")
    assert "ours" not in [attrs.get("class") for _, attrs in other.tags]


def test_groups_sort_by_one_reward(tmp_path: Path) -> None:
    groups = [
        group(completion("a", 1.0, scores={"format": 1.0, "accuracy": 0.0})),
        group(completion("b", 1.0, scores={"format": 0.0})),
    ]
    page = page_of(groups, tmp_path / "page.html")
    options = [attrs["value"] for tag, attrs in page.tags if tag == "option"]
    assert {"-reward-0", "reward-0", "-reward-1", "reward-1"} <= set(options)
    opened = [attrs for tag, attrs in page.tags if tag == "details" and attrs.get("class") == "group"]
    assert [(one["data-reward-0"], one["data-reward-1"]) for one in opened] == [("1.0", "0.0"), ("0.0", "")]


def test_every_group_with_the_same_score_is_a_warning(tmp_path: Path) -> None:
    flat = group(completion("a", 0.0), completion("b", 0.0))
    assert "Every group scored the same" in page_of([flat, flat], tmp_path / "page.html").text
    mixed = group(completion("a", 0.0), completion("b", 1.0))
    assert "Every group scored the same" not in page_of([flat, mixed], tmp_path / "page.html").text
