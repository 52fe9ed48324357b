"""Gristmill's trajectory API: the record of generated, leased and trained groups."""
