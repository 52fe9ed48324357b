"""The report of a run: one file, complete, safe whatever text a model wrote."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.support.demo_runs import DemoSource

from gristmill_view.report import curve, visible, write_report
from gristmill_view.source import Highlight, Overview, ViewError


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href", "style")]

    def handle_data(self, data: str) -> None:
        self.text += data


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


async def test_report_has_curves_evaluations_and_samples(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    await write_report(DemoSource(lambda: 0.0), "quickstart", path)
    text = path.read_text(encoding="utf-8")
    page = Tags(text)
    assert page.tags.count("figure") >= 9
    assert "Reward by source" in page.text
    assert "source_rewards." not in page.text, "a line has the name of the source"
    assert "held-out" in page.text
    assert re.findall(r"step (\d+)</span>", text.split("<h2>Samples")[1]) == ["1", "13", "25", "36", "48", "60"]
    assert "trainer.learning_rate" in page.text
    assert names(tmp_path) == ["report.html"]


async def test_report_of_hostile_output_is_text(tmp_path: Path) -> None:
    await write_report(DemoSource(lambda: 0.0), "hostile", tmp_path / "report.html")
    page = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "img", "iframe", "h1-owned"} & set(page.tags)
    assert page.tags.count("h1") == 1
    assert page.tags.count("style") == 1
    assert "\u202e" not in page.text
    assert "<script>" in page.text


async def test_report_of_a_crashed_run_names_the_trouble_and_its_remedy(tmp_path: Path) -> None:
    await write_report(DemoSource(lambda: 0.0), "crashed", tmp_path / "report.html")
    page = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "exit code 137" in page.text
    assert "resumes" in page.text


async def test_failed_report_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ViewError):
        await write_report(DemoSource(lambda: 0.0), "nothing", tmp_path / "report.html")
    assert names(tmp_path) == []


def test_curve_spans_its_values_and_its_evaluations() -> None:
    found = curve("Reward", [1, 2, 3], {"reward": [0.0, None, 1.0]})
    assert found is not None
    assert found.lines[0].points == "0.00,100.00 100.00,0.00"
    point = {"step": 0, "score": 0.5, "n": 10, "low": -1.0, "high": 2.0}
    wide = curve("Reward", [1, 2, 3], {"reward": [0.0, 0.5, 1.0]}, evaluations=[point])
    assert wide is not None
    assert (wide.first, wide.low, wide.high) == (0, -1.0, 2.0)
    assert curve("Loss", [1], {"loss": [None]}) is None


def test_invisible_characters_become_code_points() -> None:
    assert visible("a\u202eb\x1b\x00\tc\nd\U000e0041") == "a[U+202E]b[U+001B][U+0000]\tc\nd[U+E0041]"
    assert visible("👩‍🚀 é") == "👩‍🚀 é"


@pytest.mark.slow
async def test_report_of_a_very_long_run_is_small(tmp_path: Path) -> None:
    source = DemoSource(lambda: 0.0)
    overview = await source.overview("long")
    points = [{"step": step, "score": 0.5, "n": 40, "low": 0.4, "high": 0.6} for step in range(0, 10_000, 2)]
    settings = {f"trainer.setting_{number}": "x" * 50_000 for number in range(20)}

    class Long(DemoSource):
        async def overview(self, run: str) -> Overview:
            return {**overview, "evaluations": points, "settings": settings}

    await write_report(Long(lambda: 0.0), "long", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 500_000
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<th scope="row">0</th>' in text
    assert '<th scope="row">9998</th>' in text


async def test_report_without_completions_has_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Without(DemoSource):
        async def highlights(self, run: str, steps: object) -> list[Highlight]:
            raise ViewError("view_not_installed", "pyarrow is not installed")

    await write_report(Without(lambda: 0.0), "quickstart", tmp_path / "report.html")
    page = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("figure") >= 9
    assert "Samples" not in page.text
    assert "pyarrow" in caplog.text
