"""Environments of other projects (docs/environments-of-others.md). Each module is imported only when a run names it.

A module's environment needs an extra of this package, unless its packages are there anyway.
"""

from __future__ import annotations

import importlib.util

from gristmill_env.errors import EpisodeError


def require(package: str, extra: str) -> None:
    """Raises EpisodeError if a package is not installed. `package`: as it is imported. `extra`: installs it."""
    if importlib.util.find_spec(package) is None:
        raise EpisodeError(
            "package_missing",
            f"the package {package} is not installed; install the extra {extra} of gristmill-env: "
            f"pip install -e './services/env[{extra}]'",
            package=package,
            extra=extra,
        )
