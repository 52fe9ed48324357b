"""A model server, as a run's `server_configs` describe it."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from gristmill.deployment import MODEL_URL
from gristmill.errors import ConfigError
from gristmill.internal.settings import Settings
from gristmill.model_servers import check_url


def _server_url(url: str) -> str:
    try:
        return check_url(url)
    except ConfigError as error:
        raise PydanticCustomError(error.code, "{message}", {"message": str(error)}) from error


def _http(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise PydanticCustomError("url_scheme", "a URL starts with http:// or https://, not '{url}'", {"url": url})
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_http)]
ServerUrl = Annotated[str, AfterValidator(_server_url)]


class ServerConfig(Settings):
    """A model server. With several, all must serve the same model; requests go where the fewest tokens are due."""

    model_name: str | None = None
    """Model that must be served there. Default: the served model."""

    base_url: ServerUrl = MODEL_URL
    """Its address, with or without /v1. dns+http://HOST:PORT is one server for each address of the name.
    GRISTMILL_MODEL_URL overrides the address of a single server in the YAML, and may be a list with commas. MODEL_PORT
    is the port of the default."""

    api_key: SecretStr | None = None
    """Sent as a bearer token; write ${VAR} to keep it out of the file. Never recorded."""

    server_type: Literal["auto", "vllm", "openai"] = "auto"
    """vllm gives token ids, which serve needs: vLLM with --enable-scale-out, as the model service starts it. openai is
    any OpenAI-compatible chat API: text only, for process, evaluate and try. auto asks the server which it is."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds between two checks of /v1/models while a request waits. The request keeps waiting while the server
    answers the checks. If the server does not answer, the request goes to another server. Default: 60. rollout_timeout
    limits the time of a rollout."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the load among several servers: a server of weight 2 gets twice the tokens of a server of weight 1."""

    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Requests in flight at this server. Each rollout has one request at a time. A group of the environment `dataset`
    has one request for all its completions, unless rollout_timeout or group_timeout is set or n_kwarg_is_ignored."""

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
