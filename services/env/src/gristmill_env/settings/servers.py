"""`server_configs:` where completions come from."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from gristmill.deployment import MODEL_URL
from gristmill.settings import Settings


def _http(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a URL starts with http:// or https://, not '{url}'")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_http)]


class ServerConfig(Settings):
    """A model server: vLLM with --enable-scale-out, as the model service starts it."""

    model_name: str | None = None
    """Model that must be served there. Unset: whatever is."""

    base_url: Url = MODEL_URL
    """Its address, with or without /v1. GRISTMILL_MODEL_URL stands above a YAML's."""

    api_key: str | None = None
    """Sent as a bearer token; write ${VAR} to keep it out of the file. Never recorded."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one request for a group's completions may take."""

    @property
    def root_url(self) -> str:
        """The address without /v1."""
        return self.base_url.removesuffix("/v1").rstrip("/")
