"""Environments of other projects (docs/environments-of-others.md). Each module is imported only when a run names it.

A module's environment needs an extra of this package, unless its packages are there anyway.
"""
