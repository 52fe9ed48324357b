"""Refusals as the OpenAPI document tells them: one shape, and every status that errors.py gives."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict


class Reason(BaseModel):
    """What is wrong, for a program and for a person."""

    model_config = ConfigDict(extra="forbid")

    code: str
    """Stable: clients act on it."""
    message: str
    """Names the thing and the place."""
    remedy: str
    """What to do about it."""


class Refusal(BaseModel):
    """The body of every error."""

    model_config = ConfigDict(extra="forbid")

    error: Reason


def _told(description: str, **more: Any) -> dict[str, Any]:
    # `model` brings the schema into the document; under a route that answers in another media type it would be told
    # in that one.
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{Refusal.__name__}"}}}
    return {"model": Refusal, "content": content, "description": description, **more}


_RETRY_AFTER: Final = {
    "headers": {
        "Retry-After": {
            "description": "Seconds after which the same request may succeed.",
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
        }
    }
}

REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    400: _told("The body cannot be read, or the group in it is no valid one. Nothing was stored."),
    404: _told("There is no such thing, or no run of this id."),
    409: _told("The run, the group or the batch is in a state that forbids it: read `code`."),
    410: _told("The permit or the lease ran out, and what it covered went to somebody else."),
    413: _told("The body is larger than the API takes."),
    415: _told("The body has a media type that this route does not read."),
    421: _told("The API does not answer for the host that the request names."),
    422: _told("A field is missing, unknown or out of its bounds: `message` names it."),
    429: _told("The store is full. The same request may succeed later.", **_RETRY_AFTER),
    503: _told("Redis is away. The API recovers with it.", **_RETRY_AFTER),
}
"""For `APIRouter(responses=...)`: each route of the native API may answer so. 401 and 403 are access/describe.py's."""
