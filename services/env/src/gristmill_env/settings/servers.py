"""`server_configs:` where completions come from."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from gristmill.deployment import MODEL_URL
from gristmill.settings import Settings


def _http(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise PydanticCustomError("url_scheme", "a URL starts with http:// or https://, not '{url}'", {"url": url})
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_http)]


class ServerConfig(Settings):
    """A model server. With several, all must serve the same model; requests go where the fewest tokens are due."""

    model_name: str | None = None
    """Model that must be served there. Default: the served model."""

    base_url: Url = MODEL_URL
    """Its address, with or without /v1. GRISTMILL_MODEL_URL overrides the address of a single server in the YAML."""

    api_key: SecretStr | None = None
    """Sent as a bearer token; write ${VAR} to keep it out of the file. Never recorded."""

    server_type: Literal["auto", "vllm", "openai"] = "auto"
    """vllm gives token ids, which serve needs: vLLM with --enable-scale-out, as the model service starts it. openai is
    any OpenAI-compatible chat API: text only, for process, evaluate and try. auto asks the server which it is."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one request may take, with all its completions. Then its row is dropped as `timeout`. A server that
    answers no request at all gets no requests for a pause instead."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the load among several servers: a server of weight 2 gets twice the tokens of a server of weight 1."""

    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Requests in flight at this server. One request asks for a whole group, unless n_kwarg_is_ignored."""

    num_requests_for_eval: int = Field(default=64, ge=1)
    """Requests of an evaluation among these."""

    n_kwarg_is_ignored: bool = False
    """Request each completion separately, because the server ignores `n`. A text server that ignores `n` is detected
    without this; a server that rejects `n` is not."""

    @property
    def root_url(self) -> str:
        """The address without /v1."""
        return self.base_url.removesuffix("/v1").rstrip("/")

    @property
    def openai_url(self) -> str:
        """What /models and /chat/completions are under: the address with /v1.

        An `openai` server's address with another path is taken as it is: not all such APIs are under /v1.
        """
        if self.server_type == "openai" and urlsplit(self.base_url).path:
            return self.base_url
        return f"{self.root_url}/v1"
