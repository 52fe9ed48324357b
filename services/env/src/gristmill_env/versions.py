"""Which policy sampled a completion: from the server's weight labels to the group's version spans."""

from __future__ import annotations

from gristmill import PolicyVersion, VersionSpan
from gristmill_env.transcript import Attempt


class UnpublishedWeightsError(Exception):
    """A completion was sampled by weights that no trainer published: the server was started again."""


def version_spans(attempt: Attempt, granted: str, *, published: bool) -> list[VersionSpan]:
    """The attempt's sampled stretches by policy version.

    `granted`: the newest version when the permit was given. `published`: whether the run's trainer
    updates the server; if not, its labels say nothing, and all counts as `granted`.

    Raises UnpublishedWeightsError when a label is no version: those tokens come from a model that is not
    the one in training, and would be learned from as if they were its own.
    """
    if not published:
        return [VersionSpan(granted, 0, len(attempt.token_ids))]
    try:
        spans = [VersionSpan(str(PolicyVersion.parse(s.version)), s.start, s.end) for s in attempt.labels]
    except ValueError as error:
        raise UnpublishedWeightsError(str(error)) from error
    if sum(span.end - span.start for span in spans) != attempt.sampled:
        raise UnpublishedWeightsError("sampled tokens carry no weight label")
    return spans


def is_version(label: str) -> bool:
    """Whether a server's label is a policy version ("1.20"), not vLLM's "default"."""
    try:
        PolicyVersion.parse(label)
    except ValueError:
        return False
    return True
