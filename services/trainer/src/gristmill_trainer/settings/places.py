"""Where the parts are."""

from __future__ import annotations

from gristmill.settings import Settings


class PlaceSettings(Settings):
    """Model, trajectory API and model server."""

    model_name: str | None = None
    """Model to train: a hub id, a folder, or the name of the served model. Default: what the model server runs."""
    rollout_server_url: str | None = None
    """Trajectory API. Default: GRISTMILL_API_URL, else http://127.0.0.1:8000."""
    atropos_run: str | None = None
    """Train on the run that environments of Atropos' feed, by its id: the API's ATROPOS_RUN, usually `default`.
    Default: the run that an environment of this stack brings."""
    base_url: str | None = None
    """Model server that receives the weights, with or without /v1; several: with commas between them. Default:
    GRISTMILL_MODEL_URL, else http://127.0.0.1:9001."""
