"""Converts a server's weight labels to the version spans of a group."""

from __future__ import annotations

from gristmill import PolicyVersion, VersionSpan
from gristmill_env.errors import UnpublishedWeightsError
from gristmill_env.transcript import Attempt


def version_spans(attempt: Attempt, granted: str, *, published: bool) -> list[VersionSpan]:
    """Returns the spans of the attempt's sampled tokens by policy version.

    `granted`: the newest version when the permit was given. `published`: whether the run's trainer updates the server.
    If not, the server's labels carry no information, and all tokens count as `granted`.

    Raises UnpublishedWeightsError when a label is not a policy version. Another model sampled those tokens, and
    training would treat them as samples of the current model.
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
    """Returns whether a server's label is a policy version ("1.20"), not vLLM's "default"."""
    try:
        PolicyVersion.parse(label)
    except ValueError:
        return False
    return True
