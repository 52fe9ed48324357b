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
    """Model that must be served there. Unset: whatever is."""

    base_url: Url = MODEL_URL
    """Its address, with or without /v1. GRISTMILL_MODEL_URL stands above that of a single server in a YAML."""

    api_key: SecretStr | None = None
    """Sent as a bearer token; write ${VAR} to keep it out of the file. Never recorded."""

    server_type: Literal["auto", "vllm", "openai"] = "auto"
    """vllm gives token ids, which serve needs: vLLM with --enable-scale-out, as the model service starts it. openai is
    any OpenAI-compatible chat API: text only, for process, evaluate and try. auto asks the server which it is."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one request may take, all its completions included. Then its row is dropped as `timeout`; a server
    that answers nothing at all any more is benched instead."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the load among several servers: one of weight 2 has twice the tokens in the works of one of weight 1."""

    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Requests in flight at this server. One request asks for a whole group, unless n_kwarg_is_ignored."""

    num_requests_for_eval: int = Field(default=64, ge=1)
    """How many of them may be of an evaluation."""

    n_kwarg_is_ignored: bool = False
    """The server gives one completion whatever `n` says, so each is asked for by itself. A text server that does so is
    found out without this; one that refuses n is not."""

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
