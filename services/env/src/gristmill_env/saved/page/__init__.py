"""Saved groups as one self-contained HTML page."""

from gristmill_env.saved.page.write import write_page

__all__ = ["write_page"]
