"""Hooks of mkdocs.yml: makes a site of the pages in docs/, which stay as GitHub shows them.

The navigation is the index of docs/README.md. Links to files outside docs/ lead to the repository. If the site would
show other lists, code blocks or tables than GitHub, a warning names the page, and `make docs` ends.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SCHEME = "repository:"
"""Scheme of links to files outside docs/ until the page is rendered. mkdocs warns about relative links to them."""
_INDEX_LINK = re.compile(r"\]\(([\w-]+\.md)[)#]")
_OUTSIDE = re.compile(r"(!?)(\[[^\]]*\])\(\.\./([^)\s#]+)(#[^)\s]*)?\)")
_COMPARED = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "pre", "table", "tr", "blockquote")
_GITHUB = MarkdownIt("commonmark").enable("table")
_log = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the navigation."""
    config.nav = navigation((Path(config.docs_dir) / "README.md").read_text())
    return config


def navigation(index: str) -> list[Any]:
    """Returns the pages that an index links, by its headings of the second level, as `nav` of mkdocs."""
    groups: list[Any] = ["README.md"]
    seen = {"README.md"}
    for section in index.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        pages = [page for page in dict.fromkeys(_INDEX_LINK.findall(text)) if page not in seen]
        seen.update(pages)
        groups.append({title: pages})
    return groups


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks links to files outside docs/, adds images from there to the site, and indents the content of lists."""

    def outside(match: re.Match[str]) -> str:
        image, text, path, anchor = match[1], match[2], match[3], match[4] or ""
        if not (ROOT / path).exists():
            _log.warning("%s: ../%s does not exist", page.file.src_uri, path)
        if image:
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
            return f"!{text}({path})"
        return f"{text}({SCHEME}{path}{anchor})"

    return indented(_OUTSIDE.sub(outside, markdown))


def indented(markdown: str) -> str:
    """Returns the page with four spaces before all that belongs to a list item, as Python-Markdown needs it."""
    lines = markdown.split("\n")
    items = [token for token in _GITHUB.parse(markdown) if token.type == "list_item_open"]
    for depth in sorted({item.level for item in items}, reverse=True):
        for item in items:
            if item.level == depth and item.map is not None:
                width = len(f"{item.info}{item.markup} ")
                for number in range(item.map[0] + 1, item.map[1]):
                    if lines[number].startswith(" " * width):
                        lines[number] = "    " + lines[number][width:]
    return "\n".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Completes the links to files outside docs/, and compares the page with GitHub's reading of it."""
    shown, expected = structure(html), structure(_GITHUB.render(page.file.content_string))
    for tag in _COMPARED:
        if shown[tag] != expected[tag]:
            _log.warning("%s: %d <%s> on the site, %d on GitHub", page.file.src_uri, shown[tag], tag, expected[tag])
    base = f"{config.repo_url.rstrip('/')}/blob/main/" if config.repo_url else "../"
    return html.replace(f'href="{SCHEME}', f'href="{base}')


def structure(html: str) -> Counter[str]:
    """Returns how often each element occurs."""
    return Counter(re.findall(r"<(\w+)", html))
