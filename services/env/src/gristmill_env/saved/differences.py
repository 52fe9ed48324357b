"""Differences between two records of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns lines such as "dataset.temperature: 1.0 -> 0.5"; for lists and `params` (may hold keys) only names."""
    found: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if key == "params" or isinstance(before, list) or isinstance(after, list):
            found += [f"{prefix}{key}"] if before != after else []
        elif isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {before} -> {after}")
    return found
