"""Which policy sampled a completion: from the server's weight labels to the group's version spans."""

from __future__ import annotations

from gristmill import PolicyVersion, VersionSpan
from gristmill_env.errors import UnpublishedWeightsError
from gristmill_env.transcript import Attempt


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
        raise UnpublishedWeightsError(
            "weights_unpublished",
            f"the model server sampled by weights that this run's trainer has not published ({error}); restart the "
            "trainer, so that it publishes them, or set publisher: none if it never does",
        ) from error
    if sum(span.end - span.start for span in spans) != attempt.sampled:
        raise UnpublishedWeightsError(
            "weight_label_missing",
            "the model server returned tokens without a weight label; serve it with `python -m gristmill_model`, or "
            "set publisher: none if no trainer publishes to it",
        )
    return spans


def is_version(label: str) -> bool:
    """Whether a server's label is a policy version ("1.20"), not vLLM's "default"."""
    try:
        PolicyVersion.parse(label)
    except ValueError:
        return False
    return True
