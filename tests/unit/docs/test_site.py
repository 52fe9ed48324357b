"""scripts/docs_site.py: the hooks with which `make docs` makes a site of docs/."""

from __future__ import annotations

from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import docs_site

ROOT = Path(__file__).resolve().parents[3]
INDEX = """# Index

## First group

1. [One](one.md): [two](two.md#part)

## Second group

- [Again](one.md)
- [3](three.md)
"""


def made(tmp_path: Path, page: str, **settings: str) -> str:
    """Returns the HTML that mkdocs.yml makes of a page, with a Markdown file next to it. Raises Abort on a warning."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "README.md").write_text("# Index\n\n## Group\n\n[Page](page.md), [other](other.md)\n")
    (docs / "page.md").write_text(page)
    (docs / "other.md").write_text("# Other\n\n## Two words: `a_b`\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(tmp_path / "site"), strict=True, **settings
    )
    build(config)
    return (tmp_path / "site" / "page.html").read_text()


def test_navigation_has_the_headings_of_the_index_and_each_page_once() -> None:
    assert docs_site.navigation(INDEX) == [
        "README.md",
        {"First group": ["one.md", "two.md"]},
        {"Second group": ["three.md"]},
    ]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("- a\n  b\n\n  c\n", "- a\n    b\n\n    c\n"),
        ("1. a:\n\n   ```sh\n   b\n     c\n   ```\n", "1. a:\n\n    ```sh\n    b\n      c\n    ```\n"),
        ("1. a\n   - b\n     c\n", "1. a\n    - b\n        c\n"),
        ("10. a\n\n    b\n", "10. a\n\n    b\n"),
        ("text\n  text\n\n    code\n", "text\n  text\n\n    code\n"),
        ("- lazy\nline\n", "- lazy\nline\n"),
    ],
)
def test_content_of_list_items_is_indented_by_four_spaces(page: str, expected: str) -> None:
    assert docs_site.indented(page) == expected


@pytest.mark.slow
def test_links_outside_docs_lead_to_the_repository(tmp_path: Path) -> None:
    page = "# Page\n\n[a](../configs/trainer.yaml) [b](../README.md#quickstart) [c](other.md#two-words-a_b)\n"
    html = made(tmp_path, page, repo_url="https://host.test/owner/name/")
    assert 'href="https://host.test/owner/name/blob/main/configs/trainer.yaml"' in html
    assert 'href="https://host.test/owner/name/blob/main/README.md#quickstart"' in html
    assert 'href="other.html#two-words-a_b"' in html


@pytest.mark.slow
def test_links_outside_docs_lead_to_the_checkout_without_a_repository(tmp_path: Path) -> None:
    image = "![curve](../benchmarks/results/learning-smollm2.svg)"
    html = made(tmp_path, f"# Page\n\n[a](../configs/trainer.yaml)\n\n{image}\n", repo_url="")
    assert 'href="../configs/trainer.yaml"' in html
    assert 'src="benchmarks/results/learning-smollm2.svg"' in html
    assert (tmp_path / "site" / "benchmarks" / "results" / "learning-smollm2.svg").is_file()


@pytest.mark.slow
def test_broken_links_and_a_differing_list_end_the_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    links = "[a](gone.md) [b](other.md#none) [c](../configs/gone.yaml) [d](/other.md)"
    differing = "1. a\n\n   b\n   c\n2. d"
    with pytest.raises(Abort):
        made(tmp_path, f"# Page\n\n{links}\n\n{differing}\n")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for problem in ("gone.md", "#none", "../configs/gone.yaml", "/other.md", "<li>"):
        assert any(problem in warning for warning in warnings), problem
