"""Gristmill's trajectory API: the one place that knows what was generated, what is being trained and what was."""
