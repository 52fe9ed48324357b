"""Writes the page group by group, so that the HTML of a long file need not fit into memory.

A model's text is untrusted, so all of it is escaped. As a second defence, the page's content security policy allows
only the page's own script and style, by their hashes, and no network requests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path

from gristmill_env.saved.group import SavedGroup
from gristmill_env.saved.page.groups import group_html
from gristmill_env.saved.page.head import head_html
from gristmill_env.saved.page.text import escaped
from gristmill_env.saved.summary import Summary


def write_page(groups: Callable[[], Iterable[SavedGroup]], path: Path, title: str) -> Summary:
    """Writes `path` completely or not at all. `groups`: iterates from the start at each call, and is called repeatedly.

    Returns the summary at the top of the page.
    """
    summary = Summary.of(groups())
    style, script = _resource("page.css"), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8", newline="\n") as page:
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
    temporary.replace(path)
    return summary


def _resource(name: str) -> str:
    return (files("gristmill_env.saved.page") / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
