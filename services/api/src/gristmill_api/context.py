"""The objects that the route handlers of /v1 use, and the types of their parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from pydantic import BaseModel, ConfigDict, StringConstraints, TypeAdapter, model_validator

from gristmill.internal.calls import WORD_HEADER
from gristmill_api.access.settings import Role
from gristmill_api.http.fast_route import checked
from gristmill_api.metrics import Metrics
from gristmill_api.notifications import Notifications
from gristmill_api.settings import ID_PATTERN, Limits
from gristmill_api.store import Store


@dataclass(frozen=True)
class Context:
    limits: Limits
    store: Store
    """For the creation of the run that a request to change something names (`?creation=`), and for the word of the
    environment that sends the request, if its token is an environment's."""
    notifications: Notifications
    metrics: Metrics

    def wait(self, asked: float) -> float:
        """Returns the seconds that a long poll may take."""
        return min(asked, self.limits.max_wait_s)


# async, although it awaits nothing: FastAPI runs a plain function in a thread.
async def _context(request: Request) -> Any:
    context: Context = request.app.state.context
    creation = word = None
    if request.method not in ("GET", "HEAD") and b"creation=" in request.scope["query_string"]:
        creation = checked(_CREATION.validate_python, request.query_params.get("creation"), "query", "creation")
    given = await given_word(request)
    if request.scope.get("role") is Role.ENV:
        word = given or ""
    if creation is None and word is None:
        return context
    return replace(context, store=context.store.of(creation, word))


async def given_word(request: Request) -> str | None:
    """Returns the word with which the process that sends the request registers its environments."""
    word = request.headers.get(WORD_HEADER)
    return None if word is None else checked(_WORD.validate_python, word, "header", WORD_HEADER)


Creation = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,64}$")]
"""The `creation` of a run's record."""
_CREATION = TypeAdapter(Creation)
_WORD = TypeAdapter(Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{16,128}$")])
Word = Annotated[str | None, Depends(given_word)]

Ctx = Annotated[Context, Depends(_context)]

RunId = Annotated[str, Path(pattern=ID_PATTERN)]
GroupId = Annotated[str, Path(pattern=ID_PATTERN)]

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
"""A run or group id."""
Name = Annotated[str, StringConstraints(pattern=r"^\.*[A-Za-z0-9_:-][A-Za-z0-9._:-]*$", max_length=128)]
"""A permit holder, a source of metrics or a batch id, chosen by the client. A name of dots alone is refused, because
HTTP clients remove the segments "." and ".." from a path: the request would concern the run instead."""


class RequestModel(BaseModel):
    """A JSON request body. An unknown field is an error, because its name is misspelt. A value of another type than the
    field's is an error too: true is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        """In JSON, 3.0 is a whole number too."""
        if not isinstance(given, dict):
            return given
        whole = {name for name, value in given.items() if isinstance(value, float) and value.is_integer()}
        return {name: int(value) if name in whole else value for name, value in given.items()}
