"""The version of the weights that sampled a token."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import msgspec

_LABEL = re.compile(r"([0-9]{1,15})\.([0-9]{1,15})")
"""Both numbers have at most 15 digits, because JSON readers and Lua hold such numbers exactly as doubles."""


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Weights after `step` optimizer steps of the run's `incarnation`-th trainer.

    The API increases the incarnation each time a trainer takes the run. Versions therefore only increase, although a
    trainer that resumes from a checkpoint repeats steps: 1.17 < 1.18 < 2.15. The string "2.15" is the label that the
    model server keeps and returns with every completion.

    Calls accept a PolicyVersion or its label, and sessions return PolicyVersions. The records of `gristmill.run` and
    the spans of a group have the label, as on the wire: `str(version)`.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def of(cls, version: PolicyVersion | str) -> PolicyVersion:
        """Returns the version, which may be its label. Raises ValueError as `parse`."""
        return version if isinstance(version, PolicyVersion) else cls.parse(version)

    @classmethod
    @functools.lru_cache(maxsize=1024)  # A run has few labels, and every sequence of every group names a label.
    def parse(cls, label: str) -> PolicyVersion:
        """Parses a label. Raises ValueError for any other text, including vLLM's initial label "default"."""
        match = _LABEL.fullmatch(label) if isinstance(label, str) else None
        if match is None:
            raise ValueError(f"{label!r} is not the label of a policy version such as '1.20' (incarnation.step)")
        return cls(int(match[1]), int(match[2]))


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion tokens [start, end) were sampled by the weights labelled `version` ("1.20")."""

    version: str
    start: int
    end: int
