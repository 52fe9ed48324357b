"""Links of README.md, docs/ and the other pages exist, and so do the pages that the sources name."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, ROOT / "requirements" / "README.md", ROOT / "tests" / "README.md"]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """Returns the page without its fenced and inline code, in which brackets are not links."""
    return re.sub(r"`[^`\n]*`", "`x`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """Returns the ids that GitHub gives to the headings of a page."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(page: Path) -> list[str]:
    """Returns the relative links of the page whose file or heading does not exist."""
    wrong = []
    for link in LINK.findall(prose(page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken(page) == []


def test_index_links_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text())}
    assert {page.name for page in DOCS} - linked - {"README.md"} == set()


def test_broken_link_and_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two words: `a_b`\n")
    page = tmp_path / "page.md"
    page.write_text("# Page\n[a](other.md#two-words-a_b) [b](other.md#none) [c](gone.md) [d](#page) [e](https://x.y)\n")
    assert broken(page) == ["other.md#none", "gone.md"]


@pytest.mark.slow
def test_pages_that_sources_name_exist() -> None:
    missing = set()
    for name, text in tracked_texts().items():
        for page, anchor in re.findall(r"(?<![\w./-])docs/([\w-]+\.md)(?:#([\w-]+))?", text):
            path = ROOT / "docs" / page
            if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
                missing.add(f"{name}: docs/{page}#{anchor}")
    assert missing == set()


def tracked_texts() -> dict[str, str]:
    """Returns the text files that git tracks, without links to other files."""
    names = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    )
    texts = {}
    for name in names:
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(UnicodeDecodeError):
                texts[name] = path.read_text(encoding="utf-8")
    return texts


def test_every_install_command_names_a_folder_of_the_repository() -> None:
    """Our distributions are not published, so `pip install gristmill` would install a stranger's package."""
    command = re.compile(r"pip install (?:-\S+ )*(['\"]?(?:\./)?\w[\w./-]*.*)")
    folder = re.compile(r"^['\"]?((?:\./)?\w[\w./-]*)|[ '\"](\./\w[\w./-]*)")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    named = {
        name: path
        for path in tracked
        if path.endswith((".md", ".py", ".yaml", ".toml", ".sh")) and path != "tests/unit/docs/test_links.py"
        for arguments in command.findall((ROOT / path).read_text())
        for name in map("".join, folder.findall(arguments))
        if "gristmill" in name or name.startswith(("./sdk", "./view", "./cli", "./services"))
    }
    assert named, "the pattern finds the commands of docs/"
    assert {name: path for name, path in named.items() if not (ROOT / name).is_dir()} == {}
