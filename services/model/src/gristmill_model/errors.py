"""Errors before the server starts."""

from __future__ import annotations

from gristmill.errors import GristmillError


class ModelError(GristmillError):
    """The model cannot be found, built or served as asked."""
